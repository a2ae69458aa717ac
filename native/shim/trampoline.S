// SPDX-License-Identifier: Apache-2.0
// dlsym, dlvsym and dlopen: ask the shim first, then jump to the loader's own function with
// everything as the caller left it. The loader looks at its caller's address (RTLD_NEXT and
// RTLD_DEFAULT search from there, $ORIGIN and RUNPATH are the caller's), so a call in between would
// change what these functions mean.
//
// The choice of shim_choose_* comes in two registers: where to jump, or if that is zero, what to
// return. Landing pads (endbr64, bti c) keep programs with control-flow protection running.

#if defined(__x86_64__)

  .macro DEFINE_CHOICE name
  .globl \name
  .type \name, @function
  .p2align 4
\name:
shim_\name:
  .cfi_startproc
  endbr64
  pushq %rdi
  .cfi_adjust_cfa_offset 8
  pushq %rsi
  .cfi_adjust_cfa_offset 8
  pushq %rdx
  .cfi_adjust_cfa_offset 8
  movq 24(%rsp), %rcx              // fourth parameter: the caller
  call shim_choose_\name
  movq %rax, %r11
  movq %rdx, %rax
  popq %rdx
  .cfi_adjust_cfa_offset -8
  popq %rsi
  .cfi_adjust_cfa_offset -8
  popq %rdi
  .cfi_adjust_cfa_offset -8
  testq %r11, %r11
  jz 1f
  jmp *%r11
1:
  ret
  .cfi_endproc
  .size \name, . - \name
  .hidden shim_\name
  .globl shim_\name
  .endm

  .section .note.gnu.property, "a"
  .p2align 3
  .long 4, 16, 5                   // name and descriptor sizes, NT_GNU_PROPERTY_TYPE_0
  .asciz "GNU"
  .long 0xc0000002, 4, 3, 0        // x86 features: IBT and SHSTK

#elif defined(__aarch64__)

  .macro DEFINE_CHOICE name
  .globl \name
  .type \name, @function
  .p2align 4
\name:
shim_\name:
  .cfi_startproc
  hint #34                         // bti c
  stp x29, x30, [sp, #-48]!
  .cfi_def_cfa_offset 48
  .cfi_offset x29, -48
  .cfi_offset x30, -40
  mov x29, sp
  stp x0, x1, [sp, #16]
  str x2, [sp, #32]
  mov x3, x30                      // fourth parameter: the caller
  bl shim_choose_\name
  mov x16, x0
  mov x9, x1
  ldp x0, x1, [sp, #16]
  ldr x2, [sp, #32]
  ldp x29, x30, [sp], #48
  .cfi_restore x29
  .cfi_restore x30
  .cfi_def_cfa_offset 0
  cbz x16, 1f
  br x16
1:
  mov x0, x9
  ret
  .cfi_endproc
  .size \name, . - \name
  .hidden shim_\name
  .globl shim_\name
  .endm

  .section .note.gnu.property, "a"
  .p2align 3
  .long 4, 16, 5
  .asciz "GNU"
  .long 0xc0000000, 4, 1, 0        // arm64 features: BTI

#endif

  .text
  DEFINE_CHOICE dlsym
  DEFINE_CHOICE dlvsym
  DEFINE_CHOICE dlopen

  .section .note.GNU-stack, "", %progbits

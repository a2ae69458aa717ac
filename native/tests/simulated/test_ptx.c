// SPDX-License-Identifier: Apache-2.0
// PTX texts are bytes from elsewhere: whatever stands in them, loading one succeeds or fails
// cleanly, and gives back what it took.
//
// sources: simulated/engine/*.c simulated/cuda/*.c
// machine: t4
// sanitizers: plain address,undefined
#include "tests/simulated/driver_test.h"

static const char seed_text[] =
    "// generated\n.version 8.3\n.target sm_80\n.address_size 64\n/* a\nb */\n"
    ".extern .shared .align 16 .b8 smem[];\n"
    ".visible .global .align 8 .b8 buffer[4096] = {1, 2, 3};\n"
    ".global .attribute(.managed) .u64 counter;\n.const .v4 .f32 table[2][8];\n"
    ".visible .func (.param .b32 result) helper(.param .b64 x)\n{\n  ret;\n}\n"
    ".visible .entry first(\n  .param .u64 first_param_0,\n  .param .align 4 .b8 p[12]\n)\n"
    ".maxntid 128, 1, 1\n{\n  .reg .b64 %rd<3>;\n  ld.global.u64 %rd1, [counter];\n"
    "  { mov.u64 %rd2, %rd1; }\n  ret;\n}\n.entry second { ret; }\n";

static const char letters[] = "{}()[];,./*\"\\ \n.0123456789abcxyz$%_-";

static unsigned state = 12345;

static unsigned next(unsigned below) {
  state = state * 1103515245u + 12345u;
  return (state >> 8) % below;
}

// A few letters changed, cut out, or doubled; sometimes the end is missing.
static size_t mutate(char *text, size_t length) {
  for (unsigned changes = next(8); changes > 0 && length > 40; changes--) {
    unsigned at = next((unsigned)length);
    unsigned run = next(30);
    if (at + run > length) run = (unsigned)length - at;
    switch (next(4)) {
      case 0:
        text[at] = letters[next(sizeof letters - 1)];
        break;
      case 1:
        memmove(text + at, text + at + run, length - at - run);
        length -= run;
        break;
      case 2:
        memmove(text + at + run, text + at, length - at);
        length += run;
        break;
      default:
        if (next(5) == 0) length = at;
    }
  }
  text[length] = '\0';
  return length;
}

int main(void) {
  begin(0);
  size_t before = free_bytes();
  int loaded = 0;
  for (int round = 0; round < 20000; round++) {
    // A buffer of its own size each time, so that reading beyond the end is caught.
    char text[2048];
    memcpy(text, seed_text, sizeof seed_text);
    size_t length = mutate(text, sizeof seed_text - 1);
    char *exact = malloc(length + 1 > 8 ? length + 1 : 8);
    assert(exact != NULL);
    memset(exact, 0, 8);
    memcpy(exact, text, length + 1);
    CUmodule module;
    CUresult result = cuModuleLoadData(&module, exact);
    free(exact);
    if (result != CUDA_SUCCESS) {
      assert(result == CUDA_ERROR_INVALID_PTX || result == CUDA_ERROR_INVALID_IMAGE ||
             result == CUDA_ERROR_OUT_OF_MEMORY);
      continue;
    }
    loaded++;
    OK(cuModuleUnload(module));
  }
  assert(loaded > 5000);
  assert(free_bytes() == before);
  return 0;
}

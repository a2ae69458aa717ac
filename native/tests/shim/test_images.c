// SPDX-License-Identifier: Apache-2.0
// Reads variables of module images: texts, ELF files, fat binaries, and a great many broken ones.
//
// sources: shim/image.c
#include <assert.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "shim/image.h"

typedef struct tally {
  uint64_t bytes;
  int count;
  char names[4096];
} tally;

static void add(void *context, const char *name, size_t length, uint64_t bytes) {
  tally *sum = context;
  sum->bytes += bytes;
  sum->count++;
  if (strlen(sum->names) + length + 2 > sizeof sum->names) return;
  strncat(sum->names, name, length);
  strcat(sum->names, " ");
}

static tally read_image(const void *image) {
  tally sum = {0};
  image_variables(image, add, &sum);
  return sum;
}

static void expect(const char *text, uint64_t bytes, const char *names) {
  tally sum = read_image(text);
  if (sum.bytes != bytes || strcmp(sum.names, names) != 0) {
    fprintf(stderr, "%s: %llu bytes of %s\n", text, (unsigned long long)sum.bytes, sum.names);
    abort();
  }
}

#define HEAD ".version 6.0\n.target sm_50\n.address_size 64\n"

static void texts(void) {
  expect(HEAD ".global .f32 a;", 4, "a ");
  expect(HEAD ".global .align 8 .b8 a[100];\n.visible .global .u64 b[2][3];", 148, "a b ");
  expect(HEAD ".global .v4 .f32 a;.const .v2 .u16 c[10];", 56, "a c ");
  expect(HEAD ".extern .global .b8 a[100];.global .s8 b;", 1, "b ");
  expect(HEAD ".global .b8 a[] = {1, 2, 3};.global .f16x2 p;", 7, "a p ");
  expect(HEAD "// .global .b8 a[9];\n/* .global .b8 b[9]; */.global .b8 c[0x10];", 16, "c ");
  expect(HEAD ".entry k(.param .u64 x) { .shared .b8 s[9]; {.local .b8 t[9];} ret; }.global .u8 a;",
         1, "a ");
  expect(HEAD ".global .attribute(.managed) .b8 m[64];", 64, "m ");
  expect(HEAD ".global .texref t;.global .u32 a = 7;", 4, "a ");
  expect(HEAD ".global .b8 a[99999999999999999999999];", UINT64_MAX, "a ");
  expect(HEAD ".global .b64 a[4294967296][4294967296];", UINT64_MAX, "a ");
  // Other bases, suffixes, several names, and types that are not known.
  expect(HEAD ".global .b8 a[0b1000];.global .b8 b[010];.global .b8 c[0X1fU];.global .b8 d[9U];",
         56, "a b c d ");
  expect(HEAD ".global .b32 a[0B11U] [ /* 2 */ 2 ], b, c[3] = {1, 2, 3}, d;.global .u8 e;", 45,
         "a b c d e ");
  expect(HEAD ".global .bf16 a[4];.global .samplerref s;", 4, "a ");
  expect(HEAD ".global .b8 a[1024*1024*0b10];", 2 << 20, "a ");
  expect(HEAD ".global .b8 a[(1 << 20) + 4*2 - 010/2 % 3];", (1 << 20) + 7, "a ");
  expect(HEAD ".global .b8 a[1024-1023];.global .b8 b[0+5];.global .b8 c[-1 + 3];", 8, "a b c ");
  expect(HEAD ".global .b8 a[WARP_SZ*(.s64)2][1 ? 3 : 9][256>>8];", 192, "a ");
  expect(HEAD ".global .b8 a[(3 > 2 && 1 != 2) + (~0 & 6) + (1 == 2 || 0) + (1 | 8 ^ 8) + !7];", 8,
         "a ");
  expect(HEAD ".global .b8 a[1<<30<<40];", UINT64_MAX, "a ");
  expect(HEAD ".global .b8 a[] = {1, 2}, b[][2] = {{3, 4}, {5, 6}}, c;", 11, "a b c ");
  // What is not understood, the driver is asked for.
  expect(HEAD ".global .b8 a[1/0], b[09], c[0x], d[5 5], e[(((3], f[1<<-1], g[~0];", 7,
         "a b c d e f g ");
  expect("", 0, "");
  expect("nothing at all", 0, "");
}

// A cubin with two variables, as the driver's tools lay it out.
typedef struct cubin {
  Elf64_Ehdr header;
  char names[64];
  Elf64_Sym symbols[4];
  Elf64_Shdr sections[5];
} cubin;

static cubin make_cubin(void) {
  cubin made;
  memset(&made, 0, sizeof made);
  memcpy(made.header.e_ident, ELFMAG, SELFMAG);
  made.header.e_ident[EI_CLASS] = ELFCLASS64;
  made.header.e_shentsize = sizeof(Elf64_Shdr);
  made.header.e_shoff = offsetof(cubin, sections);
  made.header.e_shnum = 5;
  made.header.e_shstrndx = 1;
  memcpy(made.names, "\0.nv.global\0.nv.global.init\0one\0two\0.text", 42);
  made.sections[1] = (Elf64_Shdr){
      .sh_type = SHT_STRTAB, .sh_offset = offsetof(cubin, names), .sh_size = sizeof made.names};
  made.sections[2] = (Elf64_Shdr){.sh_name = 1, .sh_type = SHT_NOBITS};
  made.sections[3] = (Elf64_Shdr){.sh_type = SHT_SYMTAB,
                                  .sh_link = 1,
                                  .sh_offset = offsetof(cubin, symbols),
                                  .sh_size = sizeof made.symbols};
  made.sections[4] = (Elf64_Shdr){.sh_name = 36, .sh_type = SHT_PROGBITS};
  made.symbols[1] = (Elf64_Sym){28, ELF64_ST_INFO(STB_GLOBAL, STT_OBJECT), 0, 2, 0, 5000};
  made.symbols[2] = (Elf64_Sym){32, ELF64_ST_INFO(STB_GLOBAL, STT_OBJECT), 0, 2, 0, 70};
  made.symbols[3] = (Elf64_Sym){32, ELF64_ST_INFO(STB_GLOBAL, STT_FUNC), 0, 4, 0, 900};
  return made;
}

typedef struct fat {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;
  struct {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes;
    uint8_t more[24];
    uint64_t flags;
  } entry;
  cubin image;
} fat;

static fat make_fat(void) {
  fat made = {.magic = 0xba55ed50u, .version = 1, .header_bytes = 16};
  made.bytes = sizeof made.entry + sizeof made.image;
  made.entry.kind = 2;
  made.entry.header_bytes = sizeof made.entry;
  made.entry.bytes = sizeof made.image;
  made.image = make_cubin();
  return made;
}

static void binaries(void) {
  cubin image = make_cubin();
  tally sum = read_image(&image);
  assert(sum.bytes == 5070 && strcmp(sum.names, "one two ") == 0);
  fat whole = make_fat();
  assert(read_image(&whole).bytes == 5070);
  struct {
    uint32_t magic, version;
    const void *data, *unused;
  } wrapper = {0x466243b1u, 1, &whole, NULL};
  assert(read_image(&wrapper).bytes == 5070);
  whole.entry.flags = 0x2000;  // compressed: nothing can be said
  assert(read_image(&whole).count == 0);
  assert(read_image(NULL).count == 0);
}

// An image that ends right before memory that may not be read.
static void *at_an_edge(const void *image, size_t size) {
  static char *pages;
  size_t page = (size_t)sysconf(_SC_PAGESIZE), room = 4 * page;
  if (pages == NULL) {
    pages = mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert(pages != MAP_FAILED && mprotect(pages + room, page, PROT_NONE) == 0);
  }
  // Binaries are aligned, as the compiler aligns them; texts end with the last byte.
  char *start = pages + room - size;
  if (size == sizeof(fat)) start -= (uintptr_t)start % 8;
  memcpy(start, image, size);
  return start;
}

static void broken_texts(void) {
  static const char whole[] = HEAD
      ".global .align 8 .b8 a[100][] = {1,{2}}, b[(1<<2)*-3?4U:0b1];\n.entry k(.param .u64 x) { "
      "ret; } /* c */";
  char broken[sizeof whole + 1];
  unsigned seed = 3;
  for (int round = 0; round < 200000; round++) {
    memcpy(broken, whole, sizeof whole);
    size_t length = (size_t)rand_r(&seed) % sizeof whole;
    broken[length] = '\0';
    for (int i = rand_r(&seed) % 4; i > 0 && length > 0; i--) {
      broken[(size_t)rand_r(&seed) % length] = "{}[];,/*.\n\"x9()<-?"[rand_r(&seed) % 18];
    }
    read_image(at_an_edge(broken, length + 1));
  }
}

// Fat binaries tell their own size, and so does everything inside them: whatever they say, nothing
// beyond that size is read.
static void broken_binaries(void) {
  fat whole = make_fat();
  unsigned seed = 5;
  for (int round = 0; round < 200000; round++) {
    fat broken = whole;
    unsigned char *bytes = (unsigned char *)&broken.entry;
    for (int i = 1 + rand_r(&seed) % 6; i > 0; i--) {
      size_t at = (size_t)rand_r(&seed) % (sizeof broken - offsetof(fat, entry));
      bytes[at] = (unsigned char)(rand_r(&seed) % 3 == 0 ? 0xff : rand_r(&seed));
    }
    read_image(at_an_edge(&broken, sizeof broken));
  }
}

int main(void) {
  texts();
  binaries();
  broken_texts();
  broken_binaries();
  return 0;
}

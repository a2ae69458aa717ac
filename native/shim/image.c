// SPDX-License-Identifier: Apache-2.0
// Variables of a PTX text and of an ELF image (cubin), plain or in a fat binary without
// compression.
//
// Foreign bytes: an ELF image and a fat binary tell their own sizes, a text ends with a NUL, and
// nothing beyond that is read. tests fuzz these readers.
#include "image.h"

#include <elf.h>
#include <stdlib.h>
#include <string.h>

// ---- PTX ----

// Beyond blanks and comments.
static const char *skip(const char *at) {
  for (;;) {
    while (*at == ' ' || (*at >= '\t' && *at <= '\r')) at++;
    if (at[0] == '/' && at[1] == '/') {
      at += strcspn(at, "\n");
    } else if (at[0] == '/' && at[1] == '*') {
      const char *end = strstr(at + 2, "*/");
      at = end != NULL ? end + 2 : at + strlen(at);
    } else {
      return at;
    }
  }
}

static bool is_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '$' || c == '.' || c == '%';
}

static size_t word_length(const char *at) {
  size_t length = 0;
  while (is_word(at[length])) length++;
  return length;
}

static bool word_is(const char *word, size_t length, const char *text) {
  return strlen(text) == length && memcmp(word, text, length) == 0;
}

// Bytes of a type such as ".u32" or ".f16x2"; 0: not one.
static uint64_t type_bytes(const char *word, size_t length) {
  if (length < 3 || word[0] != '.' || strchr("busf", word[1]) == NULL) return 0;
  unsigned bits = 0;
  for (size_t i = 2; i < length && word[i] >= '0' && word[i] <= '9' && bits < 1000; i++) {
    bits = bits * 10 + (unsigned)(word[i] - '0');
  }
  bool is_pair = length > 2 && memcmp(word + length - 2, "x2", 2) == 0;
  return bits < 8 || bits > 128 ? 0 : (uint64_t)bits / 8 * (is_pair ? 2 : 1);
}

static uint64_t initial_values(const char *at) {
  uint64_t values = 1;
  for (int depth = 0; *at != '\0' && *at != ';'; at++) {
    depth += *at == '{';
    depth -= *at == '}';
    if (*at == ',' && depth <= 0) break;  // a further name follows
    values += *at == ',';
  }
  return values;
}

// ---- constant expressions of PTX ----

#define MOST_NESTED 64

typedef struct expression {
  const char *at;
  int nested;
  bool is_unknown;
} expression;

__extension__ typedef __int128 constant;  // saturates at UINT64_MAX

static constant saturate(constant value) {
  const constant most = UINT64_MAX;
  return value > most ? most : value < -most ? -most : value;
}

static unsigned digit_of(char c) {
  if (c >= '0' && c <= '9') return (unsigned)(c - '0');
  if (c >= 'a' && c <= 'f') return (unsigned)(c - 'a' + 10);
  if (c >= 'A' && c <= 'F') return (unsigned)(c - 'A' + 10);
  return 16;
}

// "12", "0x1f", "017", "0b101", each also with a "U".
static constant read_literal(expression *of) {
  const char *at = of->at;
  unsigned base = at[0] == '0' ? 8 : 10;
  if (at[0] == '0' && (at[1] == 'x' || at[1] == 'X')) base = 16;
  if (at[0] == '0' && (at[1] == 'b' || at[1] == 'B')) base = 2;
  if (base == 16 || base == 2) at += 2;
  const char *start = at;
  constant value = 0;
  for (; digit_of(*at) < base; at++) value = saturate(value * base + digit_of(*at));
  of->is_unknown |= at == start;
  if (*at == 'U') at++;
  of->is_unknown |= is_word(*at);
  of->at = at;
  return value;
}

static constant evaluate(expression *of, int least_rank);

static constant read_nested(expression *of, int least_rank) {
  of->is_unknown |= of->nested == MOST_NESTED;
  if (of->is_unknown) return 0;
  of->nested++;
  constant value = evaluate(of, least_rank);
  of->nested--;
  return value;
}

static constant read_operand(expression *of) {
  enum { RANK_ALL = 1, RANK_UNARY = 12 };
  of->at = skip(of->at);
  char first = *of->at;
  if (first >= '0' && first <= '9') return read_literal(of);
  if (strncmp(of->at, "WARP_SZ", 7) == 0 && !is_word(of->at[7])) {
    of->at += 7;
    return 32;
  }
  of->is_unknown |= first == '\0' || strchr("(+-!~", first) == NULL;
  if (of->is_unknown) return 0;
  of->at++;
  if (first != '(') {
    constant value = read_nested(of, RANK_UNARY);
    return first == '-' ? -value : first == '!' ? value == 0 : first == '~' ? -value - 1 : value;
  }
  of->at = skip(of->at);
  bool is_cast = *of->at == '.';
  if (is_cast) of->at += word_length(of->at);
  constant value = is_cast ? 0 : read_nested(of, RANK_ALL);
  of->at = skip(of->at);
  of->is_unknown |= *of->at != ')';
  if (!of->is_unknown) of->at++;
  return is_cast ? read_nested(of, RANK_UNARY) : value;
}

#define TWO(a, b) ((a) | (b) << 8)

typedef struct binary_operator {
  int text, rank;
} binary_operator;

static binary_operator operator_at(const char *at) {
  static const binary_operator known[] = {
      {TWO('|', '|'), 2}, {TWO('&', '&'), 3}, {TWO('=', '='), 7}, {TWO('!', '='), 7},
      {TWO('<', '='), 8}, {TWO('>', '='), 8}, {TWO('<', '<'), 9}, {TWO('>', '>'), 9},
      {'?', 1},           {'|', 4},           {'^', 5},           {'&', 6},
      {'<', 8},           {'>', 8},           {'+', 10},          {'-', 10},
      {'*', 11},          {'/', 11},          {'%', 11}};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
    int first = known[i].text & 0xff, second = known[i].text >> 8;
    if (at[0] == first && (second == 0 || at[1] == second)) return known[i];
  }
  return (binary_operator){0, 0};
}

static constant shift_left(constant value, constant by) {
  for (; by > 0 && value > 0 && value < UINT64_MAX; by--) value = saturate(value * 2);
  return value;
}

static constant apply(expression *of, int text, constant a, constant b) {
  bool divides = text == '/' || text == '%';
  bool shifts = text == TWO('<', '<') || text == TWO('>', '>');
  of->is_unknown |= (divides && b == 0) || (shifts && (a < 0 || b < 0));
  if (of->is_unknown) return 0;
  constant product;
  switch (text) {
    case TWO('|', '|'):
      return a != 0 || b != 0;
    case TWO('&', '&'):
      return a != 0 && b != 0;
    case TWO('=', '='):
      return a == b;
    case TWO('!', '='):
      return a != b;
    case TWO('<', '='):
      return a <= b;
    case TWO('>', '='):
      return a >= b;
    case TWO('<', '<'):
      return shift_left(a, b);
    case TWO('>', '>'):
      return b > 64 ? 0 : a >> (int)b;
    case '|':
      return a | b;
    case '^':
      return a ^ b;
    case '&':
      return a & b;
    case '<':
      return a < b;
    case '>':
      return a > b;
    case '+':
      return saturate(a + b);
    case '-':
      return saturate(a - b);
    case '/':
      return a / b;
    case '%':
      return a % b;
    default:
      return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : saturate(product);
  }
}

// By precedence, as in C.
static constant evaluate(expression *of, int least_rank) {
  constant value = read_operand(of);
  for (;;) {
    of->at = skip(of->at);
    binary_operator found = operator_at(of->at);
    if (of->is_unknown || found.rank == 0 || found.rank < least_rank) return value;
    of->at += found.text >> 8 != 0 ? 2 : 1;
    if (found.text != '?') {
      value = apply(of, found.text, value, read_nested(of, found.rank + 1));
      continue;
    }
    constant chosen = read_nested(of, found.rank);
    of->at = skip(of->at);
    of->is_unknown |= *of->at != ':';
    if (!of->is_unknown) of->at++;
    constant other = read_nested(of, found.rank);
    return value != 0 ? chosen : other;
  }
}

// Of a dimension; 1 if it is not understood.
static uint64_t constant_value(const char *at) {
  expression whole = {.at = at};
  constant value = evaluate(&whole, 1);
  bool is_understood = !whole.is_unknown && *whole.at == ']' && value > 0;
  return is_understood ? (uint64_t)value : 1;
}

// "[4][16]"; "[]" has as many elements as initial values. A dimension that is not understood counts
// as one: the driver tells the size once the variable is there.
static uint64_t read_dimensions(const char **text) {
  uint64_t count = 1;
  const char *at = skip(*text);
  while (*at == '[') {
    at = skip(at + 1);
    count = multiply(count, *at == ']' ? initial_values(at) : constant_value(at));
    at += strcspn(at, "]");
    if (*at == ']') at++;
    at = skip(at);
  }
  *text = at;
  return count;
}

// To the comma before a further name, or past the declaration.
static const char *past_name(const char *at) {
  for (int depth = 0; *at != '\0'; at++) {
    depth += *at == '{';
    depth -= *at == '}';
    if (*at == ';' && depth <= 0) return at + 1;
    if (*at == ',' && depth <= 0) break;
  }
  return at;
}

static bool is_reference(const char *word, size_t length) {
  return length > 3 && memcmp(word + length - 3, "ref", 3) == 0;
}

// What follows ".global" or ".const": attributes, alignment, type, and names. No variable is passed
// over because its type or size is not understood.
static const char *read_variables(const char *at, bool is_elsewhere, image_visit *visit,
                                  void *context) {
  uint64_t element = 1, vector = 1;
  for (;;) {
    at = skip(at);
    if (*at == '(') {
      at += strcspn(at, ")");
      if (*at == ')') at++;
      continue;
    }
    const char *word = at;
    size_t length = word_length(at);
    if (length == 0 && *at == ',') {
      at++;
      continue;
    }
    if (length == 0) return past_name(at);
    at += length;
    if (word_is(word, length, ".align")) {
      at = skip(at);
      at += word_length(at);
    } else if (word_is(word, length, ".v2") || word_is(word, length, ".v4")) {
      vector = (uint64_t)(word[2] - '0');
    } else if (word[0] == '.') {
      uint64_t bytes = type_bytes(word, length);
      if (bytes != 0) element = bytes;
      if (is_reference(word, length)) element = 0;
    } else {
      uint64_t bytes = multiply(read_dimensions(&at), element * vector);
      if (!is_elsewhere && bytes != 0) visit(context, word, length, bytes);
      at = past_name(at);
      if (*at != ',') return at;
    }
  }
}

static const char *past_body(const char *at) {
  for (int depth = 0; *at != '\0'; at++) {
    depth += *at == '{';
    if (*at == '}' && --depth <= 0) return at + 1;
  }
  return at;
}

static void read_ptx(const char *at, image_visit *visit, void *context) {
  bool is_elsewhere = false;
  for (at = skip(at); *at != '\0'; at = skip(at)) {
    const char *word = at;
    size_t length = word_length(at);
    if (length == 0) {
      at = *at == '{' ? past_body(at) : at + 1;
      is_elsewhere = false;
      continue;
    }
    at += length;
    if (word_is(word, length, ".extern")) is_elsewhere = true;
    if (word_is(word, length, ".global") || word_is(word, length, ".const")) {
      at = read_variables(at, is_elsewhere, visit, context);
      is_elsewhere = false;
    }
  }
}

// ---- ELF ----

static bool lies_within(uint64_t offset, uint64_t size, uint64_t total) {
  return offset <= total && size <= total - offset;
}

// An ELF image ends where its section headers or its sections do, whichever is later.
static uint64_t elf_size(const Elf64_Ehdr *header) {
  return header->e_shoff + (uint64_t)header->e_shnum * sizeof(Elf64_Shdr);
}

static bool is_variable_section(const char *name) {
  return strncmp(name, ".nv.global", 10) == 0 || strncmp(name, ".nv.constant", 12) == 0;
}

typedef struct elf_image {
  const char *start;
  uint64_t size;
  const Elf64_Shdr *sections;
  unsigned count;
} elf_image;

static const char *text_at(const elf_image *image, const Elf64_Shdr *strings, uint64_t offset) {
  if (strings->sh_type != SHT_STRTAB || offset >= strings->sh_size ||
      !lies_within(strings->sh_offset, strings->sh_size, image->size)) {
    return "";
  }
  const char *table = image->start + strings->sh_offset;
  return memchr(table + offset, '\0', strings->sh_size - offset) != NULL ? table + offset : "";
}

static void read_symbols(const elf_image *image, const Elf64_Shdr *names, const Elf64_Shdr *table,
                         image_visit *visit, void *context) {
  if (!lies_within(table->sh_offset, table->sh_size, image->size) ||
      table->sh_link >= image->count) {
    return;
  }
  const Elf64_Shdr *strings = &image->sections[table->sh_link];
  for (uint64_t at = 0; at + sizeof(Elf64_Sym) <= table->sh_size; at += sizeof(Elf64_Sym)) {
    Elf64_Sym symbol;
    memcpy(&symbol, image->start + table->sh_offset + at, sizeof symbol);
    if (ELF64_ST_TYPE(symbol.st_info) != STT_OBJECT || symbol.st_shndx >= image->count) continue;
    const char *section = text_at(image, names, image->sections[symbol.st_shndx].sh_name);
    const char *name = text_at(image, strings, symbol.st_name);
    if (!is_variable_section(section) || symbol.st_size == 0) continue;
    visit(context, name, strlen(name), symbol.st_size);
  }
}

static void read_elf(const void *start, uint64_t available, image_visit *visit, void *context) {
  Elf64_Ehdr header;
  if (available < sizeof header) return;
  memcpy(&header, start, sizeof header);
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_shentsize != sizeof(Elf64_Shdr) ||
      header.e_shstrndx >= header.e_shnum || header.e_shoff % sizeof(uint64_t) != 0 ||
      (uintptr_t)start % sizeof(uint64_t) != 0) {
    return;
  }
  uint64_t size = available == UINT64_MAX ? elf_size(&header) : available;
  if (!lies_within(header.e_shoff, (uint64_t)header.e_shnum * sizeof(Elf64_Shdr), size)) return;
  elf_image image = {.start = start,
                     .size = size,
                     .sections = (const void *)((const char *)start + header.e_shoff),
                     .count = header.e_shnum};
  for (unsigned i = 0; i < image.count; i++) {
    if (image.sections[i].sh_type != SHT_SYMTAB) continue;
    read_symbols(&image, &image.sections[header.e_shstrndx], &image.sections[i], visit, context);
  }
}

// ---- fat binaries ----

#define FAT_WRAPPER_MAGIC 0x466243b1u
#define FAT_MAGIC 0xba55ed50u
#define ELF_MAGIC 0x464c457fu
#define FAT_PTX 1
#define FAT_ELF 2
#define FAT_COMPRESSED 0xe000u /* each of these bits is a way to compress */

typedef struct fat_wrapper {
  uint32_t magic, version;
  const void *data;
} fat_wrapper;

typedef struct fat_header {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;  // of the entries that follow
} fat_header;

typedef struct fat_entry {
  uint16_t kind, version;
  uint32_t header_bytes;
  uint64_t bytes;  // of what follows the entry's header
  uint8_t more[24];
  uint64_t flags;
} fat_entry;

// Collects the largest entry's variables: the driver loads one entry, for the device at hand.
typedef struct fat_sum {
  uint64_t bytes;
} fat_sum;

static void add_bytes(void *context, const char *name, size_t length, uint64_t bytes) {
  fat_sum *sum = context;
  sum->bytes = sum->bytes + bytes < bytes ? UINT64_MAX : sum->bytes + bytes;
}

static void read_entry(const fat_entry *entry, const char *data, image_visit *visit,
                       void *context) {
  bool is_compressed = (entry->flags & FAT_COMPRESSED) != 0;
  if (is_compressed) return;
  if (entry->kind == FAT_ELF && entry->bytes >= 4 && memcmp(data, ELFMAG, SELFMAG) == 0) {
    read_elf(data, entry->bytes, visit, context);
  }
  if (entry->kind == FAT_PTX && memchr(data, '\0', entry->bytes) != NULL) {
    read_ptx(data, visit, context);
  }
}

static void read_fat(const char *start, image_visit *visit, void *context) {
  fat_header header;
  memcpy(&header, start, sizeof header);
  uint64_t end = header.header_bytes + header.bytes;
  uint64_t largest_at = 0, largest = 0;
  fat_entry entry;
  for (uint64_t at = header.header_bytes; at + sizeof entry <= end;) {
    memcpy(&entry, start + at, sizeof entry);
    if (entry.header_bytes < 16 || !lies_within(entry.header_bytes, entry.bytes, end - at)) {
      break;
    }
    fat_sum sum = {0};
    read_entry(&entry, start + at + entry.header_bytes, add_bytes, &sum);
    if (sum.bytes > largest) {
      largest = sum.bytes;
      largest_at = at;
    }
    at += entry.header_bytes + entry.bytes;
  }
  if (largest == 0) return;
  memcpy(&entry, start + largest_at, sizeof entry);
  read_entry(&entry, start + largest_at + entry.header_bytes, visit, context);
}

// ---- any image ----

// The first four bytes, 0 if it ends before: no kind of image has a NUL among them.
static uint32_t first_bytes(const unsigned char *at) {
  uint32_t bytes = 0;
  for (int i = 0; i < 4; i++) {
    if (at[i] == '\0') return 0;
    bytes |= (uint32_t)at[i] << (8 * i);
  }
  return bytes;
}

static bool is_text(uint32_t bytes) {
  for (; bytes != 0; bytes >>= 8) {
    unsigned char c = bytes & 0xff;
    if (c > '~' || (c < ' ' && strchr("\t\r\n", c) == NULL)) return false;
  }
  return true;
}

void image_variables(const void *image, image_visit *visit, void *context) {
  uint32_t magic = image == NULL ? 0 : first_bytes(image);
  if (magic == 0) return;
  if (is_text(magic)) {
    read_ptx(image, visit, context);
    return;
  }
  if (magic == FAT_WRAPPER_MAGIC) {
    fat_wrapper wrapper;
    memcpy(&wrapper, image, sizeof wrapper);
    if (wrapper.data == NULL) return;
    image = wrapper.data;
    magic = first_bytes(image);
  }
  if (magic == FAT_MAGIC) {
    read_fat(image, visit, context);
  } else if (magic == ELF_MAGIC) {
    read_elf(image, UINT64_MAX, visit, context);
  }
}

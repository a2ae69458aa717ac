// SPDX-License-Identifier: Apache-2.0
// What a PTX text declares: the names of its kernels, and variables that take device memory.
//
// Not a compiler: declarations at file scope are read, bodies are skipped.
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/driver.h"

typedef struct reader {
  const char *at;
  module *into;
  bool failed;
} reader;

// Beyond blanks and comments.
static void skip(reader *in) {
  for (;;) {
    while (isspace((unsigned char)*in->at)) in->at++;
    if (in->at[0] == '/' && in->at[1] == '/') {
      in->at += strcspn(in->at, "\n");
    } else if (in->at[0] == '/' && in->at[1] == '*') {
      const char *end = strstr(in->at + 2, "*/");
      in->at = end != NULL ? end + 2 : in->at + strlen(in->at);
    } else {
      return;
    }
  }
}

static bool is_name(char letter) {
  return isalnum((unsigned char)letter) || letter == '_' || letter == '$' || letter == '.' ||
         letter == '%';
}

static size_t word_length(const char *at) {
  size_t length = 0;
  while (is_name(at[length])) length++;
  return length;
}

static bool word_is(const char *at, size_t length, const char *wanted) {
  return length == strlen(wanted) && memcmp(at, wanted, length) == 0;
}

static char *copy_word(const char *at, size_t length) {
  char *copy = malloc(length + 1);
  if (copy == NULL) return NULL;
  memcpy(copy, at, length);
  copy[length] = '\0';
  return copy;
}

static void add_entry(reader *in, const char *at, size_t length) {
  module *into = in->into;
  char **more = realloc(into->entries, (into->entry_count + 1) * sizeof *more);
  if (more == NULL) {
    in->failed = true;
    return;
  }
  into->entries = more;
  into->entries[into->entry_count] = copy_word(at, length);
  if (into->entries[into->entry_count] != NULL) into->entry_count++;
}

// Bytes of a fundamental type such as ".u32", 0 if it is none.
static uint64_t type_bytes(const char *word, size_t length) {
  if (length < 3 || word[0] != '.' || strchr("busf", word[1]) == NULL) return 0;
  char *end;
  unsigned long bits = strtoul(word + 2, &end, 10);
  if (end == word + 2 || bits < 8 || bits > 128) return 0;
  return bits / 8;
}

// Past an initial value, to the end of the declaration.
static void skip_declaration(reader *in) {
  int depth = 0;
  for (; *in->at != '\0'; in->at++) {
    if (*in->at == '{') depth++;
    if (*in->at == '}') depth--;
    if (*in->at == ';' && depth <= 0) {
      in->at++;
      return;
    }
  }
}

static uint64_t count_initial_values(const char *at) {
  uint64_t values = 1;
  for (; *at != '\0' && *at != ';'; at++) {
    if (*at == ',') values++;
  }
  return values;
}

// "[4][16]" after a name; "[]" takes its length from the initial value.
static uint64_t read_dimensions(reader *in) {
  uint64_t count = 1;
  for (skip(in); *in->at == '['; skip(in)) {
    in->at++;
    skip(in);
    char *end;
    unsigned long long length = strtoull(in->at, &end, 0);
    if (end == in->at) length = count_initial_values(in->at);
    in->at = end;
    if (__builtin_mul_overflow(count, length, &count)) count = UINT64_MAX / 2;
    for (skip(in); *in->at == '*'; skip(in)) {  // of constant expressions, products
      in->at++;
      skip(in);
      length = strtoull(in->at, &end, 0);
      in->at = end;
      if (__builtin_mul_overflow(count, length, &count)) count = UINT64_MAX / 2;
    }
    in->at += strcspn(in->at, "]");
    if (*in->at == ']') in->at++;
  }
  return count;
}

static void add_global(reader *in, const char *name, size_t length, uint64_t size) {
  global *made = calloc(1, sizeof *made);
  char *copy = made != NULL ? copy_word(name, length) : NULL;
  if (copy == NULL) {
    free(made);
    in->failed = true;
    return;
  }
  *made = (global){.name = copy, .size = size, .next = in->into->globals};
  in->into->globals = made;
}

// After ".global" or ".const": attributes and type, then names with dimensions.
static void read_variable(reader *in, bool elsewhere) {
  uint64_t bytes = 0, vector = 1;
  for (;;) {
    skip(in);
    if (*in->at == '(') {  // of .attribute
      in->at += strcspn(in->at, ")");
      if (*in->at == ')') in->at++;
      continue;
    }
    size_t length = word_length(in->at);
    if (length == 0) break;
    const char *word = in->at;
    in->at += length;
    if (word_is(word, length, ".align")) {
      skip(in);
      in->at += word_length(in->at);
    } else if (word_is(word, length, ".v2")) {
      vector = 2;
    } else if (word_is(word, length, ".v4")) {
      vector = 4;
    } else if (word[0] == '.') {
      if (type_bytes(word, length) > 0) bytes = type_bytes(word, length);
    } else {
      uint64_t count = read_dimensions(in);
      uint64_t size = 0;
      if (__builtin_mul_overflow(count, bytes * vector, &size)) size = UINT64_MAX / 2;
      if (!elsewhere && size > 0) add_global(in, word, length, size);
      break;
    }
  }
  skip_declaration(in);
}

static void skip_body(reader *in) {
  int depth = 0;
  for (; *in->at != '\0'; in->at++) {
    if (*in->at == '{') depth++;
    if (*in->at == '}' && --depth <= 0) {
      in->at++;
      return;
    }
  }
}

bool ptx_read(const char *text, module *into) {
  reader in = {.at = text, .into = into};
  bool versioned = false, elsewhere = false;
  for (skip(&in); *in.at != '\0' && !in.failed; skip(&in)) {
    size_t length = word_length(in.at);
    if (length == 0) {
      if (*in.at == '{') {
        skip_body(&in);
      } else {
        in.at++;
      }
      elsewhere = false;
      continue;
    }
    const char *word = in.at;
    in.at += length;
    if (word_is(word, length, ".version")) {
      versioned = true;
    } else if (!versioned) {
      return false;  // the directive comes first in every PTX text
    } else if (word_is(word, length, ".extern")) {
      elsewhere = true;
    } else if (word_is(word, length, ".entry")) {
      skip(&in);
      add_entry(&in, in.at, word_length(in.at));
      in.at += word_length(in.at);
    } else if (word_is(word, length, ".global") || word_is(word, length, ".const")) {
      read_variable(&in, elsewhere);
      elsewhere = false;
    }
  }
  return versioned && !in.failed;
}

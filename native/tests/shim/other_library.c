// SPDX-License-Identifier: Apache-2.0
// A library that happens to have functions of the driver's names.
__attribute__((visibility("default"))) int cuMemAlloc_v2(void) {
  return 4711;
}
__attribute__((visibility("default"))) int cuCtxCreate_v4(void) {
  return 4712;
}

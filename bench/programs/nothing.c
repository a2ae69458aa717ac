// SPDX-License-Identifier: Apache-2.0
// A program that never touches a GPU.
int main(void) {
  return 0;
}

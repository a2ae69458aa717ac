// SPDX-License-Identifier: Apache-2.0
// Opens plugin.c deep-bound, or in a namespace of its own: what it allocates is charged all the
// same. Not linked with the driver: the plugin brings it.
#include <dlfcn.h>

#include "host.h"

typedef int plugin_function(unsigned long long *pointer, unsigned long long bytes);

static void allocate_by(void *plugin, const char *name) {
  if (plugin == NULL) FAIL("%s", dlerror());
  plugin_function *function = (plugin_function *)dlsym(plugin, name);
  EXPECT(function != NULL);
  unsigned long long pointer;
  uint64_t before = charged(0);
  GIVES(function(&pointer, 64 * GIB), CUDA_ERROR_OUT_OF_MEMORY);
  uint64_t fixed = charged(0);
  EXPECT(fixed >= before);
  OK(function(&pointer, 64 * MIB));
  EXPECT_EQUAL(charged(0), fixed + 64 * MIB);
  AGREE();
}

static void all_ways(void *plugin) {
  allocate_by(plugin, "plugin_allocate");
  allocate_by(plugin, "plugin_look_up_and_allocate");
  allocate_by(plugin, "plugin_get_proc_and_allocate");
}

static void opened(void) {
  all_ways(dlopen("plugin.so", RTLD_NOW));
}

static void opened_lazily(void) {
  all_ways(dlopen("plugin.so", RTLD_LAZY | RTLD_LOCAL));
}

static void opened_deep_bound(void) {
  all_ways(dlopen("plugin.so", RTLD_NOW | RTLD_DEEPBIND));
}

static void opened_deep_bound_and_lazily(void) {
  all_ways(dlopen("plugin.so", RTLD_LAZY | RTLD_DEEPBIND));
}

static void in_a_namespace(void) {
  all_ways(dlmopen(LM_ID_NEWLM, "plugin.so", RTLD_NOW));
}

static void in_a_namespace_lazily(void) {
  all_ways(dlmopen(LM_ID_NEWLM, "plugin.so", RTLD_LAZY));
}

// The namespace has no driver until an object in it opens one that brings it.
static void opened_inside_a_namespace(void) {
  void *opener = dlmopen(LM_ID_NEWLM, "opener.so", RTLD_NOW);
  if (opener == NULL) FAIL("%s", dlerror());
  void *(*open_other)(const char *name) = (void *(*)(const char *))dlsym(opener, "open_other");
  all_ways(open_other("plugin.so"));
}

static void in_two_namespaces_at_once(void) {
  all_ways(dlopen("plugin.so", RTLD_NOW));
  void *first = dlmopen(LM_ID_NEWLM, "plugin.so", RTLD_NOW);
  void *second = dlmopen(LM_ID_NEWLM, "plugin.so", RTLD_LAZY);
  all_ways(first);
  all_ways(second);
  all_ways(first);
}

// A pointer of one copy of the driver means the same to another.
static void namespaces_share_the_driver(void) {
  void *inside = dlmopen(LM_ID_NEWLM, "plugin.so", RTLD_NOW);
  void *outside = dlopen("plugin.so", RTLD_NOW);
  if (inside == NULL || outside == NULL) FAIL("%s", dlerror());
  unsigned long long pointer;
  OK(((plugin_function *)dlsym(inside, "plugin_allocate"))(&pointer, 10 * MIB));
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  OK(((__typeof__(&cuMemFree_v2))dlsym(driver, "cuMemFree_v2"))(pointer));
  EXPECT_EQUAL(charged(0), context_cost());
  Lmid_t space;
  OK(dlinfo(inside, RTLD_DI_LMID, &space));
  void *copy = dlmopen(space, "libcuda.so.1", RTLD_NOW);
  size_t size = 0;
  CUdeviceptr base;
  OK(((plugin_function *)dlsym(outside, "plugin_allocate"))(&pointer, 10 * MIB));
  OK(((__typeof__(&cuMemGetAddressRange_v2))dlsym(copy, "cuMemGetAddressRange_v2"))(&base, &size,
                                                                                    pointer));
  EXPECT_EQUAL(size, 10 * MIB);
}

static const test_case cases[] = {
    {"opened", opened},
    {"opened_lazily", opened_lazily},
    {"opened_deep_bound", opened_deep_bound},
    {"opened_deep_bound_and_lazily", opened_deep_bound_and_lazily},
    {"in_a_namespace", in_a_namespace},
    {"in_a_namespace_lazily", in_a_namespace_lazily},
    {"opened_inside_a_namespace", opened_inside_a_namespace},
    {"in_two_namespaces_at_once", in_two_namespaces_at_once},
    {"namespaces_share_the_driver", namespaces_share_the_driver},
    {NULL, NULL},
};

int main(int argc, char **argv) {
  return run_case(cases, argc, argv);
}

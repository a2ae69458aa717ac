// SPDX-License-Identifier: Apache-2.0
// `nvidia-smi mig`: the profiles, the instances, and cutting.
#include <stdlib.h>
#include <string.h>

#include "simulated/smi/smi.h"

enum { PROFILES = 32, MOST = 16 };

typedef struct options {
  const char *gpus, *create, *compute, *instances, *computes;
  bool creates_compute;
} options;

static int report(nvmlReturn_t result, const char *what, const smi_gpu *gpu) {
  printf("Unable to %s on GPU %2u: %s\n", what, gpu->index, nvml.nvmlErrorString(result));
  return smi_failed(result);
}

static bool can_mig(const smi_gpu *gpu) {
  return gpu->problem == NVML_SUCCESS && gpu->has_mig;
}

static bool gpu_profile(const smi_gpu *gpu, unsigned int number,
                        nvmlGpuInstanceProfileInfo_v2_t *info) {
  *info = (nvmlGpuInstanceProfileInfo_v2_t){.version = nvmlGpuInstanceProfileInfo_v2};
  return nvml.nvmlDeviceGetGpuInstanceProfileInfoV(gpu->device, number, info) == NVML_SUCCESS;
}

static bool compute_profile(nvmlGpuInstance_t instance, unsigned int number,
                            nvmlComputeInstanceProfileInfo_v2_t *info) {
  *info = (nvmlComputeInstanceProfileInfo_v2_t){.version = nvmlComputeInstanceProfileInfo_v2};
  return nvml.nvmlGpuInstanceGetComputeInstanceProfileInfoV(
             instance, number, NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, info) == NVML_SUCCESS;
}

// Names come with "MIG " or without it.
static const char *bare_name(const char *name) {
  return strncmp(name, "MIG ", 4) == 0 ? name + 4 : name;
}

static bool is_in(const char *words, unsigned int id) {
  if (words == NULL) return true;
  for (const char *at = words; at != NULL; at = strchr(at, ',')) {
    if (*at == ',') at++;
    char *end;
    if (strtoul(at, &end, 10) == id && end != at) return true;
  }
  return false;
}

// ---- lists ----

static int list_gpu_profiles(const smi_list *list, const options *given) {
  int shown = 0;
  for (unsigned int i = 0; i < list->count; i++) {
    const smi_gpu *gpu = &list->gpus[i];
    for (unsigned int number = 0; can_mig(gpu) && number < PROFILES; number++) {
      nvmlGpuInstanceProfileInfo_v2_t info;
      unsigned int left = 0;
      if (!gpu_profile(gpu, number, &info)) continue;
      nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu->device, info.id, &left);
      if (shown++ == 0) {
        puts(
            "+-------------------------------------------------------------------------------+\n"
            "| GPU instance profiles:                                                        |\n"
            "| GPU   Name               ID    Instances   Memory     P2P    SM    DEC   ENC  |\n"
            "|                                Free/Total   GiB              CE    JPEG  OFA  |\n"
            "|===============================================================================|");
      }
      printf("| %3u  MIG %-16.16s %3u %5u/%-5u %6.2f %7s %6u %5u %5u   |\n", gpu->index,
             bare_name(info.name), info.id, left, info.instanceCount,
             (double)info.memorySizeMB / 1024, info.isP2pSupported ? "Yes" : "No",
             info.multiprocessorCount, info.decoderCount, info.encoderCount);
      printf("| %63u %5u %5u   |\n", info.copyEngineCount, info.jpegCount, info.ofaCount);
      puts("+-------------------------------------------------------------------------------+");
    }
  }
  if (shown > 0) return 0;
  puts("No GPU instance profiles found: Not Supported");
  return SMI_NOT_FOUND;
}

static int list_placements(const smi_list *list, const options *given) {
  int shown = 0;
  for (unsigned int i = 0; i < list->count; i++) {
    const smi_gpu *gpu = &list->gpus[i];
    for (unsigned int number = 0; can_mig(gpu) && number < PROFILES; number++) {
      nvmlGpuInstanceProfileInfo_v2_t info;
      nvmlGpuInstancePlacement_t places[MOST];
      unsigned int count = MOST;
      if (!gpu_profile(gpu, number, &info) ||
          nvml.nvmlDeviceGetGpuInstancePossiblePlacements_v2(gpu->device, info.id, places,
                                                             &count) != NVML_SUCCESS ||
          count == 0) {
        continue;
      }
      printf("GPU %2u Profile ID %2u Placement%s: {", gpu->index, info.id, count > 1 ? "s" : " ");
      for (unsigned int k = 0; k < count; k++) printf("%s%u", k > 0 ? "," : "", places[k].start);
      printf("}:%u\n", places[0].size);
      shown++;
    }
  }
  if (shown > 0) return 0;
  puts("No GPU instance profiles found: Not Supported");
  return SMI_NOT_FOUND;
}

// Calls `visit` for each GPU instance, and returns how many there were. It may destroy it.
typedef int visitor(const smi_gpu *gpu, nvmlGpuInstance_t instance,
                    const nvmlGpuInstanceInfo_t *info, const char *name, const options *given);

static int each_instance(const smi_list *list, const options *given, visitor *visit, int *status) {
  int found = 0;
  for (unsigned int i = 0; i < list->count; i++) {
    const smi_gpu *gpu = &list->gpus[i];
    for (unsigned int number = 0; can_mig(gpu) && number < PROFILES; number++) {
      nvmlGpuInstanceProfileInfo_v2_t profile;
      nvmlGpuInstance_t instances[MOST];
      unsigned int count = MOST;
      if (!gpu_profile(gpu, number, &profile) ||
          nvml.nvmlDeviceGetGpuInstances(gpu->device, profile.id, instances, &count) !=
              NVML_SUCCESS) {
        continue;
      }
      for (unsigned int k = 0; k < count; k++) {
        nvmlGpuInstanceInfo_t info;
        if (nvml.nvmlGpuInstanceGetInfo(instances[k], &info) != NVML_SUCCESS) continue;
        if (!is_in(given->instances, info.id)) continue;
        found++;
        int done = visit(gpu, instances[k], &info, bare_name(profile.name), given);
        if (done != 0) *status = done;
      }
    }
  }
  return found;
}

static int none_found(const char *what) {
  printf("No %s found: Not Found\n", what);
  return SMI_NOT_FOUND;
}

static int show_instance(const smi_gpu *gpu, nvmlGpuInstance_t instance,
                         const nvmlGpuInstanceInfo_t *info, const char *name,
                         const options *given) {
  printf("| %3u  MIG %-16.16s%4u%9u          %u:%u     |\n", gpu->index, name, info->profileId,
         info->id, info->placement.start, info->placement.size);
  puts("+---------------------------------------------------------+");
  return 0;
}

static int count_instance(const smi_gpu *gpu, nvmlGpuInstance_t instance,
                          const nvmlGpuInstanceInfo_t *info, const char *name,
                          const options *given) {
  return 0;
}

static int list_instances(const smi_list *list, const options *given) {
  int status = 0;
  if (each_instance(list, given, count_instance, &status) == 0) return none_found("GPU instances");
  puts(
      "+---------------------------------------------------------+\n"
      "| GPU instances:                                          |\n"
      "| GPU   Name               Profile  Instance   Placement  |\n"
      "|                            ID       ID       Start:Size |\n"
      "|=========================================================|");
  each_instance(list, given, show_instance, &status);
  return status;
}

typedef int compute_visitor(const smi_gpu *gpu, const nvmlGpuInstanceInfo_t *around,
                            nvmlComputeInstance_t instance, const nvmlComputeInstanceInfo_t *info,
                            const char *name);

static int each_compute(const smi_gpu *gpu, nvmlGpuInstance_t instance,
                        const nvmlGpuInstanceInfo_t *around, const options *given,
                        compute_visitor *visit, int *found) {
  int status = 0;
  for (unsigned int number = 0; number < PROFILES; number++) {
    nvmlComputeInstanceProfileInfo_v2_t profile;
    nvmlComputeInstance_t computes[MOST];
    unsigned int count = MOST;
    if (!compute_profile(instance, number, &profile) ||
        nvml.nvmlGpuInstanceGetComputeInstances(instance, profile.id, computes, &count) !=
            NVML_SUCCESS) {
      continue;
    }
    for (unsigned int k = 0; k < count; k++) {
      nvmlComputeInstanceInfo_t info;
      if (nvml.nvmlComputeInstanceGetInfo_v2(computes[k], &info) != NVML_SUCCESS) continue;
      if (!is_in(given->computes, info.id)) continue;
      ++*found;
      int done = visit(gpu, around, computes[k], &info, bare_name(profile.name));
      if (done != 0) status = done;
    }
  }
  return status;
}

static int computes_found;

static int show_compute(const smi_gpu *gpu, const nvmlGpuInstanceInfo_t *around,
                        nvmlComputeInstance_t instance, const nvmlComputeInstanceInfo_t *info,
                        const char *name) {
  if (computes_found == 1) {
    puts(
        "+--------------------------------------------------------------------+\n"
        "| Compute instances:                                                 |\n"
        "| GPU     GPU       Name             Profile   Instance   Placement  |\n"
        "|       Instance                       ID        ID       Start:Size |\n"
        "|         ID                                                         |\n"
        "|====================================================================|");
  }
  printf("| %3u %6u      MIG %-15.15s %3u %9u          %u:%u     |\n", gpu->index, around->id, name,
         info->profileId, info->id, info->placement.start, info->placement.size);
  puts("+--------------------------------------------------------------------+");
  return 0;
}

static int show_computes(const smi_gpu *gpu, nvmlGpuInstance_t instance,
                         const nvmlGpuInstanceInfo_t *info, const char *name,
                         const options *given) {
  return each_compute(gpu, instance, info, given, show_compute, &computes_found);
}

static int list_computes(const smi_list *list, const options *given) {
  int status = 0;
  each_instance(list, given, show_computes, &status);
  return computes_found == 0 ? none_found("compute instances") : status;
}

static int show_compute_profiles(const smi_gpu *gpu, nvmlGpuInstance_t instance,
                                 const nvmlGpuInstanceInfo_t *info, const char *name,
                                 const options *given) {
  for (unsigned int number = 0; number < PROFILES; number++) {
    nvmlComputeInstanceProfileInfo_v2_t own;
    unsigned int left = 0;
    if (!compute_profile(instance, number, &own)) continue;
    nvml.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance, own.id, &left);
    if (computes_found++ == 0) {
      puts(
          "+--------------------------------------------------------------------------------------+"
          "\n"
          "| Compute instance profiles:                                                           "
          "|\n"
          "| GPU     GPU       Name             Profile  Instances   Exclusive       Shared       "
          "|\n"
          "|       Instance                       ID     Free/Total     SM       DEC   ENC   OFA  "
          "|\n"
          "|         ID                                                          CE    JPEG       "
          "|\n"
          "|======================================================================================"
          "|");
    }
    char id[16];
    // The profile that takes all of the GPU instance is marked.
    snprintf(id, sizeof id, "%u%s", own.id, left == 1 && own.instanceCount == 1 ? "*" : "");
    printf("| %3u %6u      MIG %-15.15s %4s %6u/%-6u %6u %8u %5u %5u   |\n", gpu->index, info->id,
           bare_name(own.name), id, left, own.instanceCount, own.multiprocessorCount,
           own.sharedDecoderCount, own.sharedEncoderCount, own.sharedOfaCount);
    printf("| %70u %5u         |\n", own.sharedCopyEngineCount, own.sharedJpegCount);
    puts(
        "+--------------------------------------------------------------------------------------+");
  }
  return 0;
}

static int list_compute_profiles(const smi_list *list, const options *given) {
  int status = 0;
  each_instance(list, given, show_compute_profiles, &status);
  return computes_found == 0 ? none_found("compute instance profiles") : status;
}

// ---- cutting ----

static bool is_profile(const char *word, size_t length, unsigned int id, const char *name) {
  char number[16];
  snprintf(number, sizeof number, "%u", id);
  if (length > 4 && strncmp(word, "MIG ", 4) == 0) word += 4, length -= 4;
  return (strlen(number) == length && strncmp(word, number, length) == 0) ||
         (strlen(name) == length && strncmp(word, name, length) == 0);
}

static int create_compute(const smi_gpu *gpu, nvmlGpuInstance_t instance, unsigned int id,
                          const nvmlComputeInstanceProfileInfo_v2_t *profile) {
  nvmlComputeInstance_t made;
  nvmlComputeInstanceInfo_t info = {0};
  nvmlReturn_t result = nvml.nvmlGpuInstanceCreateComputeInstance(instance, profile->id, &made);
  if (result != NVML_SUCCESS) return report(result, "create a compute instance", gpu);
  nvml.nvmlComputeInstanceGetInfo_v2(made, &info);
  printf(
      "Successfully created compute instance ID %2u on GPU %2u GPU instance ID %2u using profile"
      " MIG %s (ID %2u)\n",
      info.id, gpu->index, id, bare_name(profile->name), profile->id);
  return 0;
}

// The compute instance of all slices; `slices` are the GPU instance's.
static int create_whole_compute(const smi_gpu *gpu, nvmlGpuInstance_t instance, unsigned int id,
                                unsigned int slices) {
  for (unsigned int number = 0; number < PROFILES; number++) {
    nvmlComputeInstanceProfileInfo_v2_t profile;
    if (compute_profile(instance, number, &profile) && profile.sliceCount == slices) {
      return create_compute(gpu, instance, id, &profile);
    }
  }
  return report(NVML_ERROR_NOT_FOUND, "create a compute instance", gpu);
}

static int create_one(const smi_gpu *gpu, const char *word, size_t length, const options *given) {
  size_t name = strcspn(word, ":");
  unsigned long start = 0;
  bool has_start = name < length;
  if (has_start) start = strtoul(word + name + 1, NULL, 10);
  if (!has_start) name = length;
  for (unsigned int number = 0; number < PROFILES; number++) {
    nvmlGpuInstanceProfileInfo_v2_t profile;
    if (!gpu_profile(gpu, number, &profile) ||
        !is_profile(word, name, profile.id, bare_name(profile.name))) {
      continue;
    }
    nvmlGpuInstance_t made;
    nvmlGpuInstanceInfo_t info = {0};
    nvmlGpuInstancePlacement_t place = {.start = (unsigned int)start}, all[MOST];
    unsigned int count = MOST;
    if (has_start && nvml.nvmlDeviceGetGpuInstancePossiblePlacements_v2(
                         gpu->device, profile.id, all, &count) == NVML_SUCCESS) {
      place.size = count > 0 ? all[0].size : 0;
    }
    nvmlReturn_t result =
        has_start
            ? nvml.nvmlDeviceCreateGpuInstanceWithPlacement(gpu->device, profile.id, &place, &made)
            : nvml.nvmlDeviceCreateGpuInstance(gpu->device, profile.id, &made);
    if (result != NVML_SUCCESS) return report(result, "create a GPU instance", gpu);
    nvml.nvmlGpuInstanceGetInfo(made, &info);
    printf("Successfully created GPU instance ID %2u on GPU %2u using profile MIG %s (ID %2u)\n",
           info.id, gpu->index, bare_name(profile.name), profile.id);
    if (!given->creates_compute) return 0;
    return create_whole_compute(gpu, made, info.id, profile.sliceCount);
  }
  return report(NVML_ERROR_INVALID_ARGUMENT, "find that GPU instance profile", gpu);
}

static int create_instances(const smi_list *list, const options *given) {
  for (unsigned int i = 0; i < list->count; i++) {
    const smi_gpu *gpu = &list->gpus[i];
    if (!can_mig(gpu) || gpu->mig == 0) {
      // Several GPUs are looked through for those with MIG; one that is named has to have it.
      if (list->count > 1) continue;
      puts("No MIG-enabled devices found.");
      return SMI_NOT_FOUND;
    }
    for (const char *at = given->create; at != NULL; at = strchr(at, ',')) {
      if (*at == ',') at++;
      int status = create_one(gpu, at, strcspn(at, ","), given);
      if (status != 0) return status;
    }
  }
  return 0;
}

static int create_computes_in(const smi_gpu *gpu, nvmlGpuInstance_t instance,
                              const nvmlGpuInstanceInfo_t *info, const char *name,
                              const options *given) {
  if (*given->compute == '\0') {
    unsigned int slices = (unsigned int)strtoul(name, NULL, 10);
    return create_whole_compute(gpu, instance, info->id, slices);
  }
  for (const char *at = given->compute; at != NULL; at = strchr(at, ',')) {
    if (*at == ',') at++;
    int status = -1;
    for (unsigned int number = 0; status < 0 && number < PROFILES; number++) {
      nvmlComputeInstanceProfileInfo_v2_t profile;
      if (compute_profile(instance, number, &profile) &&
          is_profile(at, strcspn(at, ","), profile.id, bare_name(profile.name))) {
        status = create_compute(gpu, instance, info->id, &profile);
      }
    }
    if (status < 0) status = report(NVML_ERROR_NOT_FOUND, "find that compute profile", gpu);
    if (status != 0) return status;
  }
  return 0;
}

static int create_computes(const smi_list *list, const options *given) {
  int status = 0;
  if (each_instance(list, given, create_computes_in, &status) == 0) {
    return none_found("GPU instances");
  }
  return status;
}

static int destroy_instance(const smi_gpu *gpu, nvmlGpuInstance_t instance,
                            const nvmlGpuInstanceInfo_t *info, const char *name,
                            const options *given) {
  nvmlReturn_t result = nvml.nvmlGpuInstanceDestroy(instance);
  if (result != NVML_SUCCESS) return report(result, "destroy a GPU instance", gpu);
  printf("Successfully destroyed GPU instance ID %2u from GPU %2u\n", info->id, gpu->index);
  return 0;
}

static int destroy_instances(const smi_list *list, const options *given) {
  int status = 0;
  if (each_instance(list, given, destroy_instance, &status) == 0) {
    return none_found("GPU instances");
  }
  return status;
}

static int destroy_compute(const smi_gpu *gpu, const nvmlGpuInstanceInfo_t *around,
                           nvmlComputeInstance_t instance, const nvmlComputeInstanceInfo_t *info,
                           const char *name) {
  nvmlReturn_t result = nvml.nvmlComputeInstanceDestroy(instance);
  if (result != NVML_SUCCESS) return report(result, "destroy a compute instance", gpu);
  printf("Successfully destroyed compute instance ID %2u from GPU %2u GPU instance ID %2u\n",
         info->id, gpu->index, around->id);
  return 0;
}

static int destroy_computes_of(const smi_gpu *gpu, nvmlGpuInstance_t instance,
                               const nvmlGpuInstanceInfo_t *info, const char *name,
                               const options *given) {
  return each_compute(gpu, instance, info, given, destroy_compute, &computes_found);
}

static int destroy_computes(const smi_list *list, const options *given) {
  int status = 0;
  each_instance(list, given, destroy_computes_of, &status);
  return computes_found == 0 ? none_found("compute instances") : status;
}

// ---- the command ----

typedef int action(const smi_list *list, const options *given);

static const struct {
  const char *brief, *full;
  action *act;
  int takes;  // its value: 0 none, 1 needed, 2 may be left out
  size_t into;
} actions[] = {
    {"-lgip", "--list-gpu-instance-profiles", list_gpu_profiles, 0, 0},
    {"-lgipp", "--list-gpu-instance-possible-placements", list_placements, 0, 0},
    {"-lgi", "--list-gpu-instances", list_instances, 0, 0},
    {"-lci", "--list-compute-instances", list_computes, 0, 0},
    {"-lcip", "--list-compute-instance-profiles", list_compute_profiles, 0, 0},
    {"-cgi", "--create-gpu-instance", create_instances, 1, offsetof(options, create)},
    {"-cci", "--create-compute-instance", create_computes, 2, offsetof(options, compute)},
    {"-dgi", "--destroy-gpu-instance", destroy_instances, 0, 0},
    {"-dci", "--destroy-compute-instance", destroy_computes, 0, 0},
};

static const struct {
  const char *brief, *full;
  size_t into;
} values[] = {
    {"-i", "--id", offsetof(options, gpus)},
    {"-gi", "--gpu-instance-id", offsetof(options, instances)},
    {"-ci", "--compute-instance-id", offsetof(options, computes)},
};

static bool is_either(const char *word, const char *brief, const char *full) {
  return strcmp(word, brief) == 0 || strcmp(word, full) == 0;
}

static void put_into(options *given, size_t offset, const char *value) {
  *(const char **)((char *)given + offset) = value;
}

// Reads one option at `words`. Returns how many words it took, 0: it is not understood.
static int read_option(int count, char **words, options *given, action **chosen) {
  for (size_t i = 0; i < sizeof actions / sizeof actions[0]; i++) {
    if (!is_either(words[0], actions[i].brief, actions[i].full)) continue;
    bool has_value = count > 1 && words[1][0] != '-';
    if (actions[i].takes == 1 && !has_value) return 0;
    *chosen = actions[i].act;
    if (actions[i].takes == 0) return 1;
    put_into(given, actions[i].into, has_value ? words[1] : "");
    return has_value ? 2 : 1;
  }
  for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
    if (count < 2 || !is_either(words[0], values[i].brief, values[i].full)) continue;
    put_into(given, values[i].into, words[1]);
    return 2;
  }
  if (!is_either(words[0], "-C", "--default-compute-instance")) return 0;
  given->creates_compute = true;
  return 1;
}

static int show_help(void) {
  puts("Usage: nvidia-smi mig [options], of simulated GPUs\n");
  for (size_t i = 0; i < sizeof actions / sizeof actions[0]; i++) {
    printf("  %-7s %s\n", actions[i].brief, actions[i].full);
  }
  for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
    printf("  %-7s %s\n", values[i].brief, values[i].full);
  }
  puts("  -C      --default-compute-instance");
  return 0;
}

int smi_mig(int count, char **words) {
  options given = {0};
  action *chosen = NULL;
  for (int i = 0; i < count;) {
    if (is_either(words[i], "-h", "--help")) return show_help();
    int taken = read_option(count - i, words + i, &given, &chosen);
    if (taken == 0) return smi_refuse(words[i]);
    i += taken;
  }
  if (chosen == NULL) return show_help();
  static smi_list list;
  int status = smi_start();
  if (status == 0) status = smi_list_gpus(given.gpus, &list);
  return status != 0 ? status : chosen(&list, &given);
}

/* A libnvidia-ml.so.1 whose GPUs are those of a text file, read at every initialization.
 *
 * Behaves as NVML's documentation says, for the calls that Pipollux makes. A line of the file is a
 * word and pairs of NAME=VALUE; FAKE_NVML names the file:
 *
 *     driver init=N                 nvmlInit returns the error N; hang=1: it does not return
 *     gpu uuid=GPU-... name=X ...   one GPU; its values are in `struct gpu`
 *     slice uuid=MIG-... gi=1 ci=0 used=N total=N    of the GPU above
 *     process pid=N memory=N        on the GPU or slice above
 *
 * A value of -N means that the call returns the error N. `handle=N`: the GPU's handle cannot be had;
 * `lost=N`: every further call about it returns the error N; `hang=1`: its use is never returned.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6, TOO_SMALL = 7 };
#define MOST 32

struct process { unsigned pid; unsigned long long memory; };
struct gpu {
    char uuid[96], name[96];
    long long mig, used, total, util, ecc, pending_pages, retired, remap_pending, remap_failed;
    long long recovery, processes_error, handle, lost, hang, gi, ci;
    struct process processes[MOST];
    int num_processes, is_slice, num_slices;
    struct gpu *slices[MOST];
};
static struct gpu gpus[MOST], slices[MOST];
static int num_gpus, num_slices, users;

static void set(struct gpu *gpu, const char *name, const char *value) {
    struct { const char *name; long long *place; } numbers[] = {
        {"mig", &gpu->mig}, {"used", &gpu->used}, {"total", &gpu->total}, {"util", &gpu->util},
        {"ecc", &gpu->ecc}, {"pending_pages", &gpu->pending_pages}, {"retired", &gpu->retired},
        {"remap_pending", &gpu->remap_pending}, {"remap_failed", &gpu->remap_failed},
        {"recovery", &gpu->recovery}, {"processes", &gpu->processes_error},
        {"handle", &gpu->handle}, {"lost", &gpu->lost}, {"hang", &gpu->hang}, {"gi", &gpu->gi},
        {"ci", &gpu->ci},
    };
    if (!strcmp(name, "uuid")) snprintf(gpu->uuid, sizeof gpu->uuid, "%s", value);
    if (!strcmp(name, "name")) snprintf(gpu->name, sizeof gpu->name, "%s", value);
    for (unsigned i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!strcmp(name, numbers[i].name)) *numbers[i].place = atoll(value);
}

static void hang(void) { for (;;) pause(); }

int nvmlInitWithFlags(unsigned flags) {
    char line[512];
    struct gpu *above = NULL;
    FILE *file = fopen(getenv("FAKE_NVML") ? getenv("FAKE_NVML") : "", "r");
    (void)flags;
    if (!file) return 9; /* DRIVER_NOT_LOADED */
    num_gpus = num_slices = 0;
    memset(gpus, 0, sizeof gpus);
    memset(slices, 0, sizeof slices);
    while (fgets(line, sizeof line, file)) {
        char *rest = NULL, *word = strtok_r(line, " \n", &rest), *pair;
        struct process *process = NULL;
        if (!word) continue;
        if (!strcmp(word, "gpu")) above = &gpus[num_gpus++];
        if (!strcmp(word, "slice")) {
            struct gpu *parent = &gpus[num_gpus - 1];
            above = parent->slices[parent->num_slices++] = &slices[num_slices++];
            above->is_slice = 1;
        }
        if (!strcmp(word, "process")) process = &above->processes[above->num_processes++];
        while ((pair = strtok_r(NULL, " \n", &rest))) {
            char *value = strchr(pair, '=');
            if (!value) continue;
            *value++ = 0;
            if (!strcmp(word, "driver")) {
                if (!strcmp(pair, "hang")) hang();
                fclose(file);
                return atoi(value);
            }
            if (process && !strcmp(pair, "pid")) process->pid = (unsigned)atoi(value);
            else if (process) process->memory = (unsigned long long)atoll(value);
            else set(above, pair, value);
        }
    }
    fclose(file);
    users++;
    return SUCCESS;
}

int nvmlShutdown(void) { return users > 0 ? (users--, SUCCESS) : UNINITIALIZED; }

const char *nvmlErrorString(int error) {
    switch (error) {
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    case 16: return "GPU requires reset";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

#define ALIVE(gpu) do { if (!users) return UNINITIALIZED; if ((gpu)->lost) return (int)(gpu)->lost; } while (0)
#define GIVE(value, place) do { if ((value) < 0) return (int)-(value); *(place) = (value); return SUCCESS; } while (0)

int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!users) return UNINITIALIZED;
    *count = (unsigned)num_gpus;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **gpu) {
    if (!users) return UNINITIALIZED;
    if (index >= (unsigned)num_gpus) return INVALID_ARGUMENT;
    if (gpus[index].handle) return (int)gpus[index].handle;
    *gpu = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(struct gpu *gpu, char *text, unsigned length) {
    if (!users) return UNINITIALIZED;
    if (strlen(gpu->uuid) >= length) return TOO_SMALL;
    strcpy(text, gpu->uuid);
    return SUCCESS;
}

int nvmlDeviceGetName(struct gpu *gpu, char *text, unsigned length) {
    ALIVE(gpu);
    if (strlen(gpu->name) >= length) return TOO_SMALL;
    strcpy(text, gpu->name);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(struct gpu *gpu, unsigned *now, unsigned *pending) {
    ALIVE(gpu);
    if (gpu->is_slice) return INVALID_ARGUMENT;
    *pending = gpu->mig > 0;
    GIVE(gpu->mig, now);
}

int nvmlDeviceGetMaxMigDeviceCount(struct gpu *gpu, unsigned *count) {
    ALIVE(gpu);
    *count = gpu->mig > 0 ? 7 : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct gpu *gpu, unsigned index, struct gpu **slice) {
    ALIVE(gpu);
    if (index >= (unsigned)gpu->num_slices) return NOT_FOUND;
    *slice = gpu->slices[index];
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(struct gpu *gpu, unsigned *id) {
    if (!gpu->is_slice) return NOT_SUPPORTED;
    GIVE(gpu->gi, id);
}

int nvmlDeviceGetComputeInstanceId(struct gpu *gpu, unsigned *id) {
    if (!gpu->is_slice) return NOT_SUPPORTED;
    GIVE(gpu->ci, id);
}

int nvmlDeviceGetMemoryInfo(struct gpu *gpu, unsigned long long *memory) {
    ALIVE(gpu);
    if (gpu->used < 0) return (int)-gpu->used;
    memory[0] = (unsigned long long)gpu->total;
    memory[1] = (unsigned long long)(gpu->total - gpu->used);
    memory[2] = (unsigned long long)gpu->used;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(struct gpu *gpu, unsigned *rates) {
    ALIVE(gpu);
    if (gpu->hang) hang();
    if (gpu->is_slice) return NOT_SUPPORTED; /* as for MIG devices */
    rates[1] = 0;
    GIVE(gpu->util, rates);
}

int nvmlDeviceGetTotalEccErrors(struct gpu *gpu, int type, int counter, unsigned long long *count) {
    ALIVE(gpu);
    if (type != 1 || counter != 0) return INVALID_ARGUMENT;
    GIVE(gpu->ecc, count);
}

int nvmlDeviceGetRetiredPagesPendingStatus(struct gpu *gpu, int *pending) {
    ALIVE(gpu);
    GIVE(gpu->pending_pages, pending);
}

int nvmlDeviceGetRetiredPages(struct gpu *gpu, int cause, unsigned *count, unsigned long long *pages) {
    unsigned there = cause == 1 && gpu->retired > 0 ? (unsigned)gpu->retired : 0;
    ALIVE(gpu);
    if (gpu->retired < 0) return (int)-gpu->retired;
    if (*count < there || !pages) { *count = there; return there ? TOO_SMALL : SUCCESS; }
    for (unsigned i = 0; i < there; i++) pages[i] = 4096ULL * i;
    *count = there;
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(struct gpu *gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    ALIVE(gpu);
    if (gpu->remap_pending < 0) return (int)-gpu->remap_pending;
    *corrected = *uncorrected = 0;
    *pending = (unsigned)gpu->remap_pending;
    *failed = (unsigned)gpu->remap_failed;
    return SUCCESS;
}

struct field { unsigned id, scope; long long time, latency; int type, error; union { unsigned number; unsigned long long wide; } value; };

int nvmlDeviceGetFieldValues(struct gpu *gpu, int count, struct field *fields) {
    ALIVE(gpu);
    for (int i = 0; i < count; i++) {
        fields[i].error = gpu->recovery < 0 ? (int)-gpu->recovery : SUCCESS;
        if (fields[i].id != 230) fields[i].error = NOT_SUPPORTED;
        fields[i].value.number = (unsigned)gpu->recovery;
    }
    return SUCCESS;
}

struct process_info { unsigned pid; unsigned long long memory; unsigned gi, ci; };

int nvmlDeviceGetComputeRunningProcesses_v3(struct gpu *gpu, unsigned *count, struct process_info *found) {
    unsigned there = (unsigned)gpu->num_processes;
    ALIVE(gpu);
    if (gpu->processes_error < 0) return (int)-gpu->processes_error;
    if (*count < there) { *count = there; return TOO_SMALL; }
    for (unsigned i = 0; i < there; i++)
        found[i] = (struct process_info){gpu->processes[i].pid, gpu->processes[i].memory, (unsigned)gpu->gi, (unsigned)gpu->ci};
    *count = there;
    return SUCCESS;
}

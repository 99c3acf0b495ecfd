// A stand-in for libcuda on a machine without a GPU: the entry points that stages/driver.py calls, and the project's kernels.
//
// Device memory is host memory, in memfds that other processes open through /proc/PID/fd/N, so nothing has a name that a killed
// process leaves behind. A stream is a thread that runs its operations in order. What a test wants to go wrong is set by the
// emulated_* functions at the end.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kernels.cu"

typedef int CUresult;
typedef uint64_t CUdeviceptr;

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600 };
enum Kind { RECORD, WAIT_EVENT, WAIT_VALUE, WRITE_VALUE, COPY, SET, HOST_FUNCTION, KERNEL_LAUNCH, CALL, END, NUM_KINDS };
enum { NUM_DEVICES = 8, MAX_ALLOCATIONS = 4096, MAX_PARAMETERS = 1024 };

static _Atomic int sticky_error;
static _Atomic int num_errors; // what was enqueued before the last of them is never done, not even after a reset
static _Atomic int latency_us[NUM_KINDS];        // fixed
static _Atomic int random_latency_us[NUM_KINDS]; // up to
static _Atomic int drop_every;
static _Atomic long num_host_functions;
static _Atomic long num_operations[NUM_KINDS];
static _Atomic int is_ipc_refused;
static _Atomic int has_no_peers;
static _Atomic int has_no_memory_operations;

static void sleep_us(long us) {
    struct timespec t = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&t, NULL);
}

// ---- streams ------------------------------------------------------------------------------------------------------------

// What an event stands for since it was recorded last. Streams that wait keep theirs when the event is recorded anew.
struct Record {
    _Atomic int num_users;
    _Atomic int is_done;
    int64_t done_ns; // set before is_done
};

struct Event {
    struct Record *newest; // NULL: never recorded
};

static void drop(struct Record *record) {
    if (record && --record->num_users == 0)
        free(record);
}

struct Kernel;
struct Operation {
    enum Kind kind;
    void *pointer;
    uint64_t a, b, c;
    int num_errors;
    const struct Kernel *kernel;
    struct Operation *next;
    unsigned char parameters[];
};

struct Stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct Operation *first, *last;
    int is_busy, is_capturing;
    pthread_t thread;
    _Atomic uint64_t waits_at; // address of the word that it has found too low
    struct Stream *next;
};
static struct Stream *streams;
static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;

typedef void (*Run)(unsigned char *parameters);
struct Kernel {
    const char *name;
    int num_parameters;
    const size_t *sizes;
    Run run;
};

static void rest(int *round) { // between looks at something that another stream or process changes
    if (++*round > 64)
        sleep_us(*round < 256 ? 30 : *round < 512 ? 200 : 2000);
}

static int is_lost(struct Operation *op) { return sticky_error || op->num_errors != num_errors; }

static void run(struct Operation *op, unsigned *seed, struct Stream *stream) {
    int random_us = random_latency_us[op->kind], us = latency_us[op->kind];
    if (random_us)
        us += rand_r(seed) % random_us;
    if (us)
        sleep_us(us);
    int round = 0;
    switch (op->kind) {
    case RECORD: {
        struct Record *record = op->pointer;
        record->done_ns = (int64_t)now_ns();
        record->is_done = 1;
        break;
    }
    case WAIT_EVENT: {
        struct Record *record = op->pointer;
        while (!record->is_done && !is_lost(op))
            rest(&round);
        break;
    }
    case WAIT_VALUE: {
        _Atomic uint64_t *word = (_Atomic uint64_t *)op->a;
        while ((int64_t)(atomic_load(word) - op->b) < 0 && !is_lost(op)) {
            stream->waits_at = op->a;
            rest(&round);
        }
        stream->waits_at = 0;
        break;
    }
    case WRITE_VALUE:
        atomic_store((_Atomic uint64_t *)op->a, op->b);
        break;
    case COPY:
        memcpy((void *)op->a, (void *)op->b, op->c);
        break;
    case SET:
        for (uint64_t i = 0; i < op->c; i++)
            ((uint32_t *)op->a)[i] = (uint32_t)op->b;
        break;
    case HOST_FUNCTION:
    case CALL:
        ((void (*)(void *))op->pointer)((void *)op->a);
        break;
    case KERNEL_LAUNCH:
        op->kernel->run(op->parameters);
        break;
    default:
        break;
    }
}

static void *work(void *argument) {
    struct Stream *stream = argument;
    unsigned seed = (unsigned)(uintptr_t)stream ^ (unsigned)getpid();
    for (;;) {
        pthread_mutex_lock(&stream->lock);
        stream->is_busy = 0;
        while (!stream->first)
            pthread_cond_wait(&stream->changed, &stream->lock);
        struct Operation *op = stream->first;
        stream->first = op->next;
        if (!stream->first)
            stream->last = NULL;
        stream->is_busy = 1;
        pthread_mutex_unlock(&stream->lock);
        if (op->kind == END) {
            free(op);
            pthread_mutex_lock(&streams_lock);
            struct Stream **link = &streams;
            while (*link != stream)
                link = &(*link)->next;
            *link = stream->next;
            pthread_mutex_unlock(&streams_lock);
            free(stream);
            return NULL;
        }
        if (!is_lost(op))
            run(op, &seed, stream);
        if (op->kind == RECORD || op->kind == WAIT_EVENT)
            drop(op->pointer);
        free(op);
    }
}

static void append(struct Stream *stream, struct Operation value, const void *parameters, size_t num_bytes) {
    struct Operation *op = malloc(sizeof *op + num_bytes);
    *op = value;
    op->num_errors = num_errors;
    if (num_bytes)
        memcpy(op->parameters, parameters, num_bytes);
    num_operations[op->kind]++;
    pthread_mutex_lock(&stream->lock);
    if (stream->last)
        stream->last->next = op;
    else
        stream->first = op;
    stream->last = op;
    pthread_cond_signal(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
}

static CUresult put(struct Stream *stream, struct Operation value, const void *parameters, size_t num_bytes) {
    if (sticky_error)
        return sticky_error;
    if (!stream)
        return INVALID_HANDLE;
    append(stream, value, parameters, num_bytes);
    return SUCCESS;
}

#define PUT(stream, ...) put(stream, (struct Operation){__VA_ARGS__}, NULL, 0)

CUresult cuStreamCreateWithPriority(struct Stream **out, unsigned flags, int priority) {
    if (sticky_error)
        return sticky_error;
    struct Stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 1 << 20);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_mutex_lock(&streams_lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&streams_lock);
    if (pthread_create(&stream->thread, &attributes, work, stream))
        return OUT_OF_MEMORY;
    *out = stream;
    return SUCCESS;
}

CUresult cuStreamDestroy_v2(struct Stream *stream) {
    append(stream, (struct Operation){.kind = END}, NULL, 0); // after an error too
    return sticky_error;
}

CUresult cuStreamQuery(struct Stream *stream) {
    if (sticky_error)
        return sticky_error;
    pthread_mutex_lock(&stream->lock);
    int is_working = stream->is_busy || stream->first;
    pthread_mutex_unlock(&stream->lock);
    return is_working ? NOT_READY : SUCCESS;
}

CUresult cuStreamSynchronize(struct Stream *stream) {
    CUresult result;
    while ((result = cuStreamQuery(stream)) == NOT_READY)
        sleep_us(20);
    return result;
}

CUresult cuStreamIsCapturing(struct Stream *stream, int *status) {
    *status = stream->is_capturing;
    return sticky_error;
}

CUresult cuStreamWaitValue64_v2(struct Stream *stream, CUdeviceptr address, uint64_t value, unsigned flags) {
    if (flags || address % 8)
        return INVALID_VALUE;
    return has_no_memory_operations ? 801 : PUT(stream, .kind = WAIT_VALUE, .a = address, .b = value);
}

CUresult cuStreamWriteValue64_v2(struct Stream *stream, CUdeviceptr address, uint64_t value, unsigned flags) {
    if (flags || address % 8)
        return INVALID_VALUE;
    return has_no_memory_operations ? 801 : PUT(stream, .kind = WRITE_VALUE, .a = address, .b = value);
}

struct MemoryOp {
    unsigned operation, pad;
    uint64_t address, value;
    unsigned flags, rest[5];
};
_Static_assert(sizeof(struct MemoryOp) == 48, "as in cuda.h");

CUresult cuStreamBatchMemOp_v2(struct Stream *stream, unsigned count, struct MemoryOp *ops, unsigned flags) {
    for (unsigned i = 0; i < count; i++) {
        CUresult result = ops[i].operation == 4   ? cuStreamWaitValue64_v2(stream, ops[i].address, ops[i].value, ops[i].flags)
                          : ops[i].operation == 5 ? cuStreamWriteValue64_v2(stream, ops[i].address, ops[i].value, ops[i].flags)
                                                  : INVALID_VALUE;
        if (result)
            return result;
    }
    return SUCCESS;
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t num_bytes, struct Stream *stream) {
    return PUT(stream, .kind = COPY, .a = to, .b = from, .c = num_bytes);
}

CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t num_words, struct Stream *stream) {
    return PUT(stream, .kind = SET, .a = address, .b = value, .c = num_words);
}

CUresult cuLaunchHostFunc(struct Stream *stream, void (*function)(void *), void *argument) {
    long n = ++num_host_functions;
    if (drop_every && n % drop_every == 0)
        return sticky_error;
    return PUT(stream, .kind = HOST_FUNCTION, .pointer = (void *)function, .a = (uint64_t)argument);
}

// ---- events -------------------------------------------------------------------------------------------------------------

static pthread_mutex_t events_lock = PTHREAD_MUTEX_INITIALIZER;

static struct Record *newest_record(struct Event *event) { // for the caller to drop
    pthread_mutex_lock(&events_lock);
    struct Record *record = event->newest;
    if (record)
        record->num_users++;
    pthread_mutex_unlock(&events_lock);
    return record;
}

static void set_newest_record(struct Event *event, struct Record *record) {
    pthread_mutex_lock(&events_lock);
    struct Record *before = event->newest;
    event->newest = record;
    pthread_mutex_unlock(&events_lock);
    drop(before);
}

CUresult cuEventCreate(struct Event **out, unsigned flags) {
    if (sticky_error)
        return sticky_error;
    *out = calloc(1, sizeof **out);
    return SUCCESS;
}

CUresult cuEventDestroy_v2(struct Event *event) {
    set_newest_record(event, NULL);
    free(event);
    return sticky_error;
}

CUresult cuEventRecord(struct Event *event, struct Stream *stream) {
    struct Record *record = calloc(1, sizeof *record);
    record->num_users = 2; // the event and the operation
    CUresult result = PUT(stream, .kind = RECORD, .pointer = record);
    if (result)
        free(record);
    else
        set_newest_record(event, record);
    return result;
}

CUresult cuStreamWaitEvent(struct Stream *stream, struct Event *event, unsigned flags) {
    struct Record *record = newest_record(event);
    if (!record)
        return sticky_error;
    CUresult result = PUT(stream, .kind = WAIT_EVENT, .pointer = record);
    if (result)
        drop(record);
    return result;
}

CUresult cuEventQuery(struct Event *event) {
    if (sticky_error)
        return sticky_error;
    struct Record *record = newest_record(event);
    CUresult result = !record || record->is_done ? SUCCESS : NOT_READY;
    drop(record);
    return result;
}

CUresult cuEventElapsedTime(float *ms, struct Event *start, struct Event *end) {
    if (sticky_error)
        return sticky_error;
    struct Record *from = newest_record(start), *to = newest_record(end);
    CUresult result = !from || !to ? INVALID_HANDLE : from->is_done && to->is_done ? SUCCESS : NOT_READY;
    if (result == SUCCESS)
        *ms = (float)((double)(to->done_ns - from->done_ns) * 1e-6);
    drop(from);
    drop(to);
    return result;
}

// ---- devices and memory -------------------------------------------------------------------------------------------------

CUresult cuInit(unsigned flags) { return SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = NUM_DEVICES, SUCCESS; }
CUresult cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal < NUM_DEVICES ? SUCCESS : INVALID_DEVICE; }
CUresult cuDeviceGetName(char *name, int length, int device) { return snprintf(name, length, "emulated GPU"), SUCCESS; }
CUresult cuDeviceGetUuid_v2(unsigned char *uuid, int device) { return memset(uuid, 0, 16), uuid[15] = device + 1, SUCCESS; }
CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = 1UL << 32, SUCCESS; }
CUresult cuDeviceCanAccessPeer(int *can, int device, int peer) { return *can = !has_no_peers && device != peer, SUCCESS; }
CUresult cuDeviceGetP2PAttribute(int *value, int attribute, int device, int peer) { return *value = !has_no_peers, SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)1, SUCCESS; }
CUresult cuCtxSetCurrent(void *context) { return sticky_error; }
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { return *free_bytes = *total = 1UL << 32, SUCCESS; }

static struct {
    CUdeviceptr address;
    size_t num_bytes;
    int fd; // -1: another process's
} allocations[MAX_ALLOCATIONS];
static pthread_mutex_t allocations_lock = PTHREAD_MUTEX_INITIALIZER;

static CUresult map(int fd, size_t num_bytes, int kept_fd, CUdeviceptr *out) {
    void *address = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED)
        return OUT_OF_MEMORY;
    pthread_mutex_lock(&allocations_lock);
    int i = 0;
    while (i < MAX_ALLOCATIONS && allocations[i].address)
        i++;
    if (i < MAX_ALLOCATIONS) {
        allocations[i].address = *out = (CUdeviceptr)address;
        allocations[i].num_bytes = num_bytes;
        allocations[i].fd = kept_fd;
    }
    pthread_mutex_unlock(&allocations_lock);
    return i < MAX_ALLOCATIONS ? SUCCESS : OUT_OF_MEMORY;
}

static CUresult unmap(CUdeviceptr address, int is_ours) {
    CUresult result = INVALID_VALUE;
    pthread_mutex_lock(&allocations_lock);
    for (int i = 0; i < MAX_ALLOCATIONS; i++)
        if (allocations[i].address == address && (allocations[i].fd >= 0) == is_ours) {
            munmap((void *)address, allocations[i].num_bytes);
            if (is_ours)
                close(allocations[i].fd);
            allocations[i].address = 0;
            result = sticky_error;
            break;
        }
    pthread_mutex_unlock(&allocations_lock);
    return result;
}

CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t num_bytes) {
    if (sticky_error)
        return sticky_error;
    int fd = memfd_create("emulated-cuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, num_bytes))
        return OUT_OF_MEMORY;
    return map(fd, num_bytes, fd, out);
}

CUresult cuMemFree_v2(CUdeviceptr address) { return unmap(address, 1); }

struct IpcHandle {
    char bytes[64];
};

CUresult cuIpcGetMemHandle(struct IpcHandle *handle, CUdeviceptr address) {
    CUresult result = INVALID_VALUE;
    pthread_mutex_lock(&allocations_lock);
    for (int i = 0; i < MAX_ALLOCATIONS; i++)
        if (allocations[i].address == address && allocations[i].fd >= 0) {
            memset(handle, 0, sizeof *handle);
            snprintf(handle->bytes, sizeof handle->bytes, "%d %d %zu", getpid(), allocations[i].fd, allocations[i].num_bytes);
            result = sticky_error;
        }
    pthread_mutex_unlock(&allocations_lock);
    return result;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, struct IpcHandle handle, unsigned flags) {
    int pid, fd;
    size_t num_bytes;
    char path[64];
    if (sticky_error)
        return sticky_error;
    if (is_ipc_refused || sscanf(handle.bytes, "%d %d %zu", &pid, &fd, &num_bytes) != 3)
        return INVALID_HANDLE;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    int opened = open(path, O_RDWR | O_CLOEXEC);
    if (opened < 0)
        return INVALID_HANDLE;
    CUresult result = map(opened, num_bytes, -1, out);
    close(opened);
    return result;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) { return unmap(address, 0); }

CUresult cuMemHostAlloc(void **out, size_t num_bytes, unsigned flags) {
    if (sticky_error)
        return sticky_error;
    *out = aligned_alloc(4096, (num_bytes + 4095) / 4096 * 4096);
    return *out ? SUCCESS : OUT_OF_MEMORY;
}

CUresult cuMemFreeHost(void *address) { return free(address), sticky_error; }

CUresult cuGetErrorName(int error, const char **name) {
    static const struct {
        int code;
        const char *name;
    } names[] = {{1, "CUDA_ERROR_INVALID_VALUE"},     {2, "CUDA_ERROR_OUT_OF_MEMORY"},   {101, "CUDA_ERROR_INVALID_DEVICE"},
                 {400, "CUDA_ERROR_INVALID_HANDLE"},  {500, "CUDA_ERROR_NOT_FOUND"},     {600, "CUDA_ERROR_NOT_READY"},
                 {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {801, "CUDA_ERROR_NOT_SUPPORTED"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == error)
            return *name = names[i].name, SUCCESS;
    return *name = "CUDA_ERROR_UNKNOWN", SUCCESS;
}

// ---- kernels ------------------------------------------------------------------------------------------------------------

// Arguments lie one after the other, each at its natural alignment in a cell of 8 bytes or more.
#define CELL(size) (((size) + 7) / 8 * 8)
static void *take(unsigned char **cursor, size_t size) {
    void *argument = *cursor;
    *cursor += CELL(size);
    return argument;
}
#define TAKE(type) (*(type *)take(&p, sizeof(type)))
enum { P = 8, U = 4, W = sizeof(struct Words), G = sizeof(struct Progress), T = sizeof(struct Targets) };

static void run_boundary(unsigned char *p) {
    unsigned *got = TAKE(unsigned *);
    struct Words expected = TAKE(struct Words);
    unsigned has_incoming = TAKE(unsigned);
    unsigned *out = TAKE(unsigned *);
    struct Words outgoing = TAKE(struct Words);
    unsigned has_outgoing = TAKE(unsigned), num_words = TAKE(unsigned);
    unsigned *verdict = TAKE(unsigned *), *report = TAKE(unsigned *);
    struct Progress progress = TAKE(struct Progress);
    stagewire_boundary(got, expected, has_incoming, out, outgoing, has_outgoing, num_words, verdict, report, progress);
}

static void run_send(unsigned char *p) {
    long long *ids = TAKE(long long *);
    int *num_sampled = TAKE(int *), *num_rejected = TAKE(int *);
    unsigned num_reqs = TAKE(unsigned), width = TAKE(unsigned);
    struct Words outgoing = TAKE(struct Words);
    unsigned num_words = TAKE(unsigned);
    unsigned *verdict = TAKE(unsigned *);
    struct Targets targets = TAKE(struct Targets);
    unsigned num_targets = TAKE(unsigned);
    unsigned long long value = TAKE(unsigned long long);
    struct Progress progress = TAKE(struct Progress);
    stagewire_send_tokens(ids, num_sampled, num_rejected, num_reqs, width, outgoing, num_words, verdict, targets,
                          num_targets, value, progress);
}

static void run_unpack(unsigned char *p) {
    unsigned *got = TAKE(unsigned *);
    struct Words expected = TAKE(struct Words);
    unsigned num_words = TAKE(unsigned), *verdict = TAKE(unsigned *), *report = TAKE(unsigned *);
    unsigned num_reqs = TAKE(unsigned), width = TAKE(unsigned);
    long long *ids = TAKE(long long *);
    int *num_sampled = TAKE(int *), *num_rejected = TAKE(int *);
    stagewire_unpack_tokens(got, expected, num_words, verdict, report, num_reqs, width, ids, num_sampled, num_rejected);
}

static void run_scatter(unsigned char *p) {
    long long *ids = TAKE(long long *);
    int *num_sampled = TAKE(int *), *slots = TAKE(int *);
    unsigned num_reqs = TAKE(unsigned), width = TAKE(unsigned);
    long long *last_tokens = TAKE(long long *), *positions = TAKE(long long *);
    unsigned num_slots = TAKE(unsigned), max_sample_len = TAKE(unsigned);
    stagewire_scatter_tokens(ids, num_sampled, slots, num_reqs, width, last_tokens, positions, num_slots, max_sample_len);
}

static const struct Kernel kernels[] = {
    {"stagewire_boundary", 10, (const size_t[]){P, W, U, P, W, U, U, P, P, G}, run_boundary},
    {"stagewire_send_tokens", 12, (const size_t[]){P, P, P, U, U, W, U, P, T, U, P, G}, run_send},
    {"stagewire_unpack_tokens", 10, (const size_t[]){P, W, U, P, P, U, U, P, P, P}, run_unpack},
    {"stagewire_scatter_tokens", 9, (const size_t[]){P, P, P, U, U, P, P, U, U}, run_scatter},
};

CUresult cuModuleLoadData(void **module, const void *image) { return *module = (void *)1, sticky_error; }

CUresult cuModuleGetFunction(const struct Kernel **function, void *module, const char *name) {
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if (!strcmp(kernels[i].name, name))
            return *function = &kernels[i], SUCCESS;
    return NOT_FOUND;
}

CUresult cuLaunchKernel(const struct Kernel *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared_bytes, struct Stream *stream, void **parameters, void **extra) {
    unsigned char copied[MAX_PARAMETERS], *cursor = copied;
    if (gx != 1 || gy != 1 || gz != 1 || by != 1 || bz != 1 || bx < 1 || bx > 1024)
        return INVALID_VALUE;
    for (int i = 0; i < kernel->num_parameters; i++) {
        memcpy(cursor, parameters[i], kernel->sizes[i]);
        cursor += CELL(kernel->sizes[i]);
    }
    return put(stream, (struct Operation){.kind = KERNEL_LAUNCH, .kernel = kernel}, copied, cursor - copied);
}

// ---- what a test sets ---------------------------------------------------------------------------------------------------

// Run a callable of the test's in the stream's order, as work of the device. It runs even where host functions get lost.
CUresult emulated_call(struct Stream *stream, void (*function)(void *), void *argument) {
    return PUT(stream, .kind = CALL, .pointer = (void *)function, .a = (uint64_t)argument);
}

// Every call, query and wait fails with `error` from now on, and no host function is called any more. 0 ends that.
void emulated_set_error(int error) {
    sticky_error = error;
    num_errors += error != 0;
}
void emulated_set_latency(int kind, int fixed_us, int random_us) {
    latency_us[kind] = fixed_us;
    random_latency_us[kind] = random_us;
}
void emulated_drop_host_functions(int every) {
    num_host_functions = 0;
    drop_every = every;
}
void emulated_refuse_ipc(int is_refused) { is_ipc_refused = is_refused; }
void emulated_take_peers(int is_taken) { has_no_peers = is_taken; }
void emulated_take_memory_operations(int is_taken) { has_no_memory_operations = is_taken; }
void emulated_set_capturing(struct Stream *stream, int is_capturing) { stream->is_capturing = is_capturing; }
// Whether a stream of this process has found a word at [from, to) too low, and waits.
int emulated_is_waiting(uint64_t from, uint64_t to) {
    int found = 0;
    pthread_mutex_lock(&streams_lock);
    for (struct Stream *stream = streams; stream; stream = stream->next)
        found |= stream->waits_at >= from && stream->waits_at < to;
    pthread_mutex_unlock(&streams_lock);
    return found;
}
long emulated_count(int kind) { return num_operations[kind]; }
void emulated_reset(void) {
    sticky_error = drop_every = is_ipc_refused = has_no_peers = has_no_memory_operations = 0;
    for (int kind = 0; kind < NUM_KINDS; kind++)
        latency_us[kind] = random_latency_us[kind] = num_operations[kind] = 0;
}

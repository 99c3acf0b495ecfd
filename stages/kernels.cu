// The kernels of the copy engine: they check and write the headers of messages, and pack and unpack sampled tokens.
//
// One block each. The subset of C is one that a plain C compiler takes too, given the macros below: that is how the tests
// run the same source without a GPU. kernels.ptx is made from this file by `make kernels`.
//
// A header is at most 16 words; its last word is the verdict, 1 while no rank so far has seen a mismatch. `verdict` is the
// rank's own, and sticky: a mismatch clears it, and every header written after that carries 0 on.

#ifdef __CUDACC__
#define KERNEL extern "C" __global__ void
#define DEVICE static __device__ __forceinline__
#define THREAD threadIdx.x
#define NUM_THREADS blockDim.x
#define UNROLL _Pragma("unroll")
#define BARRIER() __syncthreads()
#define ANY(x) __syncthreads_or(x)
#define SYSTEM_FENCE() __threadfence_system()
DEVICE unsigned long long now_ns(void) {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}
#else
#include <time.h>
#define KERNEL void
#define DEVICE static inline
#define THREAD 0u
#define NUM_THREADS 1u
#define UNROLL
#define BARRIER()
#define ANY(x) (x)
#define SYSTEM_FENCE() __atomic_thread_fence(__ATOMIC_SEQ_CST)
DEVICE unsigned long long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}
#endif

#define HEADER_WORDS 16
#define HEADER_BYTES 64
#define MAX_TARGETS 15

struct Words {
    unsigned w[HEADER_WORDS];
};

// Where the host sees that a stream has come by: the time, then the number of the point, in pinned memory.
struct Progress {
    unsigned long long *word;
    unsigned long long number;
    unsigned long long *stamp;
};

DEVICE void make_progress(struct Progress progress) {
    if (THREAD == 0 && progress.word) {
        *(volatile unsigned long long *)progress.stamp = now_ns();
        SYSTEM_FENCE();
        *(volatile unsigned long long *)progress.word = progress.number;
    }
}

// words.w[i], with no address taken of an argument: that would copy all of it to each thread's memory first.
DEVICE unsigned word_of(struct Words words, unsigned i) {
    unsigned found = 0;
UNROLL
    for (unsigned k = 0; k < HEADER_WORDS; k++)
        if (i == k)
            found = words.w[k];
    return found;
}

// Compare what a peer wrote with what the plan says. On the first difference: clear the verdict, and give the host both, in
// pinned memory: a flag, the words that came, the words that were expected. Every thread calls it.
DEVICE void check_header(const volatile unsigned *got, struct Words expected, unsigned num_words,
                         volatile unsigned *verdict, volatile unsigned *report) {
    unsigned differs = 0;
    for (unsigned i = THREAD; i < num_words; i += NUM_THREADS)
        differs |= got[i] ^ word_of(expected, i);
    if (ANY(differs != 0)) {
        if (THREAD == 0 && *verdict) {
            for (unsigned i = 0; i < num_words; i++) {
                report[1 + i] = got[i];
                report[1 + HEADER_WORDS + i] = word_of(expected, i);
            }
            SYSTEM_FENCE();
            report[0] = 1;
        }
        BARRIER();
        if (THREAD == 0)
            *verdict = 0;
        BARRIER();
    }
}

DEVICE void write_header(volatile unsigned *out, struct Words outgoing, unsigned num_words,
                         const volatile unsigned *verdict) {
    for (unsigned i = THREAD; i < num_words; i += NUM_THREADS)
        out[i] = i == num_words - 1 ? *verdict : word_of(outgoing, i);
}

// A stage boundary: check the header that came in, write the one that goes out, tell the host.
KERNEL stagewire_boundary(const unsigned *got, struct Words expected, unsigned has_incoming, unsigned *out,
                          struct Words outgoing, unsigned has_outgoing, unsigned num_words,
                          unsigned *verdict, unsigned *report, struct Progress progress) {
    if (has_incoming)
        check_header(got, expected, num_words, verdict, report);
    if (has_outgoing)
        write_header(out, outgoing, num_words, verdict);
    make_progress(progress);
}

// Where a token message goes: the slot in each receiver's memory, and the word there that tells of it.
struct Targets {
    unsigned long long slot[MAX_TARGETS];
    unsigned long long word[MAX_TARGETS];
};

// A token message, written straight into the receivers' slots: the header, then ids int64 [num_reqs, width], num_sampled and
// num_rejected int32 [num_reqs]; then the word, behind them. A few kilobytes: a copy engine would take longer to start.
KERNEL stagewire_send_tokens(const long long *ids, const int *num_sampled, const int *num_rejected, unsigned num_reqs,
                             unsigned width, struct Words outgoing, unsigned num_words,
                             const unsigned *verdict, struct Targets targets, unsigned num_targets,
                             unsigned long long value, struct Progress progress) {
UNROLL
    for (unsigned t = 0; t < MAX_TARGETS; t++) {
        if (t >= num_targets)
            break;
        char *slot = (char *)targets.slot[t];
        write_header((volatile unsigned *)slot, outgoing, num_words, verdict);
        long long *ids_out = (long long *)(slot + HEADER_BYTES);
        int *counts_out = (int *)(ids_out + (unsigned long long)num_reqs * width);
        for (unsigned i = THREAD; i < num_reqs * width; i += NUM_THREADS)
            ids_out[i] = ids[i];
        for (unsigned i = THREAD; i < num_reqs; i += NUM_THREADS) {
            counts_out[i] = num_sampled[i];
            counts_out[num_reqs + i] = num_rejected[i];
        }
    }
    SYSTEM_FENCE();
    BARRIER();
UNROLL
    for (unsigned t = 0; t < MAX_TARGETS; t++)
        if (THREAD == t % NUM_THREADS && t < num_targets)
            *(volatile unsigned long long *)targets.word[t] = value;
    make_progress(progress);
}

// The other end of it. What came with a false verdict is no tokens at all.
KERNEL stagewire_unpack_tokens(const unsigned *got, struct Words expected, unsigned num_words,
                               unsigned *verdict, unsigned *report, unsigned num_reqs, unsigned width, long long *ids,
                               int *num_sampled, int *num_rejected) {
    check_header(got, expected, num_words, verdict, report);
    const int is_good = *(const volatile unsigned *)verdict != 0;
    const volatile long long *ids_in = (const volatile long long *)((const char *)got + HEADER_BYTES);
    const volatile int *counts_in = (const volatile int *)(ids_in + (unsigned long long)num_reqs * width);
    for (unsigned i = THREAD; i < num_reqs * width; i += NUM_THREADS)
        ids[i] = is_good ? ids_in[i] : -1;
    for (unsigned i = THREAD; i < num_reqs; i += NUM_THREADS) {
        num_sampled[i] = is_good ? counts_in[i] : 0;
        num_rejected[i] = is_good ? counts_in[num_reqs + i] : 0;
    }
}

// Store a step's tokens in their sequence slots: newest first, then -1; positions advance by the counts. A count is clamped to
// 0..width, a slot outside the table is skipped: what a damaged message says must not write elsewhere.
KERNEL stagewire_scatter_tokens(const long long *ids, const int *num_sampled, const int *slots, unsigned num_reqs,
                                unsigned width, long long *last_tokens, long long *positions, unsigned num_slots,
                                unsigned max_sample_len) {
    for (unsigned i = THREAD; i < num_reqs; i += NUM_THREADS) {
        const int slot = slots[i];
        int count = num_sampled[i];
        if (slot < 0 || (unsigned)slot >= num_slots || count <= 0)
            continue;
        if ((unsigned)count > width)
            count = (int)width;
        for (unsigned j = 0; j < max_sample_len; j++)
            last_tokens[(unsigned long long)slot * max_sample_len + j] =
                j < (unsigned)count ? ids[(unsigned long long)i * width + (unsigned)count - 1 - j] : -1;
        positions[slot] += count;
    }
}

// The kernels of the copy engine: they check and write the headers of messages, and pack and unpack sampled tokens.
//
// One block each. The subset of C is one that a plain C compiler takes too, given the macros below: that is how the tests
// run the same source without a GPU. kernels.ptx is made from this file by `make kernels`.
//
// A header is at most 16 words; its last word is the verdict, 1 while no rank so far has seen a mismatch. `verdict` is the
// rank's own, and sticky: a mismatch clears it, and every header written after that carries 0 on.

#ifdef __CUDACC__
#define KERNEL extern "C" __global__ void
#define THREAD threadIdx.x
#define NUM_THREADS blockDim.x
#define BARRIER() __syncthreads()
#define SYSTEM_FENCE() __threadfence_system()
#else
#define KERNEL void
#define THREAD 0u
#define NUM_THREADS 1u
#define BARRIER()
#define SYSTEM_FENCE() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#endif

#define HEADER_WORDS 16
#define HEADER_BYTES 64

struct Words {
    unsigned w[HEADER_WORDS];
};

// Compare what a peer wrote with what the plan says. On the first difference: clear the verdict, and give the host both, in
// pinned memory: a flag, the words that came, the words that were expected. Called by every thread; the first one works.
#ifdef __CUDACC__
__device__ __forceinline__
#else
static inline
#endif
void check_header(const volatile unsigned *got, const struct Words *expected, unsigned num_words,
                  volatile unsigned *verdict, volatile unsigned *report) {
    if (THREAD == 0) {
        unsigned differs = 0;
        for (unsigned i = 0; i < num_words; i++)
            differs |= got[i] ^ expected->w[i];
        if (differs && *verdict) {
            for (unsigned i = 0; i < num_words; i++) {
                report[1 + i] = got[i];
                report[1 + HEADER_WORDS + i] = expected->w[i];
            }
            SYSTEM_FENCE();
            report[0] = 1;
        }
        if (differs)
            *verdict = 0;
    }
    BARRIER();
}

#ifdef __CUDACC__
__device__ __forceinline__
#else
static inline
#endif
void write_header(volatile unsigned *out, const struct Words *outgoing, unsigned num_words,
                  const volatile unsigned *verdict) {
    for (unsigned i = THREAD; i < num_words; i += NUM_THREADS)
        out[i] = i == num_words - 1 ? *verdict : outgoing->w[i];
}

// A stage boundary: check the header that came in, write the one that goes out.
KERNEL stagewire_boundary(const unsigned *got, struct Words expected, unsigned has_incoming, unsigned *out,
                          struct Words outgoing, unsigned has_outgoing, unsigned num_words, unsigned *verdict,
                          unsigned *report) {
    if (has_incoming)
        check_header(got, &expected, num_words, verdict, report);
    if (has_outgoing)
        write_header(out, &outgoing, num_words, verdict);
}

// A token message: the header, then ids int64 [num_reqs, width], num_sampled and num_rejected int32 [num_reqs].
KERNEL stagewire_pack_tokens(const long long *ids, const int *num_sampled, const int *num_rejected, unsigned num_reqs,
                             unsigned width, unsigned *out, struct Words outgoing, unsigned num_words,
                             const unsigned *verdict) {
    write_header(out, &outgoing, num_words, verdict);
    long long *ids_out = (long long *)((char *)out + HEADER_BYTES);
    int *counts_out = (int *)(ids_out + (unsigned long long)num_reqs * width);
    for (unsigned i = THREAD; i < num_reqs * width; i += NUM_THREADS)
        ids_out[i] = ids[i];
    for (unsigned i = THREAD; i < num_reqs; i += NUM_THREADS) {
        counts_out[i] = num_sampled[i];
        counts_out[num_reqs + i] = num_rejected[i];
    }
}

// The other end of it. What came with a false verdict is no tokens at all.
KERNEL stagewire_unpack_tokens(const unsigned *got, struct Words expected, unsigned num_words, unsigned *verdict,
                               unsigned *report, unsigned num_reqs, unsigned width, long long *ids, int *num_sampled,
                               int *num_rejected) {
    check_header(got, &expected, num_words, verdict, report);
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

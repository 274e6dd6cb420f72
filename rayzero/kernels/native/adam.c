/* The native kernel: Adam and AdamW in one pass over memory, and the sums of squares of gradients.
 *
 * Plain pointers, no Python, no torch, no allocation. rayzero/kernels/native.py is the only caller: it fills the tables
 * below. The threads of a call are a team's (team.c); each claims tiles from a shared counter.
 *
 * [Note: one result] Every instruction set gives the same bits, and so does any split into tiles and threads:
 *   - each element goes through the same IEEE operations in the same order (adam_body.h is the only text of them);
 *   - +, -, *, /, sqrt and, where it is written, fused multiply-add: each correctly rounded, never an estimate, never
 *     fused or unfused by the compiler (-ffp-contract=off);
 *   - those are the operations of torch's fused CPU kernel on processors with FMA, so its bits are these too;
 *   - a length that is no multiple of the vector is finished in a padded copy by the same vector code;
 *   - constants are rounded to fp32 once, by the caller; no libm function is called;
 *   - the thread's rounding mode and flush-to-zero flags are set for the call and put back.
 * A NaN's payload is the one thing that may differ.
 */

#include "team.h"
#include "vectors.h"

#include <float.h>

#ifndef RZ_SOURCE
#define RZ_SOURCE "unknown"
#endif

/* ---- Tables (native.py has the same in ctypes; RZ_ABI changes with them) ----------------------------------------- */

#define RZ_ABI 14

enum { L2 = 1, DECAY = 2, AMSGRAD = 4, FROM_GRADIENT = 8, CLAMP = 16 }; /* flags of a segment */

typedef struct {
    const void *data; /* the rank's gradients of the shard, from its start; NULL: absent */
    int32_t dtype;
    int32_t rank;
} rz_gradient; /* listed by ascending rank */

typedef struct {
    int64_t start, stop; /* elements from the shard's start */
} rz_range;

typedef struct {
    int64_t offset, length; /* elements from the shard's start */
    const rz_gradient *gradients;
    int64_t num_gradients; /* none present: the segment stays as it is */
    float scale;           /* 1 / ranks x clip factors / loss scale, negative to maximize */
    float weight_decay;    /* with flag L2: of Adam's gradient; with flag DECAY: AdamW's factor 1 - lr x weight_decay */
    float lerp;            /* 1 - beta1; with flag FROM_GRADIENT, where that is 0.5 or more: -beta1 */
    float beta2, one_minus_beta2;
    float step_size;       /* lr / (1 - beta1^step) */
    float bias2_sqrt;      /* sqrt(1 - beta2^step); for coded moments, 1 over it */
    float eps;
    float limit;           /* with flag CLAMP: every element of the scaled gradient is clamped to within +- this */
    int32_t flags;
} rz_segment; /* listed by ascending offset, without overlap */

typedef struct {
    float *master;        /* NULL: params and remainders are it, see [Note: split masters] */
    void *exp_avg, *exp_avg_sq; /* of moments_dtype: F32, BF16 or CODES; see [Note: coded moments] */
    float *exp_avg_scale, *exp_avg_sq_scale; /* one for each SCALED elements; NULL with F32 */
    int32_t moments_dtype;
    float *max_exp_avg_sq; /* read and written by segments with flag AMSGRAD */
    void *params;          /* published parameters; NULL: the master is what is published */
    int32_t params_dtype;
    int64_t *stamps; /* one for each tile of the shard; NULL: none. An update makes it `stamp`, by way of `stamp` - 1 */
    int64_t stamp;
    int64_t first_stamp; /* number of the shard's first stamp among all stamps that share the undo log */
    void *undo;          /* the undo log: one entry for each thread that may write; NULL: none. See [Note: undo log] */
    int64_t undo_entries;
    uint8_t *changed; /* bit i: params[i] changes; NULL: nobody asks. See [Note: what changes] */
    uint16_t *remainders;
} rz_memory;

#define GROUP 8     /* consecutive ranks that are summed together first */
#define BLOCK 1024  /* elements summed over ranks at once: two scratch rows of it stay in L1 */
#define LANES 16    /* fp64 partial sums of a leaf */
#define LEAF 65536  /* elements of a leaf */
#define SCALED 64   /* elements that share the scale of a coded moment: segments and tiles are multiples of it */

/* [Note: coded moments] Of 64 neighbours, the mean and the root of the mean square are kept relative to the largest
 * magnitude among the 64, which is their scale (fp32). BF16: as bfloat16, rounded to nearest even. CODES: as a float of 8
 * bits that counts down from 1.0: code c is the float whose upper bits are those of 1.0 less (largest code - c). The mean
 * has a sign and 7 bits, 3 of them mantissa, and code 0 is zero. The root has 8 bits, 4 of them mantissa, and no zero: a
 * root much smaller than its neighbours is rounded up to 2^-15.9 of the largest, since an update divides by it. The
 * largest magnitude is kept exactly, so decoding and encoding again changes no bit. A scale below 2^-120 is zero. A mean
 * square beyond fp32 is infinite, as in torch, and so is its root: its weight stands still. BF16 has a code for it, and the
 * scale is then 2^64, above every finite root; in CODES the whole block is infinite. */
#define MEAN_SHIFT 20
#define MEAN_TOP 127
#define ROOT_SHIFT 19
#define ROOT_TOP 255
#define LEAST_SCALE 0x03800000u /* the bits of 2^-120 */
#define ROOT_LIMIT 0x5f800000u  /* the bits of 2^64 */

/* [Note: split masters] A parameter in bf16 is its master rounded to nearest even, so 16 bits more say all of the master:
 * as integers, master = (parameter << 16) + remainder, which is from -0x8000 to 0x8000. Only the last of these does not
 * fit (a master half-way between two parameters, rounded down to the even one). It is kept as -0x8000, and the sign of
 * exp_avg_sq, which has none of its own, says that it is 0x10000 more. So masters take 2 bytes in place of 4, and the
 * update moves 26 bytes a parameter in place of 28. With a NaN the sum is a NaN, too. (Remainders of parameters in place
 * of masters: Transformer Engine's FusedAdam, store_param_remainders, which rounds such a master up instead.) */

/* [Note: undo log] What a thread overwrites must be whole again after the process is killed. So before it stores a chunk (as
 * many elements as it computes at once), it stores the old values, which it has in registers anyway, into its entry of the
 * undo log, and then where the chunk is. The log lies in memory that outlives the process, as the states do; a thread's
 * entry stays in its first-level cache. (Copying some hundred elements at a time, before they are used, costs 20 to 80 %
 * where this costs 2 %, or 12 % of one thread in cache: lab/RESULTS.md.) Killed anywhere, this is what a successor
 * finds, and rz_adam, called again with the same arguments, makes the update whole:
 *   - a tile whose stamp is `stamp` is done; one whose stamp is older was not begun;
 *   - a tile whose stamp is `stamp` - 1 has an entry with its number and that stamp, which says up to which element the
 *     tile is done, and whether the chunk there is torn and has its old values in the entry.
 * Restoring twice changes nothing, so a successor may be killed, too. An entry is read only after the death of who wrote
 * it: every instruction before that has taken effect and none after it, so the compiler's order is enough. */
#define CHUNK 64 /* the most elements of one */
#define REMAINDERS (CHUNK / 2)

typedef struct {
    float master[CHUNK]; /* or parameters, and remainders from REMAINDERS on */
    float exp_avg[CHUNK], exp_avg_sq[CHUNK], largest[CHUNK]; /* or codes, from the row's start */
    float exp_avg_scale, exp_avg_sq_scale;
    int64_t count; /* elements */
} __attribute__((aligned(64))) rz_chunk; /* whole cache lines */

typedef struct {
    int64_t tile;  /* number of its stamp among all stamps that share the log */
    int64_t stamp; /* the tile's stamp while this entry is its own */
    int64_t at;    /* 4 x the first element that is not done, + 1 if the chunk there is torn, + 2 if it is in chunks[1] */
    rz_chunk chunks[2]; /* in turn, so that one is whole while the other is filled */
} rz_undo;

/* [Note: what changes] For followers (rayzero/codecs/changes.py), an update of 16-bit parameters can write a bit for each
 * that says whether it changes. What a parameter was is its old master, rounded again: reading it would be two bytes more
 * from memory, and an update has 28 in all. (A split master is read anyway, and old words are compared with new ones.) An old NaN is rounded as if it were none, which saves a sixth of what a bit
 * costs: what it makes is a NaN, too, whose bit may be set though it stays the same. Segments are multiples of 64. */

/* Tests of every point at which a process may be killed define this (tests/kernels/crash_points.c). */
#ifndef CRASH_POINT
#define CRASH_POINT() ((void)0)
#endif

/* One segment's range of the shard as a kernel sees it. */
typedef struct {
    float *master, *exp_avg, *exp_avg_sq, *largest;
    char *params;
    int out;       /* dtype of params */
    int64_t first; /* element of the shard */
    rz_undo *undo;
    uint8_t *changed;
    uint16_t *remainders;
} span;

/* Store a word that a successor reads, in this order. See [Note: undo log]. */
INLINE void note(int64_t *word, int64_t value) {
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    CRASH_POINT();
}

/* The chunk to fill: the one that the entry does not point at. */
INLINE rz_chunk *spare_chunk(rz_undo *undo) { return &undo->chunks[~undo->at >> 1 & 1]; }

/* The chunk's old values are kept: from here on, the elements from `at` on may be overwritten. */
INLINE void note_chunk(rz_undo *undo, const rz_chunk *kept, int64_t at) {
    note(&undo->at, 4 * at + 2 * (kept - undo->chunks) + 1);
}

INLINE span span_at(const rz_memory *memory, rz_undo *undo, int64_t at) {
    return (span){
        memory->master ? memory->master + at : 0,
        (float *)memory->exp_avg + at,
        (float *)memory->exp_avg_sq + at,
        memory->max_exp_avg_sq ? memory->max_exp_avg_sq + at : 0,
        memory->params ? (char *)memory->params + size_of(memory->params_dtype) * at : 0,
        memory->params ? memory->params_dtype : NONE,
        at,
        undo,
        memory->changed ? memory->changed + at / 8 : 0,
        memory->remainders ? memory->remainders + at : 0,
    };
}

/* What a total was before a round is added to it: see [Note: a total is kept] in rayzero/store/shm/shard_lines.py. */
typedef struct {
    float *values;  /* as many as the total has; NULL: nobody needs them */
    int64_t *count; /* the first so many are there */
} rz_kept;

/* The elements before `end` are about to be changed. A block is copied while it is in the first-level cache for the sum. */
INLINE void keep(const rz_kept *kept, const float *total, int64_t end) {
    if (!kept->values || *kept->count >= end) return;
    memcpy(kept->values + *kept->count, total + *kept->count, sizeof(float) * (end - *kept->count));
    CRASH_POINT();
    note(kept->count, end);
}

#define BODY "adam_body.h"
#include "each_isa.h"

/* ---- What the caller sees ----------------------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    void (*update)(const rz_memory *, rz_undo *, const rz_segment *, int64_t, int64_t);
    double (*leaf)(const rz_gradient *, int64_t, int64_t, int64_t, float, float, float *);
    void (*sum)(const rz_gradient *, int64_t, int64_t, int64_t, float *, float *);
    void (*add_up)(const rz_gradient *, int64_t, int64_t, int64_t, int, float *, const rz_kept *);
} instructions;

static const instructions TABLE[NUM_ISAS] = {
    [PORTABLE] = {"portable", portable_update, portable_leaf, portable_sum, portable_add_up},
#if defined(__x86_64__)
    [AVX2] = {"avx2", avx2_update, avx2_leaf, avx2_sum, avx2_add_up},
    [AVX512] = {"avx512", avx512_update, avx512_leaf, avx512_sum, avx512_add_up},
#elif defined(__aarch64__)
    [NEON] = {"neon", neon_update, neon_leaf, neon_sum, neon_add_up},
#endif
};

/* Version of the tables and functions of this file. */
EXPORT int32_t rz_abi(void) { return RZ_ABI; }

/* Bytes of an entry of the undo log. */
EXPORT int32_t rz_undo_bytes(void) { return sizeof(rz_undo); }

/* Digest of the source text that the library was built from. */
EXPORT const char *rz_source(void) { return RZ_SOURCE; }

/* Name of instruction set `isa`; NULL where this library does not have it or this processor cannot run it. */
EXPORT const char *rz_isa(int32_t isa) {
    return isa >= 0 && isa < NUM_ISAS && TABLE[isa].name && runs_here(isa) ? TABLE[isa].name : 0;
}

/* Whether fused multiply-add is an instruction here; without it, this kernel is slower than torch's. */
EXPORT int32_t rz_has_fma(void) {
#ifdef __FP_FAST_FMAF
    return 1;
#else
    return rz_isa(AVX2) || rz_isa(AVX512) || rz_isa(NEON);
#endif
}

/* The first segment that ends after `at`. */
static int64_t first_after(const rz_segment *segments, int64_t count, int64_t at) {
    int64_t low = 0, high = count;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (segments[middle].offset + segments[middle].length > at) high = middle;
        else low = middle + 1;
    }
    return low;
}

typedef struct {
    int32_t isa;
    const rz_memory *memory;
    const rz_segment *segments;
    int64_t count, start, stop, tile;
    int64_t next, entry; /* tile, and entry of the undo log, to claim */
} adam_job;

/* Put back the old values of a torn chunk. */
static void restore(const rz_memory *memory, const rz_chunk *kept, int64_t at) {
    int64_t bytes = memory->moments_dtype == F32 ? 4 : memory->moments_dtype == BF16 ? 2 : 1;
    if (memory->master) {
        memcpy(memory->master + at, kept->master, 4 * kept->count);
    } else {
        memcpy((uint16_t *)memory->params + at, kept->master, 2 * kept->count);
        memcpy(memory->remainders + at, kept->master + REMAINDERS, 2 * kept->count);
    }
    CRASH_POINT();
    memcpy((char *)memory->exp_avg + bytes * at, kept->exp_avg, bytes * kept->count);
    CRASH_POINT();
    memcpy((char *)memory->exp_avg_sq + bytes * at, kept->exp_avg_sq, bytes * kept->count);
    CRASH_POINT();
    if (memory->max_exp_avg_sq) memcpy(memory->max_exp_avg_sq + at, kept->largest, 4 * kept->count);
    if (memory->exp_avg_scale) memory->exp_avg_scale[at / SCALED] = kept->exp_avg_scale;
    if (memory->exp_avg_sq_scale) memory->exp_avg_sq_scale[at / SCALED] = kept->exp_avg_sq_scale;
    CRASH_POINT();
}

/* Update elements [from, to) of a tile whose stamp says that it is being written; the entry is the tile's own. */
static void update_tile(const adam_job *job, rz_undo *undo, int64_t from, int64_t to) {
    for (int64_t i = first_after(job->segments, job->count, from); i < job->count; i++) {
        const rz_segment *s = &job->segments[i];
        if (s->offset >= to) break;
        TABLE[job->isa].update(job->memory, undo, s, most(from, s->offset), least(to, s->offset + s->length));
    }
}

/* The bounds of a tile within the job; returns whether there is anything of it. */
INLINE int bounds(const adam_job *job, int64_t tile, int64_t *from, int64_t *to) {
    *from = most(tile * job->tile, job->start), *to = least((tile + 1) * job->tile, job->stop);
    return *from < *to;
}

/* Finish the tiles that a predecessor was writing when it was killed. See [Note: undo log]. */
static void finish_torn(const adam_job *job) {
    const rz_memory *memory = job->memory;
    for (int64_t i = 0; i < memory->undo_entries; i++) {
        rz_undo *undo = (rz_undo *)memory->undo + i;
        int64_t tile = undo->tile - memory->first_stamp, from, to;
        if (undo->stamp != memory->stamp - 1 || tile < 0 || !bounds(job, tile, &from, &to)) continue;
        if (memory->stamps[tile] != memory->stamp - 1) continue;
        if (undo->at & 1) {
            restore(memory, &undo->chunks[undo->at >> 1 & 1], undo->at >> 2);
            note(&undo->at, undo->at - 1);
        }
        update_tile(job, undo, undo->at >> 2, to);
        note(&memory->stamps[tile], memory->stamp);
    }
}

/* One thread's share: tiles, counted from the shard's start, until none is left. All its stores are done when it
 * returns. With an undo log, a thread for which there is no entry does nothing. */
static void share_adam(void *shared) {
    adam_job *job = shared;
    const rz_memory *memory = job->memory;
    rz_undo nowhere, *undo = &nowhere;
    if (memory->undo) {
        int64_t entry = __atomic_fetch_add(&job->entry, 1, __ATOMIC_RELAXED);
        if (entry >= memory->undo_entries) return;
        undo = (rz_undo *)memory->undo + entry;
    }
    rounding before = plain_rounding();
    for (;;) {
        int64_t tile = job->start / job->tile + __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED), from, to;
        if (!bounds(job, tile, &from, &to)) break;
        if (memory->stamps && memory->stamps[tile] == memory->stamp) continue; /* a predecessor did it */
        undo->at = 4 * from, undo->tile = memory->first_stamp + tile;
        note(&undo->stamp, memory->stamp - 1);
        if (memory->stamps) note(&memory->stamps[tile], memory->stamp - 1);
        update_tile(job, undo, from, to);
        if (memory->stamps) note(&memory->stamps[tile], memory->stamp);
    }
    finish_stores();
    restore_rounding(before);
}

/* Update the segments' elements within [start, stop), in tiles of `tile` elements that the team's threads share (with a
 * NULL team, the caller works alone). All stores are done when it returns. With stamps, tiles that have `stamp` already
 * stay as they are, so that an update which was cut can be called again. */
EXPORT void rz_adam(rz_team *team, int32_t isa, const rz_memory *memory, const rz_segment *segments, int64_t count,
                    int64_t start, int64_t stop, int64_t tile) {
    adam_job job = {isa, memory, segments, count, start, stop, tile, 0, 0};
    if (memory->undo) {
        rounding before = plain_rounding();
        finish_torn(&job);
        finish_stores();
        restore_rounding(before);
    }
    rz_team_run(team, share_adam, &job);
}

typedef struct {
    int32_t isa;
    const rz_gradient *gradients;
    int64_t count;
    const rz_range *ranges;
    int64_t num_ranges;
    float scale, limit;
    float *sums;
    double *leaves;
    int64_t next; /* leaf to claim */
} squares_job;

static int64_t leaves_of(const rz_range *range) { return (range->stop - range->start + LEAF - 1) / LEAF; }

static void share_squares(void *shared) {
    squares_job *job = shared;
    rounding before = plain_rounding();
    const rz_range *range = job->ranges, *end = range + job->num_ranges;
    int64_t first = 0; /* number of the range's first leaf: what a thread claims only grows */
    for (;;) {
        int64_t leaf = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        while (range < end && leaf >= first + leaves_of(range)) first += leaves_of(range++);
        if (range == end) break;
        int64_t from = range->start + (leaf - first) * LEAF, to = least(from + LEAF, range->stop);
        job->leaves[leaf] =
            TABLE[job->isa].leaf(job->gradients, job->count, from, to, job->scale, job->limit, job->sums);
    }
    restore_rounding(before);
}

/* Sums of squares of the rank-summed gradients, one for each range: there is a leaf for each LEAF elements from the
 * range's start on, and leaves are added in order. The team's threads share the leaves; `leaves` has room for those of
 * all ranges. With an infinite limit, the squares are of the plain sums, and a result is inf or nan exactly if one of its
 * elements is. Otherwise they are of the sums as rz_adam scales and clamps them. `kept`: where the plain sums are
 * written, too, from the shard's start; NULL: nowhere. */
EXPORT void rz_squares(rz_team *team, int32_t isa, const rz_gradient *gradients, int64_t count, const rz_range *ranges,
                       int64_t num_ranges, float scale, float limit, float *kept, double *leaves, double *sums) {
    squares_job job = {isa, gradients, count, ranges, num_ranges, scale, limit, kept, leaves, 0};
    rz_team_run(team, share_squares, &job);
    for (int64_t i = 0; i < num_ranges; i++) {
        double total = 0.0;
        for (int64_t end = leaves_of(ranges + i); end > 0; end--) total += *leaves++;
        sums[i] = total;
    }
}

/* Write the rank-summed gradients of [start, stop) to out, the elements from `start` on. */
EXPORT void rz_sum(int32_t isa, const rz_gradient *gradients, int64_t count, int64_t start, int64_t stop, float *out) {
    float group[BLOCK];
    rounding before = plain_rounding();
    for (int64_t at = start; at < stop; at += BLOCK)
        TABLE[isa].sum(gradients, count, at, least(BLOCK, stop - at), out + (at - start), group);
    restore_rounding(before);
}

/* Write the rank-summed gradients of the ranges, ascending, into `total`, or with `add`, add them to what is there. Before
 * an element changes, what it was is in `kept`, and *count says that all up to it are: so a successor of this process can
 * make the total what it was. NULL: it need not. Both are from the shard's start. */
EXPORT void rz_add(int32_t isa, const rz_gradient *gradients, int64_t count, const rz_range *ranges, int64_t num_ranges,
                   int32_t add, float *total, float *kept, int64_t *kept_count) {
    rz_kept before = {kept, kept_count};
    rounding plain = plain_rounding();
    for (int64_t i = 0; i < num_ranges; i++)
        TABLE[isa].add_up(gradients, count, ranges[i].start, ranges[i].stop, add, total, &before);
    restore_rounding(plain);
}

/* How many rank-summed gradients of [start, stop) are inf or nan. */
EXPORT int64_t rz_nonfinite(const rz_gradient *gradients, int64_t count, int64_t start, int64_t stop) {
    float sum[BLOCK], group[BLOCK];
    int64_t bad = 0;
    rounding before = plain_rounding();
    for (int64_t at = start; at < stop; at += BLOCK) {
        int64_t n = least(BLOCK, stop - at);
        portable_sum(gradients, count, at, n, sum, group);
        for (int64_t i = 0; i < n; i++) bad += (bits_of(sum[i]) & 0x7f800000) == 0x7f800000;
    }
    restore_rounding(before);
    return bad;
}

typedef struct {
    float *a, *b, *c, factor;
    int64_t count, tile;
    int64_t next; /* tile to claim */
} rewrite_job;

static void share_rewrite(void *shared) {
    rewrite_job *job = shared;
    float *a = job->a, *b = job->b, *c = job->c, factor = job->factor;
    for (;;) {
        int64_t from = job->tile * __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        int64_t to = least(from + job->tile, job->count);
        if (from >= job->count) break;
        for (int64_t at = from; at < to; at += 64) {
            ask_ahead(a + at, 256, AHEAD), ask_ahead(b + at, 256, AHEAD), ask_ahead(c + at, 256, AHEAD);
            for (int64_t i = at; i < least(at + 64, to); i++) a[i] *= factor, b[i] *= factor, c[i] *= factor;
        }
    }
}

/* The loop that benchmarks compare updates with: it reads, scales and writes three arrays of floats in place, and shares
 * tiles as rz_adam does. Nothing that keeps three fp32 states per parameter can be faster. */
EXPORT void rz_rewrite(rz_team *team, float *a, float *b, float *c, int64_t count, float factor, int64_t tile) {
    rewrite_job job = {a, b, c, factor, count, tile, 0};
    rz_team_run(team, share_rewrite, &job);
}

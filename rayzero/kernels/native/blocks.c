/* Codecs that store blocks of 256 floats as small integers: rayzero/codecs/blocks.py says how, and is the same in torch.
 *
 * Every instruction set gives the same bytes, as does any split into blocks and threads: see [Note: one result] in adam.c.
 */

#include "team.h"
#include "vectors.h"

#define VALUES 256 /* in a block */
#define GROUPS 8   /* of a block of 4-bit integers */
#define MEMBERS (VALUES / GROUPS)
#define CLAIMED 64 /* blocks that a thread takes at once */

#define BODY "blocks_body.h"
#include "each_isa.h"

enum { INT8 = 0, INT4 = 1 };
static const int64_t ROW[] = {[INT8] = 4 + VALUES, [INT4] = 4 + GROUPS + VALUES / 2};

typedef void (*encoder)(const void *values, int dtype, int64_t count, uint8_t *row);
typedef void (*decoder)(const uint8_t *row, int dtype, int64_t count, void *values);

static const encoder ENCODERS[NUM_ISAS][2] = {
    [PORTABLE] = {portable_encode_int8, portable_encode_int4},
#if defined(__x86_64__)
    [AVX2] = {avx2_encode_int8, avx2_encode_int4},
    [AVX512] = {avx512_encode_int8, avx512_encode_int4},
#elif defined(__aarch64__)
    [NEON] = {neon_encode_int8, neon_encode_int4},
#endif
};
static const decoder DECODERS[NUM_ISAS][2] = {
    [PORTABLE] = {portable_decode_int8, portable_decode_int4},
#if defined(__x86_64__)
    [AVX2] = {avx2_decode_int8, avx2_decode_int4},
    [AVX512] = {avx512_decode_int8, avx512_decode_int4},
#elif defined(__aarch64__)
    [NEON] = {neon_decode_int8, neon_decode_int4},
#endif
};

typedef struct {
    encoder encode; /* NULL: decode */
    decoder decode;
    char *values;
    int32_t dtype;
    int64_t count, row_bytes;
    uint8_t *rows;
    int64_t next; /* blocks to claim */
} blocks_job;

static void share_blocks(void *shared) {
    blocks_job *job = shared;
    rounding before = plain_rounding();
    for (;;) {
        int64_t first = CLAIMED * __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (first * VALUES >= job->count) break;
        for (int64_t block = first; block < first + CLAIMED && block * VALUES < job->count; block++) {
            int64_t count = least(VALUES, job->count - block * VALUES);
            char *values = job->values + size_of(job->dtype) * block * VALUES;
            uint8_t *row = job->rows + job->row_bytes * block;
            if (job->encode) job->encode(values, job->dtype, count, row);
            else job->decode(row, job->dtype, count, values);
        }
    }
    restore_rounding(before);
}

/* Encode `count` floats of `dtype` as rows of integers (INT8 or INT4), blocks shared by the team's threads. */
EXPORT void rz_encode_blocks(rz_team *team, int32_t isa, int32_t integers, void *values, int32_t dtype, int64_t count,
                             uint8_t *rows) {
    blocks_job job = {ENCODERS[isa][integers], 0, values, dtype, count, ROW[integers], rows, 0};
    rz_team_run(team, share_blocks, &job);
}

/* The inverse: fill `values` from the rows. */
EXPORT void rz_decode_blocks(rz_team *team, int32_t isa, int32_t integers, void *values, int32_t dtype, int64_t count,
                             uint8_t *rows) {
    blocks_job job = {0, DECODERS[isa][integers], values, dtype, count, ROW[integers], rows, 0};
    rz_team_run(team, share_blocks, &job);
}

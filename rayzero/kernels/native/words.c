/* 16-bit words of a shard, for followers: rayzero/codecs/changes.py says what for, and is the same in numpy. */

#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

/* The plain sum of words mod 2^32, and in the upper half that of each times 2 i + 1. */
EXPORT uint64_t rz_checksum(const uint16_t *words, int64_t count) {
    uint32_t plain = 0, weighted = 0;
    for (int64_t i = 0; i < count; i++) {
        plain += words[i];
        weighted += (2 * (uint32_t)i + 1) * words[i];
    }
    return (uint64_t)weighted << 32 | plain;
}

/* Write the words whose bit in `bitmap` is set, ascending; returns how many. There is room in `out` for one word more. */
EXPORT int64_t rz_pick(const uint16_t *words, const uint8_t *bitmap, int64_t count, uint16_t *out) {
    int64_t found = 0;
    for (int64_t at = 0; at < count; at += 64) {
        int64_t here = count - at < 64 ? count - at : 64;
        uint64_t bits = 0;
        memcpy(&bits, bitmap + at / 8, (here + 7) / 8);
        if (here < 64) bits &= ((uint64_t)1 << here) - 1;
        if (__builtin_popcountll(bits) <= 16) {
            for (; bits; bits &= bits - 1) out[found++] = words[at + __builtin_ctzll(bits)];
        } else { /* no branch that depends on a bit */
            for (int64_t i = 0; i < here; i++) out[found] = words[at + i], found += bits >> i & 1;
        }
    }
    return found;
}

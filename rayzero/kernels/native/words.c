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

/* Eight bytes of the bitmap of `count` words. */
static uint64_t eight(const uint8_t *bitmap, int64_t count, int64_t at) {
    int64_t left = (count + 7) / 8 - at;
    uint64_t bits = 0;
    if (left >= 8) memcpy(&bits, bitmap + at, 8);
    else memcpy(&bits, bitmap + at, left);
    return bits;
}

/* Write the changed words as [Note: positions] says, and into *changed how many they are. Returns the bytes. `middle` has
 * room for a bit for each byte of the bitmap, `out` for three bitmaps and all words. */
EXPORT int64_t rz_pack(const uint16_t *words, const uint8_t *bitmap, int64_t count, uint8_t *middle, uint8_t *out,
                       int64_t *changed) {
    int64_t above = (count + 63) / 64;
    uint8_t *to = out + (above + 7) / 8;
    memset(out, 0, to - out);
    for (int64_t i = 0; i < above; i++) {
        uint64_t some = eight(bitmap, count, 8 * i);
        some |= some >> 4, some |= some >> 2, some |= some >> 1;
        middle[i] = (some & 0x0101010101010101) * 0x0102040810204080 >> 56; /* of each byte: whether it is not zero */
        out[i / 8] |= (middle[i] != 0) << i % 8;
        *to = middle[i], to += middle[i] != 0;
    }
    for (int64_t i = 0; i < above; i++)
        for (uint32_t bits = middle[i]; bits; bits &= bits - 1) {
            int64_t byte = 8 * i + __builtin_ctz(bits);
            *to++ = bitmap[byte];
            __builtin_prefetch(words + 8 * byte);
        }
    uint8_t *first = to;
    for (int64_t i = 0; i < above; i++)
        for (uint64_t bits = eight(bitmap, count, 8 * i); bits; bits &= bits - 1, to += 2)
            memcpy(to, words + 64 * i + __builtin_ctzll(bits), 2);
    *changed = (to - first) / 2;
    return to - out;
}

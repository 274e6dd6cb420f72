/* 16-bit words of a shard, for followers: rayzero/codecs/changes.py says what for, and is the same in numpy. */

#include "vectors.h"

/* Eight bytes of the bitmap of `count` words. */
static uint64_t eight(const uint8_t *bitmap, int64_t count, int64_t at) {
    int64_t left = (count + 7) / 8 - at;
    uint64_t bits = 0;
    if (left >= 8) memcpy(&bits, bitmap + at, 8);
    else memcpy(&bits, bitmap + at, left);
    return bits;
}

/* Write the changed words from `at` on; returns where they end. Those of all whole vectors without a branch for a bit. */
static uint8_t *pick(const uint16_t *words, const uint8_t *bitmap, int64_t at, int64_t count, uint8_t *to) {
    for (int64_t i = at / 64; i < (count + 63) / 64; i++)
        for (uint64_t bits = eight(bitmap, count, 8 * i); bits; bits &= bits - 1, to += 2)
            memcpy(to, words + 64 * i + __builtin_ctzll(bits), 2);
    return to;
}

#if defined(__x86_64__)
__attribute__((target("avx512f,popcnt"))) static uint8_t *avx512_pick(const uint16_t *words, const uint8_t *bitmap,
                                                                     int64_t count, uint8_t *to) {
    int64_t whole = count - count % 64;
    for (int64_t at = 0; at < whole; at += 16) {
        uint16_t bits;
        memcpy(&bits, bitmap + at / 8, 2);
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(words + at)));
        _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(bits, wide)));
        to += 2 * __builtin_popcount(bits);
    }
    return pick(words, bitmap, whole, count, to);
}
#endif

/* Write the changed words as [Note: positions] says, and into *changed how many they are. Returns the bytes. `middle` has
 * room for a bit for each byte of the bitmap, `out` for three bitmaps, all words and a vector. */
EXPORT int64_t rz_pack(int32_t isa, const uint16_t *words, const uint8_t *bitmap, int64_t count, uint8_t *middle,
                       uint8_t *out, int64_t *changed) {
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
#if defined(__x86_64__)
    int many = 32 * (to - out) > count; /* from 2 % on, spread evenly, it is faster */
    to = many && isa == AVX512 ? avx512_pick(words, bitmap, count, to) : pick(words, bitmap, 0, count, to);
#else
    to = pick(words, bitmap, 0, count, to);
#endif
    *changed = (to - first) / 2;
    return to - out;
}

/* How many bits are set. */
static int64_t bits_in(const uint8_t *bytes, int64_t count) {
    int64_t set = 0;
    for (int64_t at = 0; at < count; at += 8) set += __builtin_popcountll(eight(bytes, 8 * count, at));
    return set;
}

#if defined(__x86_64__)
#define MANY 5     /* changed words of a row of 64 from which on this is faster than one by one */
#define ROOM 160   /* bytes that there must be: it reads behind the last word */

__attribute__((target("avx512f,popcnt"))) static const uint8_t *avx512_put(uint16_t *row, uint64_t bits, const uint8_t *from) {
    for (int at = 0; at < 64; at += 16) {
        __mmask16 these = (__mmask16)(bits >> at);
        __m512i old = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(row + at)));
        __m512i new = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
        new = _mm512_mask_expand_epi32(old, these, new);
        _mm256_storeu_si256((__m256i *)(row + at), _mm512_cvtepi32_epi16(new));
        from += 2 * __builtin_popcount(these);
    }
    return from;
}
#endif

/* Write words that rz_pack has packed to their places. Returns whether these are `size` bytes for `count` words; of others
 * some may be written. */
EXPORT int32_t rz_unpack(int32_t isa, uint16_t *words, int64_t count, const uint8_t *packed, int64_t size) {
    int64_t top = ((count + 63) / 64 + 7) / 8;
    if (size < top) return 0;
    const uint8_t *middle = packed + top, *bitmap = middle + bits_in(packed, top), *end = packed + size;
    if (bitmap > end) return 0;
    const uint8_t *from = bitmap + bits_in(middle, bitmap - middle);
    if (from > end || end - from != 2 * bits_in(bitmap, from - bitmap)) return 0;
    for (int64_t i = 0; i < 8 * top; i++) {
        if (!(packed[i / 8] >> i % 8 & 1)) continue;
        int64_t soon = i + 16 < 8 * top && packed[i / 8 + 2] >> i % 8 & 1 ? i + 16 : i; /* a row that is needed */
        __builtin_prefetch(words + 64 * soon, 1), __builtin_prefetch(words + 64 * soon + 32, 1);
        uint64_t bits = 0;
        for (uint32_t bytes = *middle++; bytes; bytes &= bytes - 1) bits |= (uint64_t)*bitmap++ << 8 * __builtin_ctz(bytes);
        int64_t left = count - 64 * i;
        if (left < 64 && (left <= 0 || bits >> left)) return 0;
#if defined(__x86_64__)
        if (isa == AVX512 && left >= 64 && end - from >= ROOM && __builtin_popcountll(bits) >= MANY) {
            from = avx512_put(words + 64 * i, bits, from);
            bits = 0;
        }
#endif
        for (; bits; bits &= bits - 1, from += 2) memcpy(words + 64 * i + __builtin_ctzll(bits), from, 2);
    }
    return 1;
}

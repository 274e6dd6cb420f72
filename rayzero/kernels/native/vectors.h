/* Vectors of floats and integers of each instruction set, under the same names: avx2_add, neon_add, ... Every operation is
 * correctly rounded or exact, so all of them give the same bits. A file's own code is compiled once for each by each_isa.h. */

#ifndef RZ_VECTORS_H
#define RZ_VECTORS_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the native kernel needs a little-endian machine"
#endif
#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0
#error "the native kernel needs float arithmetic that rounds to float"
#endif
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

enum { PORTABLE = 0, AVX2 = 1, AVX512 = 2, NEON = 3, NUM_ISAS = 4 };
enum { F32 = 0, BF16 = 1, FP16 = 2, NONE = 3, CODES = 4 }; /* dtypes; CODES: bytes */

/* ---- What does not depend on the instruction set ---------------------------------------------------------------- */

#define AHEAD 1024  /* bytes: how far ahead of use memory is asked for */
#define PACKED 64   /* codes that are narrowed to bytes at once */

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE float float_of_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest > 0x7c00) return float_of(sign | 0x7fc00000 | rest << 13);
    if (rest == 0x7c00) return float_of(sign | 0x7f800000);
    if (rest >= 0x0400) return float_of(sign | ((rest << 13) + 0x38000000));
    return float_of(sign | bits_of((float)rest * 0x1p-24f)); /* subnormal */
}

INLINE uint16_t half_of_float(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) /* subnormal: halves of 0.5's binade are as far apart as those */
        return (uint16_t)(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | (rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13);
}

INLINE int64_t size_of(int dtype) { return dtype == F32 ? 4 : 2; }

INLINE const void *from(const void *data, int dtype, int64_t at) { return (const char *)data + at * size_of(dtype); }

/* Ask for what lies `distance` bytes after the `bytes` at p, line by line. (On Zen 3 the processor's own prefetch
 * leaves a third of one thread's and a fifth of two threads' speed; any distance from 512 to 2,048 is as good.) */
INLINE void ask_ahead(const void *p, int64_t bytes, int64_t distance) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)p + distance + at);
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- Portable: vectors of 4 in the compiler's own arithmetic ------------------------------------------------------ */

typedef float portable_f __attribute__((vector_size(16)));
typedef double portable_d __attribute__((vector_size(16)));
typedef uint32_t portable_u __attribute__((vector_size(16)));
typedef int32_t portable_i __attribute__((vector_size(16)));
typedef uint16_t portable_h __attribute__((vector_size(8)));
typedef uint16_t portable_w __attribute__((vector_size(16))); /* words of two vectors */

INLINE portable_f portable_load(const float *p) { portable_f x; memcpy(&x, p, 16); return x; }
INLINE void portable_store(float *p, portable_f x) { memcpy(p, &x, 16); }
INLINE portable_f portable_set(float x) { return (portable_f){x, x, x, x}; }
INLINE portable_f portable_add(portable_f a, portable_f b) { return a + b; }
INLINE portable_f portable_sub(portable_f a, portable_f b) { return a - b; }
INLINE portable_f portable_mul(portable_f a, portable_f b) { return a * b; }
INLINE portable_f portable_div(portable_f a, portable_f b) { return a / b; }
#ifdef __FP_FAST_FMAF /* an instruction of the processor the library is built for */
INLINE float portable_fma_one(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
/* One exact product, one sum rounded to odd in double, then to float: no bit differs from a fused multiply-add. */
INLINE float portable_fma_one(float a, float b, float c) {
    double product = (double)a * b, addend = c, sum = product + addend;
    double back = sum - product, error = (product - (sum - back)) + (addend - back);
    uint64_t bits;
    memcpy(&bits, &sum, 8);
    int finite = (bits >> 52 & 0x7ff) != 0x7ff, inexact = error != 0;
    if (finite && inexact && !(bits & 1)) bits += (error > 0) == (sum > 0) ? 1 : -1;
    memcpy(&sum, &bits, 8);
    return (float)sum;
}
#endif
INLINE portable_f portable_fma(portable_f a, portable_f b, portable_f c) { /* a * b + c */
    for (int i = 0; i < 4; i++) c[i] = portable_fma_one(a[i], b[i], c[i]);
    return c;
}
INLINE portable_f portable_sqrt(portable_f a) {
    for (int i = 0; i < 4; i++) a[i] = __builtin_sqrtf(a[i]);
    return a;
}
INLINE portable_f portable_max(portable_f a, portable_f b) { /* b where either is NaN */
    portable_u first = (portable_u)(a > b);
    return (portable_f)(((portable_u)a & first) | ((portable_u)b & ~first));
}
INLINE portable_f portable_min(portable_f a, portable_f b) { /* b where either is NaN */
    portable_u first = (portable_u)(a < b);
    return (portable_f)(((portable_u)a & first) | ((portable_u)b & ~first));
}
INLINE portable_f portable_load_bf16(const uint16_t *p) {
    portable_h x;
    memcpy(&x, p, 8);
    return (portable_f)(__builtin_convertvector(x, portable_u) << 16);
}
INLINE portable_f portable_load_fp16(const uint16_t *p) {
    return (portable_f){float_of_half(p[0]), float_of_half(p[1]), float_of_half(p[2]), float_of_half(p[3])};
}
INLINE portable_u portable_near_bf16(portable_f x) { /* of no NaN; in the low halves */
    portable_u bits = (portable_u)x;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
INLINE portable_u portable_to_bf16(portable_f x) {
    portable_u nan = (portable_u)(x != x);
    return (portable_near_bf16(x) & ~nan) | (nan & 0x7fc0);
}
INLINE portable_w portable_pack(portable_u a, portable_u b) { /* the low halves */
    portable_h low = __builtin_convertvector(a, portable_h), high = __builtin_convertvector(b, portable_h);
    portable_w packed;
    memcpy(&packed, &low, 8);
    memcpy((char *)&packed + 8, &high, 8);
    return packed;
}
INLINE portable_w portable_to_fp16(portable_f a, portable_f b) {
    portable_w packed;
    for (int i = 0; i < 4; i++) packed[i] = half_of_float(a[i]), packed[i + 4] = half_of_float(b[i]);
    return packed;
}
INLINE void portable_store_words(char *out, portable_w packed, int stream) { memcpy(out, &packed, 16); }
INLINE portable_u portable_max_u(portable_u a, portable_u b) {
    portable_u first = (portable_u)(a > b);
    return (a & first) | (b & ~first);
}
INLINE portable_i portable_max_i(portable_i a, portable_i b) {
    portable_i first = a > b;
    return (a & first) | (b & ~first);
}
INLINE uint32_t portable_most(portable_u x) {
    uint32_t most = 0;
    for (int i = 0; i < 4; i++) most = x[i] > most ? x[i] : most;
    return most;
}
INLINE uint32_t portable_differ(portable_w a, portable_w b) { /* bit i: word i */
    uint32_t bits = 0;
    for (int i = 0; i < 8; i++) bits |= (uint32_t)(a[i] != b[i]) << i;
    return bits;
}
INLINE portable_u portable_widen(const uint8_t *p) { return (portable_u){p[0], p[1], p[2], p[3]}; }
INLINE void portable_narrow(uint8_t *p, const portable_u *x) {
    for (int i = 0; i < PACKED; i++) p[i] = (uint8_t)x[i / 4][i % 4];
}
INLINE portable_d portable_load_d(const double *p) { portable_d x; memcpy(&x, p, 16); return x; }
INLINE void portable_store_d(double *p, portable_d x) { memcpy(p, &x, 16); }
INLINE portable_d portable_add_square_low(portable_d sum, portable_f x) {
    portable_d wide = {x[0], x[1]};
    return sum + wide * wide;
}
INLINE portable_d portable_add_square_high(portable_d sum, portable_f x) {
    portable_d wide = {x[2], x[3]};
    return sum + wide * wide;
}
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

/* ---- AVX2, FMA, F16C: vectors of 8 ------------------------------------------------------------------------------------------- */

#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
typedef __m256 avx2_f;
typedef __m256d avx2_d;
typedef uint32_t avx2_u __attribute__((vector_size(32)));
typedef int32_t avx2_i __attribute__((vector_size(32)));
typedef __m256i avx2_w;

INLINE TARGET_AVX2 avx2_f avx2_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE TARGET_AVX2 void avx2_store(float *p, avx2_f x) { _mm256_storeu_ps(p, x); }
INLINE TARGET_AVX2 avx2_f avx2_set(float x) { return _mm256_set1_ps(x); }
INLINE TARGET_AVX2 avx2_f avx2_add(avx2_f a, avx2_f b) { return _mm256_add_ps(a, b); }
INLINE TARGET_AVX2 avx2_f avx2_sub(avx2_f a, avx2_f b) { return _mm256_sub_ps(a, b); }
INLINE TARGET_AVX2 avx2_f avx2_mul(avx2_f a, avx2_f b) { return _mm256_mul_ps(a, b); }
INLINE TARGET_AVX2 avx2_f avx2_div(avx2_f a, avx2_f b) { return _mm256_div_ps(a, b); }
INLINE TARGET_AVX2 avx2_f avx2_fma(avx2_f a, avx2_f b, avx2_f c) { return _mm256_fmadd_ps(a, b, c); }
INLINE TARGET_AVX2 avx2_f avx2_sqrt(avx2_f a) { return _mm256_sqrt_ps(a); }
INLINE TARGET_AVX2 avx2_f avx2_max(avx2_f a, avx2_f b) { return _mm256_max_ps(a, b); } /* b where either is NaN */
INLINE TARGET_AVX2 avx2_f avx2_min(avx2_f a, avx2_f b) { return _mm256_min_ps(a, b); } /* likewise */
INLINE TARGET_AVX2 avx2_f avx2_load_bf16(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE TARGET_AVX2 avx2_f avx2_load_fp16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
INLINE TARGET_AVX2 avx2_u avx2_near_bf16(avx2_f x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return (avx2_u)_mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
}
INLINE TARGET_AVX2 avx2_u avx2_to_bf16(avx2_f x) {
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return (avx2_u)_mm256_blendv_epi8((__m256i)avx2_near_bf16(x), _mm256_set1_epi32(0x7fc0), nan);
}
INLINE TARGET_AVX2 avx2_w avx2_pack(avx2_u a, avx2_u b) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)a, (__m256i)b), 0xd8);
}
INLINE TARGET_AVX2 avx2_w avx2_to_fp16(avx2_f a, avx2_f b) {
    __m128i low = _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT), high = _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
INLINE TARGET_AVX2 void avx2_store_words(char *out, avx2_w packed, int stream) {
    if (stream) _mm256_stream_si256((__m256i *)out, packed);
    else _mm256_storeu_si256((__m256i *)out, packed);
}
INLINE TARGET_AVX2 avx2_u avx2_max_u(avx2_u a, avx2_u b) { return (avx2_u)_mm256_max_epu32((__m256i)a, (__m256i)b); }
INLINE TARGET_AVX2 avx2_i avx2_max_i(avx2_i a, avx2_i b) { return (avx2_i)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE TARGET_AVX2 uint32_t avx2_most(avx2_u x) {
    __m128i most = _mm_max_epu32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1)));
}
INLINE TARGET_AVX2 uint32_t avx2_differ(avx2_w a, avx2_w b) {
    __m256i same = _mm256_cmpeq_epi16(a, b);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(same), _mm256_extracti128_si256(same, 1));
    return ~(uint32_t)_mm_movemask_epi8(bytes) & 0xffff;
}
INLINE TARGET_AVX2 avx2_u avx2_widen(const uint8_t *p) {
    return (avx2_u)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
INLINE TARGET_AVX2 void avx2_narrow(uint8_t *p, const avx2_u *x) {
    __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int i = 0; i < PACKED / 8; i += 4) {
        __m256i low = _mm256_packus_epi32((__m256i)(x[i] & 255), (__m256i)(x[i + 1] & 255));
        __m256i high = _mm256_packus_epi32((__m256i)(x[i + 2] & 255), (__m256i)(x[i + 3] & 255));
        __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
        _mm256_storeu_si256((__m256i *)(p + 8 * i), packed);
    }
}
INLINE TARGET_AVX2 avx2_d avx2_load_d(const double *p) { return _mm256_loadu_pd(p); }
INLINE TARGET_AVX2 void avx2_store_d(double *p, avx2_d x) { _mm256_storeu_pd(p, x); }
INLINE TARGET_AVX2 avx2_d avx2_add_square_low(avx2_d sum, avx2_f x) {
    __m256d wide = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    return _mm256_fmadd_pd(wide, wide, sum);
}
INLINE TARGET_AVX2 avx2_d avx2_add_square_high(avx2_d sum, avx2_f x) {
    __m256d wide = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    return _mm256_fmadd_pd(wide, wide, sum);
}

/* ---- AVX-512 (F and BW): vectors of 16 ---------------------------------------------------------------------------- */

#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw")))
typedef __m512 avx512_f;
typedef __m512d avx512_d;
typedef uint32_t avx512_u __attribute__((vector_size(64)));
typedef int32_t avx512_i __attribute__((vector_size(64)));
typedef __m512i avx512_w;

INLINE TARGET_AVX512 avx512_f avx512_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE TARGET_AVX512 void avx512_store(float *p, avx512_f x) { _mm512_storeu_ps(p, x); }
INLINE TARGET_AVX512 avx512_f avx512_set(float x) { return _mm512_set1_ps(x); }
INLINE TARGET_AVX512 avx512_f avx512_add(avx512_f a, avx512_f b) { return _mm512_add_ps(a, b); }
INLINE TARGET_AVX512 avx512_f avx512_sub(avx512_f a, avx512_f b) { return _mm512_sub_ps(a, b); }
INLINE TARGET_AVX512 avx512_f avx512_mul(avx512_f a, avx512_f b) { return _mm512_mul_ps(a, b); }
INLINE TARGET_AVX512 avx512_f avx512_div(avx512_f a, avx512_f b) { return _mm512_div_ps(a, b); }
INLINE TARGET_AVX512 avx512_f avx512_fma(avx512_f a, avx512_f b, avx512_f c) { return _mm512_fmadd_ps(a, b, c); }
INLINE TARGET_AVX512 avx512_f avx512_sqrt(avx512_f a) { return _mm512_sqrt_ps(a); }
INLINE TARGET_AVX512 avx512_f avx512_max(avx512_f a, avx512_f b) { return _mm512_max_ps(a, b); } /* b where either is NaN */
INLINE TARGET_AVX512 avx512_f avx512_min(avx512_f a, avx512_f b) { return _mm512_min_ps(a, b); } /* likewise */
INLINE TARGET_AVX512 avx512_f avx512_load_bf16(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE TARGET_AVX512 avx512_f avx512_load_fp16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE TARGET_AVX512 avx512_u avx512_near_bf16(avx512_f x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return (avx512_u)_mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
}
INLINE TARGET_AVX512 avx512_u avx512_to_bf16(avx512_f x) {
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return (avx512_u)_mm512_mask_mov_epi32((__m512i)avx512_near_bf16(x), nan, _mm512_set1_epi32(0x7fc0));
}
INLINE TARGET_AVX512 avx512_w avx512_pack(avx512_u a, avx512_u b) {
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    return _mm512_permutexvar_epi64(order, _mm512_packus_epi32((__m512i)a, (__m512i)b));
}
INLINE TARGET_AVX512 avx512_w avx512_to_fp16(avx512_f a, avx512_f b) {
    __m256i low = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT), high = _mm512_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
INLINE TARGET_AVX512 void avx512_store_words(char *out, avx512_w packed, int stream) {
    if (stream) _mm512_stream_si512((__m512i *)out, packed);
    else _mm512_storeu_si512(out, packed);
}
INLINE TARGET_AVX512 avx512_u avx512_max_u(avx512_u a, avx512_u b) {
    return (avx512_u)_mm512_max_epu32((__m512i)a, (__m512i)b);
}
INLINE TARGET_AVX512 avx512_i avx512_max_i(avx512_i a, avx512_i b) {
    return (avx512_i)_mm512_max_epi32((__m512i)a, (__m512i)b);
}
INLINE TARGET_AVX512 uint32_t avx512_most(avx512_u x) { return _mm512_reduce_max_epu32((__m512i)x); }
INLINE TARGET_AVX512 uint32_t avx512_differ(avx512_w a, avx512_w b) { return _mm512_cmpneq_epu16_mask(a, b); }
INLINE TARGET_AVX512 avx512_u avx512_widen(const uint8_t *p) {
    return (avx512_u)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}
INLINE TARGET_AVX512 void avx512_narrow(uint8_t *p, const avx512_u *x) {
    for (int i = 0; i < PACKED / 16; i++) _mm_storeu_si128((__m128i *)p + i, _mm512_cvtepi32_epi8((__m512i)x[i]));
}
INLINE TARGET_AVX512 avx512_d avx512_load_d(const double *p) { return _mm512_loadu_pd(p); }
INLINE TARGET_AVX512 void avx512_store_d(double *p, avx512_d x) { _mm512_storeu_pd(p, x); }
INLINE TARGET_AVX512 avx512_d avx512_add_square_low(avx512_d sum, avx512_f x) {
    __m512d wide = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    return _mm512_fmadd_pd(wide, wide, sum);
}
INLINE TARGET_AVX512 avx512_d avx512_add_square_high(avx512_d sum, avx512_f x) {
    __m256d high = _mm512_extractf64x4_pd(_mm512_castps_pd(x), 1);
    __m512d wide = _mm512_cvtps_pd(_mm256_castpd_ps(high));
    return _mm512_fmadd_pd(wide, wide, sum);
}

/* The register states that the system saves when it switches threads (XCR0); 0 if it does not say. Not
 * __builtin_cpu_supports: a compiler's runtime answers that one, and that of `zig cc` always says no. */
static uint64_t saved_registers(void) {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static int runs_here(int isa) {
    const uint64_t ymm = 0x06, zmm = 0xe6; /* XMM and YMM; these, mask registers and ZMM */
    unsigned a, b, c, d, features;
    if (isa == PORTABLE) return 1;
    if (!__get_cpuid(1, &a, &b, &features, &d) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    uint64_t saved = saved_registers();
    if (isa == AVX2)
        return (saved & ymm) == ymm && (b & bit_AVX2) && (features & bit_FMA) && (features & bit_F16C);
    if (isa == AVX512) return (saved & zmm) == zmm && (b & bit_AVX512F) && (b & bit_AVX512BW);
    return 0;
}

typedef uint32_t rounding; /* MXCSR */
static rounding plain_rounding(void) {
    rounding before = _mm_getcsr();
    _mm_setcsr((before & ~0xe040u) | 0x1f80u); /* nearest even, subnormals kept, no traps */
    return before;
}
static void restore_rounding(rounding before) { _mm_setcsr(before); }
static void finish_stores(void) { _mm_sfence(); }

#elif defined(__aarch64__)
#include <arm_neon.h>

/* ---- NEON: vectors of 4 ------------------------------------------------------------------------------------------- */

typedef float32x4_t neon_f;
typedef float64x2_t neon_d;
typedef uint32_t neon_u __attribute__((vector_size(16)));
typedef int32_t neon_i __attribute__((vector_size(16)));
typedef uint16x8_t neon_w;

INLINE neon_f neon_load(const float *p) { return vld1q_f32(p); }
INLINE void neon_store(float *p, neon_f x) { vst1q_f32(p, x); }
INLINE neon_f neon_set(float x) { return vdupq_n_f32(x); }
INLINE neon_f neon_add(neon_f a, neon_f b) { return vaddq_f32(a, b); }
INLINE neon_f neon_sub(neon_f a, neon_f b) { return vsubq_f32(a, b); }
INLINE neon_f neon_mul(neon_f a, neon_f b) { return vmulq_f32(a, b); }
INLINE neon_f neon_div(neon_f a, neon_f b) { return vdivq_f32(a, b); }
INLINE neon_f neon_fma(neon_f a, neon_f b, neon_f c) { return vfmaq_f32(c, a, b); }
INLINE neon_f neon_sqrt(neon_f a) { return vsqrtq_f32(a); }
INLINE neon_f neon_max(neon_f a, neon_f b) { return vbslq_f32(vcgtq_f32(a, b), a, b); } /* b where either is NaN */
INLINE neon_f neon_min(neon_f a, neon_f b) { return vbslq_f32(vcltq_f32(a, b), a, b); } /* likewise */
INLINE neon_f neon_load_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
INLINE neon_f neon_load_fp16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE neon_u neon_near_bf16(neon_f x) {
    uint32x4_t bits = vreinterpretq_u32_f32(x);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return (neon_u)vshrq_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd), 16);
}
INLINE neon_u neon_to_bf16(neon_f x) {
    return (neon_u)vbslq_u32(vceqq_f32(x, x), (uint32x4_t)neon_near_bf16(x), vdupq_n_u32(0x7fc0));
}
INLINE neon_w neon_pack(neon_u a, neon_u b) { return vcombine_u16(vmovn_u32((uint32x4_t)a), vmovn_u32((uint32x4_t)b)); }
INLINE neon_w neon_to_fp16(neon_f a, neon_f b) {
    return vcombine_u16(vreinterpret_u16_f16(vcvt_f16_f32(a)), vreinterpret_u16_f16(vcvt_f16_f32(b)));
}
INLINE void neon_store_words(char *out, neon_w packed, int stream) { vst1q_u16((uint16_t *)out, packed); }
INLINE neon_u neon_max_u(neon_u a, neon_u b) { return (neon_u)vmaxq_u32((uint32x4_t)a, (uint32x4_t)b); }
INLINE neon_i neon_max_i(neon_i a, neon_i b) { return (neon_i)vmaxq_s32((int32x4_t)a, (int32x4_t)b); }
INLINE uint32_t neon_most(neon_u x) { return vmaxvq_u32((uint32x4_t)x); }
INLINE uint32_t neon_differ(neon_w a, neon_w b) {
    const neon_w word = {1, 2, 4, 8, 16, 32, 64, 128};
    return vaddvq_u16(vbicq_u16(word, vceqq_u16(a, b)));
}
INLINE neon_u neon_widen(const uint8_t *p) {
    uint32_t four;
    memcpy(&four, p, 4);
    return (neon_u)vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
}
INLINE void neon_narrow(uint8_t *p, const neon_u *x) {
    for (int i = 0; i < PACKED / 4; i += 4) {
        uint16x8_t low = vcombine_u16(vmovn_u32((uint32x4_t)x[i]), vmovn_u32((uint32x4_t)x[i + 1]));
        uint16x8_t high = vcombine_u16(vmovn_u32((uint32x4_t)x[i + 2]), vmovn_u32((uint32x4_t)x[i + 3]));
        vst1q_u8(p + 4 * i, vcombine_u8(vmovn_u16(low), vmovn_u16(high)));
    }
}
INLINE neon_d neon_load_d(const double *p) { return vld1q_f64(p); }
INLINE void neon_store_d(double *p, neon_d x) { vst1q_f64(p, x); }
INLINE neon_d neon_add_square_low(neon_d sum, neon_f x) {
    float64x2_t wide = vcvt_f64_f32(vget_low_f32(x));
    return vfmaq_f64(sum, wide, wide);
}
INLINE neon_d neon_add_square_high(neon_d sum, neon_f x) {
    float64x2_t wide = vcvt_high_f64_f32(x);
    return vfmaq_f64(sum, wide, wide);
}

static int runs_here(int isa) { return isa == PORTABLE || isa == NEON; }

typedef uint64_t rounding; /* FPCR */
static rounding plain_rounding(void) {
    rounding before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
    return before;
}
static void restore_rounding(rounding before) { __asm__ volatile("msr fpcr, %0" : : "r"(before) : "memory"); }
static void finish_stores(void) {} /* no non-temporal stores: the caller's release is enough */

#else

static int runs_here(int isa) { return isa == PORTABLE; }
typedef int rounding;
static rounding plain_rounding(void) { return 0; }
static void restore_rounding(rounding before) { (void)before; }
static void finish_stores(void) {}

#endif

#endif

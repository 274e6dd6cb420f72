/* The block codecs' arithmetic, included once per instruction set (each_isa.h). */

#define NEAREST 12582912.0f /* 1.5 x 2^23: added to a small float, it leaves the nearest integer in the low bits */

/* `count` values of a block as fp32, the rest zeros. */
INLINE TARGET void V(widen_block)(const void *values, int dtype, int64_t count, float *wide) {
    char padded[4 * VALUES] = {0};
    if (count < VALUES) memcpy(padded, values, size_of(dtype) * count), values = padded;
    for (int i = 0; i < VALUES; i += WIDTH) {
        const void *p = from(values, dtype, i);
        V(store)(wide + i, dtype == F32 ? V(load)(p) : dtype == BF16 ? V(load_bf16)(p) : V(load_fp16)(p));
    }
}

/* The first `count` values of a block, rounded to `dtype`. */
INLINE TARGET void V(narrow_block)(const float *wide, int dtype, int64_t count, void *values) {
    char whole[4 * VALUES] __attribute__((aligned(64)));
    char *to = count < VALUES ? whole : values;
    for (int i = 0; i < VALUES; i += 2 * WIDTH) {
        V(f) low = V(load)(wide + i), high = V(load)(wide + i + WIDTH);
        if (dtype == BF16) V(store_words)(to + 2 * i, V(pack)(V(to_bf16)(low), V(to_bf16)(high)), 0);
        else if (dtype == FP16) V(store_words)(to + 2 * i, V(to_fp16)(low, high), 0);
        else V(store)((float *)to + i, low), V(store)((float *)to + i + WIDTH, high);
    }
    if (count < VALUES) memcpy(values, whole, size_of(dtype) * count);
}

/* The largest magnitude of `count` floats: inf and nan are larger than all others. */
INLINE TARGET float V(largest)(const float *wide, int count) {
    V(u) most = {0};
    for (int i = 0; i < count; i += WIDTH) most = V(max_u)(most, (V(u))V(load)(wide + i) & 0x7fffffff);
    uint32_t found = V(most)(most);
    return float_of(found <= 0x7f800000 ? found : 0x7fc00000); /* one nan for all */
}

/* x / step to the nearest integer, ties to even, within +-limit; 0 where that is no number. In the low bits. */
INLINE TARGET V(u) V(code)(V(f) x, float step, float limit) {
    V(f) ratio = V(div)(x, V(set)(step));
    ratio = (V(f))((V(u))ratio & (V(u))(ratio == ratio));
    ratio = V(min)(V(set)(limit), V(max)(V(set)(-limit), ratio));
    return (V(u))V(add)(ratio, V(set)(NEAREST)) & 255;
}

/* Integers -128..127, stored as `code` + 128, times step. */
INLINE TARGET V(f) V(value)(V(u) code, float step) {
    V(f) integer = V(sub)((V(f))(code | 0x4b400000), V(set)(NEAREST + 128.0f));
    return V(mul)(integer, V(set)(step));
}

TARGET static void V(encode_int8)(const void *values, int dtype, int64_t count, uint8_t *row) {
    float wide[VALUES], scale;
    V(u) codes[PACKED / WIDTH];
    V(widen_block)(values, dtype, count, wide);
    scale = V(largest)(wide, VALUES) / 127.0f;
    memcpy(row, &scale, 4);
    for (int i = 0; i < VALUES; i += PACKED) {
        for (int j = 0; j < PACKED / WIDTH; j++) codes[j] = V(code)(V(load)(wide + i + j * WIDTH), scale, 127.0f);
        V(narrow)(row + 4 + i, codes);
    }
}

TARGET static void V(decode_int8)(const uint8_t *row, int dtype, int64_t count, void *values) {
    float wide[VALUES], scale;
    memcpy(&scale, row, 4);
    for (int i = 0; i < VALUES; i += WIDTH) V(store)(wide + i, V(value)(V(widen)(row + 4 + i) ^ 128, scale));
    V(narrow_block)(wide, dtype, count, values);
}

TARGET static void V(encode_int4)(const void *values, int dtype, int64_t count, uint8_t *row) {
    float wide[VALUES], largest[GROUPS], most = 0.0f, unit;
    uint8_t codes[VALUES], *scales = row + 4, *pairs = scales + GROUPS;
    V(widen_block)(values, dtype, count, wide);
    for (int g = 0; g < GROUPS; g++) largest[g] = V(largest)(wide + g * MEMBERS, MEMBERS);
    for (int g = 0; g < GROUPS; g++) most = bits_of(largest[g]) > bits_of(most) ? largest[g] : most;
    unit = most / 1785.0f;
    memcpy(row, &unit, 4);
    for (int g = 0; g < GROUPS; g++) {
        float part = largest[g] / most * 255.0f;
        int32_t scale = part >= 0.0f ? (int32_t)part : 0; /* 0 also where it is no number */
        scale += (float)scale < part;
        scales[g] = (uint8_t)(scale < 255 ? scale : 255);
        float step = (float)scales[g] * unit;
        for (int i = g * MEMBERS; i < (g + 1) * MEMBERS; i += WIDTH) {
            uint32_t found[WIDTH];
            V(u) code = V(code)(V(load)(wide + i), step, 7.0f);
            memcpy(found, &code, sizeof found);
            for (int j = 0; j < WIDTH; j++) codes[i + j] = (uint8_t)found[j];
        }
    }
    for (int i = 0; i < VALUES / 2; i++) pairs[i] = (uint8_t)((codes[2 * i] & 15) | codes[2 * i + 1] << 4);
}

TARGET static void V(decode_int4)(const uint8_t *row, int dtype, int64_t count, void *values) {
    float wide[VALUES], unit;
    uint8_t codes[VALUES];
    const uint8_t *scales = row + 4, *pairs = scales + GROUPS;
    memcpy(&unit, row, 4);
    for (int i = 0; i < VALUES / 2; i++) {
        codes[2 * i] = (uint8_t)(((pairs[i] & 15) ^ 8) + 120); /* 4 bits with a sign, plus 128 */
        codes[2 * i + 1] = (uint8_t)((pairs[i] >> 4 ^ 8) + 120);
    }
    for (int i = 0; i < VALUES; i += WIDTH) {
        float step = (float)scales[i / MEMBERS] * unit;
        V(store)(wide + i, V(value)(V(widen)(codes + i), step));
    }
    V(narrow_block)(wide, dtype, count, values);
}

#undef NEAREST

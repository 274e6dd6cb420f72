/* The kernel's arithmetic, included once per instruction set (each_isa.h). */

#define PAIR (2 * WIDTH) /* elements of one turn: two vectors make one vector of 16-bit parameters */

INLINE TARGET V(f) V(gradient)(const void *data, int dtype, int64_t at) {
    const void *p = from(data, dtype, at);
    return dtype == F32 ? V(load)(p) : dtype == BF16 ? V(load_bf16)(p) : V(load_fp16)(p);
}

INLINE TARGET V(f) V(clamp)(V(f) x, float limit) { /* a NaN stays */
    return V(min)(V(set)(limit), V(max)(V(set)(-limit), x));
}

typedef struct {
    V(f) master, mean, square, largest;
} V(states);

/* A vector of split masters. See [Note: split masters]. */
INLINE TARGET V(f) V(joined)(const span *q, V(f) square, int64_t at) {
    V(u) word = (V(u))V(load_bf16)((const uint16_t *)q->params + at);
    V(u) rest = (V(u))((V(i))V(load_bf16)(q->remainders + at) >> 16);
    return (V(f))(word + rest + ((V(u))square >> 31 << 16));
}

/* What a new master is beyond its parameter `word`, in the low halves; the sign of *square says the rest. */
INLINE TARGET V(u) V(remainder)(V(f) master, V(u) word, V(f) *square) {
    V(u) rest = (V(u))master - (word << 16);
    *square = (V(f))(((V(u))*square & 0x7fffffff) | ((V(u))(rest == 0x8000) & 0x80000000));
    return rest & 0xffff;
}

/* One vector of the update: its new states. Keeps the old ones in `kept`, from element `lane` on; not a split master. */
INLINE TARGET V(states) V(adam)(const rz_segment *s, const span *q, rz_chunk *kept, int lane, V(f) grad, int64_t at,
                                int split) {
    V(f) mean = V(load)(q->exp_avg + at), square = V(load)(q->exp_avg_sq + at);
    V(f) master = split ? V(joined)(q, square, at) : V(load)(q->master + at);
    V(f) largest = {0};
    if (!split) V(store)(kept->master + lane, master);
    V(store)(kept->exp_avg + lane, mean);
    V(store)(kept->exp_avg_sq + lane, square);
    if (split) square = (V(f))((V(u))square & 0x7fffffff);
    grad = V(mul)(grad, V(set)(s->scale));
    if (s->flags & CLAMP) grad = V(clamp)(grad, s->limit);
    if (s->flags & L2) grad = V(fma)(master, V(set)(s->weight_decay), grad);
    if (s->flags & DECAY) master = V(mul)(master, V(set)(s->weight_decay));
    mean = V(fma)(V(set)(s->lerp), V(sub)(grad, mean), s->flags & FROM_GRADIENT ? grad : mean);
    square = V(fma)(V(mul)(V(set)(s->one_minus_beta2), grad), grad, V(mul)(square, V(set)(s->beta2)));
    V(f) most = square;
    if (s->flags & AMSGRAD) {
        largest = V(load)(q->largest + at);
        V(store)(kept->largest + lane, largest);
        most = largest = V(max)(largest, square);
    }
    V(f) denominator = V(add)(V(div)(V(sqrt)(most), V(set)(s->bias2_sqrt)), V(set)(s->eps));
    master = V(sub)(master, V(div)(V(mul)(V(set)(s->step_size), mean), denominator));
    return (V(states)){master, mean, square, largest};
}

INLINE TARGET void V(store_states)(const rz_segment *s, const span *q, V(states) found, int64_t at, int split) {
    V(store)(q->exp_avg + at, found.mean);
    CRASH_POINT();
    V(store)(q->exp_avg_sq + at, found.square);
    if (s->flags & AMSGRAD) V(store)(q->largest + at, found.largest);
    CRASH_POINT();
    if (!split) V(store)(q->master + at, found.master);
    CRASH_POINT();
}

/* Write into `changed` which words of a pair are others than they were. */
INLINE TARGET void V(note_changes)(uint8_t *changed, V(w) before, V(w) words) {
    uint32_t bits = V(differ)(before, words);
    memcpy(changed, &bits, PAIR / 8);
}

/* Publish a pair as 16-bit words. With `noting`, write into `changed` which of them are others than what the old masters
 * `was` were rounded to. See [Note: what changes]. */
INLINE TARGET void V(publish_words)(char *out, int dtype, int stream, V(f) low, V(f) high, int noting, uint8_t *changed,
                                    const float *was) {
    V(w) words = dtype == BF16 ? V(pack)(V(to_bf16)(low), V(to_bf16)(high)) : V(to_fp16)(low, high);
    V(store_words)(out, words, stream);
    if (!noting) return;
    low = V(load)(was), high = V(load)(was + WIDTH);
    V(w) before = dtype == BF16 ? V(pack)(V(near_bf16)(low), V(near_bf16)(high)) : V(to_fp16)(low, high);
    V(note_changes)(changed, before, words);
}

/* `count` elements, a multiple of PAIR; dtype, out, noting and split are constants where this is called, stream mostly. */
INLINE TARGET void V(turns)(const rz_segment *s, const span *q, const void *grads, int64_t count, int dtype, int out,
                            int stream, int noting, int split) {
    const rz_segment constants = *s; /* copies: no store can change them */
    const span to = *q;
    rz_chunk *kept = spare_chunk(to.undo), *next = &to.undo->chunks[kept == to.undo->chunks];
    for (int64_t at = 0; at < count; at += PAIR) {
        ask_ahead(from(grads, dtype, at), PAIR * size_of(dtype), AHEAD / 2);
        if (split) ask_ahead(to.params + 2 * at, PAIR * 2, AHEAD / 2), ask_ahead(to.remainders + at, PAIR * 2, AHEAD / 2);
        else ask_ahead(to.master + at, PAIR * 4, AHEAD);
        ask_ahead(to.exp_avg + at, PAIR * 4, AHEAD);
        ask_ahead(to.exp_avg_sq + at, PAIR * 4, AHEAD);
        V(states) low = V(adam)(&constants, &to, kept, 0, V(gradient)(grads, dtype, at), at, split);
        CRASH_POINT();
        V(states) high = V(adam)(&constants, &to, kept, WIDTH, V(gradient)(grads, dtype, at + WIDTH), at + WIDTH, split);
        V(w) before, words = {0}, rests = {0};
        if (split) {
            memcpy(&before, to.params + 2 * at, sizeof before);
            memcpy(kept->master, &before, sizeof before);
            memcpy(kept->master + REMAINDERS, to.remainders + at, 2 * PAIR);
            V(u) first = V(to_bf16)(low.master), second = V(to_bf16)(high.master);
            words = V(pack)(first, second);
            rests = V(pack)(V(remainder)(low.master, first, &low.square), V(remainder)(high.master, second, &high.square));
        }
        kept->count = PAIR;
        note_chunk(to.undo, kept, to.first + at);
        V(store_states)(&constants, &to, low, at, split);
        V(store_states)(&constants, &to, high, at + WIDTH, split);
        if (split) {
            V(store_words)((char *)(to.remainders + at), rests, 0);
            CRASH_POINT();
            V(store_words)(to.params + 2 * at, words, 0);
            CRASH_POINT();
            if (noting) V(note_changes)(to.changed + at / 8, before, words);
        }
        if (out == F32) V(store)((float *)to.params + at, low.master);
        if (out == F32) V(store)((float *)to.params + at + WIDTH, high.master);
        if (!split && (out == BF16 || out == FP16))
            V(publish_words)(to.params + 2 * at, out, stream, low.master, high.master, noting, to.changed + at / 8,
                             kept->master);
        rz_chunk *used = kept;
        kept = next, next = used;
    }
}

INLINE TARGET void V(turns_to)(const rz_segment *s, const span *q, const void *grads, int64_t count, int dtype) {
    int stream = (uintptr_t)q->params % (2 * PAIR) == 0;
    if (q->remainders && q->changed) V(turns)(s, q, grads, count, dtype, BF16, 0, 1, 1);
    else if (q->remainders) V(turns)(s, q, grads, count, dtype, BF16, 0, 0, 1);
    else if (q->changed && q->out == BF16) V(turns)(s, q, grads, count, dtype, BF16, stream, 1, 0);
    else if (q->changed) V(turns)(s, q, grads, count, dtype, FP16, stream, 1, 0);
    else if (q->out == NONE) V(turns)(s, q, grads, count, dtype, NONE, 0, 0, 0);
    else if (q->out == F32) V(turns)(s, q, grads, count, dtype, F32, 0, 0, 0);
    else if (q->out == BF16 && stream) V(turns)(s, q, grads, count, dtype, BF16, 1, 0, 0);
    else if (q->out == BF16) V(turns)(s, q, grads, count, dtype, BF16, 0, 0, 0);
    else if (stream) V(turns)(s, q, grads, count, dtype, FP16, 1, 0, 0);
    else V(turns)(s, q, grads, count, dtype, FP16, 0, 0, 0);
}

TARGET static void V(whole)(const rz_segment *s, const span *q, const void *grads, int64_t count, int dtype) {
    if (dtype == BF16) V(turns_to)(s, q, grads, count, BF16);
    else if (dtype == FP16) V(turns_to)(s, q, grads, count, FP16);
    else V(turns_to)(s, q, grads, count, F32);
}

/* For fewer than PAIR elements: the same code over a padded copy. */
TARGET static void V(rest)(const rz_segment *s, const span *q, const void *grads, int64_t count, int dtype) {
    float state[4][PAIR] = {{0}}, padded[PAIR] = {0};
    char params[4 * PAIR] __attribute__((aligned(64))) = {0};
    uint16_t rests[PAIR] = {0};
    rz_chunk *kept = spare_chunk(q->undo);
    float *of[4] = {q->master, q->exp_avg, q->exp_avg_sq, s->flags & AMSGRAD ? q->largest : 0};
    float *old[4] = {kept->master, kept->exp_avg, kept->exp_avg_sq, kept->largest};
    for (int i = 0; i < 4; i++)
        if (of[i]) memcpy(state[i], of[i], 4 * count), memcpy(old[i], of[i], 4 * count);
    if (q->remainders) {
        memcpy(params, q->params, 2 * count), memcpy(kept->master, q->params, 2 * count);
        memcpy(rests, q->remainders, 2 * count), memcpy(kept->master + REMAINDERS, q->remainders, 2 * count);
    }
    kept->count = count;
    memcpy(padded, grads, size_of(dtype) * count);
    rz_undo nowhere = {0};
    span copy = {state[0], state[1], state[2], state[3], params, q->out, 0, &nowhere, 0, q->remainders ? rests : 0};
    V(whole)(s, &copy, padded, PAIR, dtype);
    note_chunk(q->undo, kept, q->first);
    for (int i = 0; i < 4; i++)
        if (of[i]) memcpy(of[i], state[i], 4 * count);
    if (q->remainders) memcpy(q->remainders, rests, 2 * count);
    if (q->out != NONE) memcpy(q->params, params, size_of(q->out) * count);
}

/* sums[i] = (or, with `add`, +=) gradient i. */
TARGET static void V(gather)(float *sums, const void *data, int dtype, int64_t count, int add) {
    float padded[WIDTH] = {0}, last[WIDTH];
    int64_t full = count - count % WIDTH;
    for (int64_t at = 0; at < full; at += WIDTH) {
        ask_ahead(from(data, dtype, at), WIDTH * size_of(dtype), BLOCK * size_of(dtype)); /* the next block's turn */
        V(f) x = V(gradient)(data, dtype, at);
        V(store)(sums + at, add ? V(add)(V(load)(sums + at), x) : x);
    }
    if (full == count) return;
    memcpy(padded, from(data, dtype, full), size_of(dtype) * (count - full));
    V(store)(last, V(gradient)(padded, dtype, 0));
    for (int64_t at = full; at < count; at++) sums[at] = add ? sums[at] + last[at - full] : last[at - full];
}

/* The gradients' sum over ranks at [at, at + count): in rank order within a group of ranks, groups in order. */
TARGET static void V(sum)(const rz_gradient *grads, int64_t num, int64_t at, int64_t count, float *sum, float *group) {
    float *to = 0;
    int32_t current = -1;
    for (int64_t i = 0; i < num; i++) {
        if (!grads[i].data) continue;
        int fresh = grads[i].rank / GROUP != current;
        if (fresh && to == group) V(gather)(sum, group, F32, count, 1);
        if (fresh) to = to ? group : sum;
        V(gather)(to, from(grads[i].data, grads[i].dtype, at), grads[i].dtype, count, !fresh);
        current = grads[i].rank / GROUP;
    }
    if (to == group) V(gather)(sum, group, F32, count, 1);
    if (!to) memset(sum, 0, sizeof(float) * count);
}

/* Write the gradients' sum over ranks at [start, stop) into a total, or add it there. See rz_add. */
TARGET static void V(add_up)(const rz_gradient *grads, int64_t num, int64_t start, int64_t stop, int add, float *total,
                             const rz_kept *kept) {
    float sum[BLOCK], group[BLOCK];
    for (int64_t at = start; at < stop; at += BLOCK) {
        int64_t count = least(BLOCK, stop - at);
        ask_ahead(total + at, 4 * BLOCK, 4 * BLOCK); /* the next block's turn */
        V(sum)(grads, num, at, count, sum, group);
        keep(kept, total, at + count);
        V(gather)(total + at, sum, F32, count, add);
        CRASH_POINT();
    }
}

/* The gradient, if there is only one; else NULL. Writes how many there are into *present. */
TARGET static const rz_gradient *V(only)(const rz_gradient *grads, int64_t num, int64_t *present) {
    const rz_gradient *found = 0;
    *present = 0;
    for (int64_t i = 0; i < num; i++)
        if (grads[i].data) found = &grads[i], ++*present;
    return *present == 1 ? found : 0;
}

/* ---- [Note: coded moments] */

#define VECTORS (SCALED / WIDTH) /* that share a scale */
#define ONE 0x3f800000u          /* the bits of 1.0 */

/* Codes of magnitudes up to 1: see [Note: coded moments]. `shift`: bits of a float below a code's last; `top`: the code
 * of 1.0; half a step is rounded up, and what is smaller than code `least` becomes that. */
INLINE TARGET V(i) V(to_codes)(V(u) bits, int shift, uint32_t top, int least) {
    V(i) code = (V(i))(bits + ((1u << (shift - 1)) - (ONE - (top << shift)))) >> shift;
    return V(max_i)(code, (V(i))(V(u)){0} + least);
}

INLINE TARGET void V(decode)(const char *codes, float scale, int dtype, int signs, V(f) *to) {
    for (int i = 0; i < VECTORS; i++) {
        if (dtype == BF16) {
            to[i] = V(load_bf16)((const uint16_t *)codes + i * WIDTH);
        } else {
            V(u) code = V(widen)((const uint8_t *)codes + i * WIDTH), size = code & 127;
            V(u) root = (code << ROOT_SHIFT) + (ONE - (ROOT_TOP << ROOT_SHIFT));
            V(u) mean = ((size << MEAN_SHIFT) + (ONE - (MEAN_TOP << MEAN_SHIFT))) & (V(u))(size != 0);
            to[i] = (V(f))(signs ? mean | (code << 24 & 0x80000000) : root);
        }
        to[i] = V(mul)(to[i], V(set)(scale));
    }
}

/* Returns the scale. Magnitudes are ordered as their bits, with a NaN above all. */
INLINE TARGET float V(encode)(const V(f) *values, char *codes, int dtype, int signs) {
    const uint32_t size = signs ? 0x7fffffff : 0xffffffff;
    V(u) largest = (V(u))values[0] & size, found[VECTORS];
    for (int i = 1; i < VECTORS; i++) largest = V(max_u)(largest, (V(u))values[i] & size);
    uint32_t most = V(most)(largest);
    if (dtype == BF16 && !signs && most > ROOT_LIMIT) most = ROOT_LIMIT; /* an infinite root, or a NaN: a code of its own */
    float scale = most >= LEAST_SCALE ? float_of(most) : 0.0f, inverse = most >= LEAST_SCALE ? 1.0f / scale : 0.0f;
    for (int i = 0; i < VECTORS; i += 2) {
        V(f) low = V(mul)(values[i], V(set)(inverse)), high = V(mul)(values[i + 1], V(set)(inverse));
        if (dtype == BF16) {
            V(store_words)(codes + 2 * i * WIDTH, V(pack)(V(to_bf16)(low), V(to_bf16)(high)), 0);
        } else if (signs) {
            V(u) first = (V(u))low, second = (V(u))high;
            found[i] = (V(u))V(to_codes)(first & 0x7fffffff, MEAN_SHIFT, MEAN_TOP, 0) | (first >> 24 & 128);
            found[i + 1] = (V(u))V(to_codes)(second & 0x7fffffff, MEAN_SHIFT, MEAN_TOP, 0) | (second >> 24 & 128);
        } else {
            found[i] = (V(u))V(to_codes)((V(u))low, ROOT_SHIFT, ROOT_TOP, 1);
            found[i + 1] = (V(u))V(to_codes)((V(u))high, ROOT_SHIFT, ROOT_TOP, 1);
        }
    }
    if (dtype != BF16) V(narrow)((uint8_t *)codes, found);
    return scale;
}

/* One vector of the update; returns the new master. */
INLINE TARGET V(f) V(adam_coded)(const rz_segment *s, V(f) master, V(f) grad, V(f) *mean, V(f) *root) {
    grad = V(mul)(grad, V(set)(s->scale));
    if (s->flags & CLAMP) grad = V(clamp)(grad, s->limit);
    if (s->flags & L2) grad = V(fma)(master, V(set)(s->weight_decay), grad);
    if (s->flags & DECAY) master = V(mul)(master, V(set)(s->weight_decay));
    *mean = V(fma)(V(set)(s->lerp), V(sub)(grad, *mean), s->flags & FROM_GRADIENT ? grad : *mean);
    V(f) decayed = V(mul)(V(mul)(*root, *root), V(set)(s->beta2));
    *root = V(sqrt)(V(fma)(V(mul)(V(set)(s->one_minus_beta2), grad), grad, decayed));
    V(f) denominator = V(fma)(*root, V(set)(s->bias2_sqrt), V(set)(s->eps));
    return V(sub)(master, V(div)(V(mul)(V(set)(s->step_size), *mean), denominator));
}

INLINE TARGET void V(publish)(const rz_memory *memory, int64_t at, V(f) low, V(f) high, const float *was) {
    char *out = memory->params;
    if (!out) return;
    int dtype = memory->params_dtype, noting = memory->changed != 0;
    if (dtype == F32) V(store)((float *)out + at, low), V(store)((float *)out + at + WIDTH, high);
    else V(publish_words)(out + 2 * at, dtype, 0, low, high, noting, memory->changed + at / 8, was);
}

/* `count` elements, a multiple of SCALED, from element `start` of the shard on; both dtypes are constants where this is
 * called. */
INLINE TARGET void V(blocks)(const rz_memory *m, rz_undo *undo, const rz_segment *s, const void *grads, int64_t start,
                             int64_t count, int dtype, int coded) {
    const rz_segment constants = *s;
    const rz_memory memory = *m;
    const int64_t bytes = coded == BF16 ? 2 : 1;
    rz_chunk *kept = spare_chunk(undo), *next = &undo->chunks[kept == undo->chunks];
    for (int64_t at = start; at < start + count; at += SCALED) {
        V(f) means[VECTORS], roots[VECTORS], masters[VECTORS];
        char *mean = (char *)memory.exp_avg + bytes * at, *root = (char *)memory.exp_avg_sq + bytes * at;
        float *mean_scale = memory.exp_avg_scale + at / SCALED, *root_scale = memory.exp_avg_sq_scale + at / SCALED;
        ask_ahead(from(grads, dtype, at - start), SCALED * size_of(dtype), AHEAD / 2);
        ask_ahead(memory.master + at, SCALED * 4, AHEAD);
        ask_ahead(mean, SCALED * bytes, AHEAD / 2);
        ask_ahead(root, SCALED * bytes, AHEAD / 2);
        memcpy(kept->exp_avg, mean, SCALED * bytes), memcpy(kept->exp_avg_sq, root, SCALED * bytes);
        kept->exp_avg_scale = *mean_scale, kept->exp_avg_sq_scale = *root_scale;
        V(decode)(mean, *mean_scale, coded, 1, means);
        V(decode)(root, *root_scale, coded, 0, roots);
        for (int i = 0; i < VECTORS; i++) {
            V(f) master = V(load)(memory.master + at + i * WIDTH);
            V(store)(kept->master + i * WIDTH, master);
            V(f) grad = V(gradient)(grads, dtype, at - start + i * WIDTH);
            masters[i] = V(adam_coded)(&constants, master, grad, means + i, roots + i);
            CRASH_POINT();
        }
        kept->count = SCALED;
        note_chunk(undo, kept, at);
        for (int i = 0; i < VECTORS; i += 2) {
            V(store)(memory.master + at + i * WIDTH, masters[i]);
            V(store)(memory.master + at + (i + 1) * WIDTH, masters[i + 1]);
            V(publish)(&memory, at + i * WIDTH, masters[i], masters[i + 1], kept->master + i * WIDTH);
            CRASH_POINT();
        }
        *mean_scale = V(encode)(means, mean, coded, 1);
        CRASH_POINT();
        *root_scale = V(encode)(roots, root, coded, 0);
        CRASH_POINT();
        rz_chunk *used = kept;
        kept = next, next = used;
    }
}

TARGET static void V(coded)(const rz_memory *memory, rz_undo *undo, const rz_segment *s, const void *grads, int64_t start,
                            int64_t count, int dtype) {
    if (memory->moments_dtype == CODES && dtype == BF16) V(blocks)(memory, undo, s, grads, start, count, BF16, CODES);
    else if (memory->moments_dtype == CODES && dtype == FP16) V(blocks)(memory, undo, s, grads, start, count, FP16, CODES);
    else if (memory->moments_dtype == CODES) V(blocks)(memory, undo, s, grads, start, count, F32, CODES);
    else if (dtype == BF16) V(blocks)(memory, undo, s, grads, start, count, BF16, BF16);
    else if (dtype == FP16) V(blocks)(memory, undo, s, grads, start, count, FP16, BF16);
    else V(blocks)(memory, undo, s, grads, start, count, F32, BF16);
}

/* Update elements [start, stop) of one segment. */
TARGET static void V(update)(const rz_memory *memory, rz_undo *undo, const rz_segment *s, int64_t start, int64_t stop) {
    float sum[BLOCK], group[BLOCK];
    int64_t present;
    const rz_gradient *only = V(only)(s->gradients, s->num_gradients, &present);
    if (!present) return;
    int dtype = only ? only->dtype : F32;
    for (int64_t at = start, count; at < stop; at += count) {
        count = only ? stop - at : least(BLOCK, stop - at);
        if (!only) V(sum)(s->gradients, s->num_gradients, at, count, sum, group);
        const void *grads = only ? from(only->data, dtype, at) : sum;
        if (memory->moments_dtype != F32) {
            V(coded)(memory, undo, s, grads, at, count, dtype);
            continue;
        }
        span whole = span_at(memory, undo, at), rest = span_at(memory, undo, at + count - count % PAIR);
        V(whole)(s, &whole, grads, count - count % PAIR, dtype);
        if (count % PAIR) V(rest)(s, &rest, from(grads, dtype, count - count % PAIR), count % PAIR, dtype);
    }
}

#define DOUBLES (WIDTH / 2) /* in a vector */

/* Add the squares of `count` gradients, a multiple of LANES: element i to lane i mod LANES. A float's square is exact in
 * double, so it is one rounding whether or not the addition is fused. */
INLINE TARGET void V(add_squares)(const void *data, int dtype, int64_t count, double *lanes) {
    V(d) sums[LANES / DOUBLES];
    for (int i = 0; i < LANES / DOUBLES; i++) sums[i] = V(load_d)(lanes + i * DOUBLES);
    for (int64_t at = 0; at < count; at += LANES) {
        ask_ahead(from(data, dtype, at), LANES * size_of(dtype), AHEAD);
        for (int i = 0; i < LANES / WIDTH; i++) {
            V(f) values = V(gradient)(data, dtype, at + i * WIDTH);
            sums[2 * i] = V(add_square_low)(sums[2 * i], values);
            sums[2 * i + 1] = V(add_square_high)(sums[2 * i + 1], values);
        }
    }
    for (int i = 0; i < LANES / DOUBLES; i++) V(store_d)(lanes + i * DOUBLES, sums[i]);
}

TARGET static void V(add_squares_of)(const void *data, int dtype, int64_t count, double *lanes) {
    if (dtype == BF16) V(add_squares)(data, BF16, count, lanes);
    else if (dtype == FP16) V(add_squares)(data, FP16, count, lanes);
    else V(add_squares)(data, F32, count, lanes);
}

/* The sum of squares over one leaf, lanes added by halves. See rz_squares for scale, limit and sums. */
TARGET static double V(leaf)(const rz_gradient *grads, int64_t num, int64_t start, int64_t stop, float scale,
                             float limit, float *sums) {
    float sum[BLOCK], group[BLOCK];
    double lanes[LANES] = {0};
    int64_t present, direct = 0;
    const rz_gradient *only = V(only)(grads, num, &present);
    int clamped = limit <= FLT_MAX;
    if (only && !clamped && !sums) direct = (stop - start) / LANES * LANES;
    if (direct) V(add_squares_of)(from(only->data, only->dtype, start), only->dtype, direct, lanes);
    for (int64_t at = start + direct; at < stop; at += BLOCK) {
        int64_t count = least(BLOCK, stop - at), padded = (count + LANES - 1) / LANES * LANES;
        V(sum)(grads, num, at, count, sum, group);
        if (sums) memcpy(sums + at, sum, sizeof(float) * count);
        memset(sum + count, 0, sizeof(float) * (padded - count));
        for (int64_t i = 0; clamped && i < padded; i += WIDTH)
            V(store)(sum + i, V(clamp)(V(mul)(V(load)(sum + i), V(set)(scale)), limit));
        V(add_squares_of)(sum, F32, padded, lanes);
    }
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

#undef PAIR
#undef DOUBLES
#undef VECTORS
#undef ONE

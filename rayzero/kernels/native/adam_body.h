/* The kernel's arithmetic, included once per instruction set by adam.c.
 *
 * ISA is the prefix of the vector functions, WIDTH the floats in a vector, TARGET the functions' attribute. */

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define V(name) JOIN(ISA, name)
#define PAIR (2 * WIDTH) /* elements of one turn: two vectors make one vector of 16-bit parameters */

INLINE TARGET V(f) V(gradient)(const void *data, int dtype, int64_t at) {
    const void *p = from(data, dtype, at);
    return dtype == F32 ? V(load)(p) : dtype == BF16 ? V(load_bf16)(p) : V(load_fp16)(p);
}

INLINE TARGET V(f) V(clamp)(V(f) x, float limit) { /* a NaN stays */
    return V(min)(V(set)(limit), V(max)(V(set)(-limit), x));
}

/* One vector of the update; returns the new master. */
INLINE TARGET V(f) V(adam)(const rz_segment *s, const span *q, V(f) grad, int64_t at) {
    V(f) master = V(load)(q->master + at), mean = V(load)(q->exp_avg + at), square = V(load)(q->exp_avg_sq + at);
    grad = V(mul)(grad, V(set)(s->scale));
    if (s->flags & CLAMP) grad = V(clamp)(grad, s->limit);
    if (s->flags & L2) grad = V(fma)(master, V(set)(s->weight_decay), grad);
    if (s->flags & DECAY) master = V(mul)(master, V(set)(s->weight_decay));
    mean = V(fma)(V(set)(s->lerp), V(sub)(grad, mean), s->flags & FROM_GRADIENT ? grad : mean);
    square = V(fma)(V(mul)(V(set)(s->one_minus_beta2), grad), grad, V(mul)(square, V(set)(s->beta2)));
    V(store)(q->exp_avg + at, mean);
    V(store)(q->exp_avg_sq + at, square);
    if (s->flags & AMSGRAD) {
        square = V(max)(V(load)(q->largest + at), square);
        V(store)(q->largest + at, square);
    }
    V(f) denominator = V(add)(V(div)(V(sqrt)(square), V(set)(s->bias2_sqrt)), V(set)(s->eps));
    master = V(sub)(master, V(div)(V(mul)(V(set)(s->step_size), mean), denominator));
    V(store)(q->master + at, master);
    return master;
}

/* `count` elements, a multiple of PAIR; dtype, out and stream are constants where this is called. */
INLINE TARGET void V(turns)(const rz_segment *s, const span *q, const void *grads, int64_t count, int dtype, int out,
                            int stream) {
    const rz_segment constants = *s; /* copies: no store can change them */
    const span to = *q;
    for (int64_t at = 0; at < count; at += PAIR) {
        ask_ahead(from(grads, dtype, at), PAIR * size_of(dtype), AHEAD / 2);
        ask_ahead(to.master + at, PAIR * 4, AHEAD);
        ask_ahead(to.exp_avg + at, PAIR * 4, AHEAD);
        ask_ahead(to.exp_avg_sq + at, PAIR * 4, AHEAD);
        V(f) low = V(adam)(&constants, &to, V(gradient)(grads, dtype, at), at);
        V(f) high = V(adam)(&constants, &to, V(gradient)(grads, dtype, at + WIDTH), at + WIDTH);
        if (out == BF16) V(store_bf16)(to.params + 2 * at, low, high, stream);
        if (out == FP16) V(store_fp16)(to.params + 2 * at, low, high, stream);
        if (out == F32) V(store)((float *)to.params + at, low), V(store)((float *)to.params + at + WIDTH, high);
    }
}

INLINE TARGET void V(turns_to)(const rz_segment *s, const span *q, const void *grads, int64_t count, int dtype) {
    int stream = (uintptr_t)q->params % (2 * PAIR) == 0;
    if (q->out == NONE) V(turns)(s, q, grads, count, dtype, NONE, 0);
    else if (q->out == F32) V(turns)(s, q, grads, count, dtype, F32, 0);
    else if (q->out == BF16 && stream) V(turns)(s, q, grads, count, dtype, BF16, 1);
    else if (q->out == BF16) V(turns)(s, q, grads, count, dtype, BF16, 0);
    else if (stream) V(turns)(s, q, grads, count, dtype, FP16, 1);
    else V(turns)(s, q, grads, count, dtype, FP16, 0);
}

TARGET static void V(whole)(const rz_segment *s, const span *q, const void *grads, int64_t count, int dtype) {
    if (dtype == BF16) V(turns_to)(s, q, grads, count, BF16);
    else if (dtype == FP16) V(turns_to)(s, q, grads, count, FP16);
    else V(turns_to)(s, q, grads, count, F32);
}

/* For fewer than PAIR elements: the same code over a padded copy. */
TARGET static void V(rest)(const rz_segment *s, const span *q, const void *grads, int64_t count, int dtype) {
    float state[4][PAIR] = {{0}}, padded[PAIR] = {0};
    char params[4 * PAIR] __attribute__((aligned(64)));
    float *of[4] = {q->master, q->exp_avg, q->exp_avg_sq, s->flags & AMSGRAD ? q->largest : 0};
    for (int i = 0; i < 4; i++)
        if (of[i]) memcpy(state[i], of[i], 4 * count);
    memcpy(padded, grads, size_of(dtype) * count);
    span copy = {state[0], state[1], state[2], state[3], params, q->out};
    V(whole)(s, &copy, padded, PAIR, dtype);
    for (int i = 0; i < 4; i++)
        if (of[i]) memcpy(of[i], state[i], 4 * count);
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

/* The gradient, if there is only one; else NULL. Writes how many there are into *present. */
TARGET static const rz_gradient *V(only)(const rz_gradient *grads, int64_t num, int64_t *present) {
    const rz_gradient *found = 0;
    *present = 0;
    for (int64_t i = 0; i < num; i++)
        if (grads[i].data) found = &grads[i], ++*present;
    return *present == 1 ? found : 0;
}

/* Update elements [start, stop) of one segment. */
TARGET static void V(update)(const rz_memory *memory, const rz_segment *s, int64_t start, int64_t stop) {
    float sum[BLOCK], group[BLOCK];
    int64_t present;
    const rz_gradient *only = V(only)(s->gradients, s->num_gradients, &present);
    if (!present) return;
    int dtype = only ? only->dtype : F32;
    for (int64_t at = start, count; at < stop; at += count) {
        count = only ? stop - at : least(BLOCK, stop - at);
        if (!only) V(sum)(s->gradients, s->num_gradients, at, count, sum, group);
        const void *grads = only ? from(only->data, dtype, at) : sum;
        span whole = span_at(memory, at), rest = span_at(memory, at + count - count % PAIR);
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

/* The sum of squares over one leaf, lanes added by halves. See rz_squares for scale and limit. */
TARGET static double V(leaf)(const rz_gradient *grads, int64_t num, int64_t start, int64_t stop, float scale,
                             float limit) {
    float sum[BLOCK], group[BLOCK];
    double lanes[LANES] = {0};
    int64_t present, direct = 0;
    const rz_gradient *only = V(only)(grads, num, &present);
    int clamped = limit <= FLT_MAX;
    if (only && !clamped) direct = (stop - start) / LANES * LANES;
    if (direct) V(add_squares_of)(from(only->data, only->dtype, start), only->dtype, direct, lanes);
    for (int64_t at = start + direct; at < stop; at += BLOCK) {
        int64_t count = least(BLOCK, stop - at), padded = (count + LANES - 1) / LANES * LANES;
        V(sum)(grads, num, at, count, sum, group);
        memset(sum + count, 0, sizeof(float) * (padded - count));
        for (int64_t i = 0; clamped && i < padded; i += WIDTH)
            V(store)(sum + i, V(clamp)(V(mul)(V(load)(sum + i), V(set)(scale)), limit));
        V(add_squares_of)(sum, F32, padded, lanes);
    }
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

#undef ISA
#undef TARGET
#undef WIDTH
#undef JOIN_
#undef JOIN
#undef V
#undef PAIR
#undef DOUBLES

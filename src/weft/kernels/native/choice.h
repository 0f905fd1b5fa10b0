/* weft_choose and weft_logprobs of weft.h: a token of each line of logits, and log-probabilities. Included by sgemm.c behind blocks.h. */

struct ranked {
    float logit;
    int32_t token;
};

static int by_rank(const void *one, const void *other) {
    const struct ranked *a = one, *b = other;
    if (a->logit != b->logit) return a->logit > b->logit ? -1 : 1;
    return (a->token > b->token) - (a->token < b->token);
}

/* The `count` likeliest of n logits, in order; `found` has room for twice as many. */
static void find_likeliest(const float *x, size_t n, size_t count, struct ranked *found) {
    float floor = -INFINITY; /* what is not above it has `count` before it */
    size_t num_found = 0;
    for (size_t i = 0; i < n; i++) {
        if (num_found >= count && !(x[i] > floor)) continue;
        found[num_found++] = (struct ranked){x[i], (int32_t)i};
        if (num_found < 2 * count) continue;
        qsort(found, num_found, sizeof *found, by_rank);
        num_found = count;
        floor = found[count - 1].logit;
    }
    qsort(found, num_found, sizeof *found, by_rank);
}

/* The likeliest of n tokens, in order, so many that their weights sum up to `goal`, and maybe some more; returns how many. */
static size_t find_share(const float *x, const float *weights, size_t n, double goal, struct ranked *found) {
    size_t num_found = 0;
    double sum = 0.0;
    for (float floor = 0.0625f; sum < goal && num_found < n; floor *= 0.0625f) { /* at last zero, which all have */
        num_found = 0, sum = 0.0;
        for (size_t i = 0; i < n; i++)
            if (weights[i] >= floor) found[num_found++] = (struct ranked){x[i], (int32_t)i}, sum += weights[i];
    }
    qsort(found, num_found, sizeof *found, by_rank);
    return num_found;
}

/* One line's token of those that top_k and top_p leave; x as for `choose`, `rest`: memory for as many numbers and one more a block. */
static int32_t draw_ranked(const struct weft_choice *c, size_t line, const float *x, size_t padded, float most, float uniform, float *rest) {
    const size_t blocks = padded / WEFT_DRAW_BLOCK, top_k = c->top_k[line] > 0 ? (size_t)c->top_k[line] : c->n;
    const float temperature = c->temperature[line], min_p = c->min_p[line], top_p = c->top_p[line];
    size_t count = top_k < c->n ? top_k : c->n;
    struct ranked *ranked = scratch(ITEM_SCRATCH, 2 * c->n * sizeof *ranked);
    double total = 0.0;
    if (count < c->n) {
        find_likeliest(x, c->n, count, ranked);
    } else {
        memcpy(rest, x, padded * sizeof(float));
        total = bound.kernels->weigh(rest, padded, most, temperature, min_p, rest + padded);
        count = find_share(x, rest, c->n, (double)top_p * total, ranked);
    }
    const size_t whole = (count + WEFT_DRAW_BLOCK - 1) / WEFT_DRAW_BLOCK * WEFT_DRAW_BLOCK;
    for (size_t i = 0; i < whole; i++) rest[i] = i < count ? ranked[i].logit : -INFINITY;
    const double found = bound.kernels->weigh(rest, whole, most, temperature, min_p, rest + blocks * WEFT_DRAW_BLOCK);
    const double goal = top_p >= 1.0f ? INFINITY : (double)top_p * (top_k < c->n ? found : total);
    double kept = 0.0, sum = 0.0;
    size_t end = 0;
    while (end < count && rest[end] > 0.0f && kept < goal) kept += rest[end++];
    size_t place = 0;
    while (place + 1 < end && (sum += rest[place]) <= (double)uniform * kept) place++;
    return ranked[place].token;
}

static void choose_lines(const void *subject, size_t begin, size_t end) {
    const struct weft_choice *c = subject;
    const size_t blocks = (c->n + WEFT_DRAW_BLOCK - 1) / WEFT_DRAW_BLOCK, padded = blocks * WEFT_DRAW_BLOCK;
    float *x = scratch(SCORE_SCRATCH, (2 * padded + blocks) * sizeof(float)), *rest = x + padded;
    for (size_t line = begin; line < end; line++) {
        int is_number, is_still;
        memcpy(x, c->logits + line * c->n, c->n * sizeof(float));
        for (size_t i = c->n; i < padded; i++) x[i] = -INFINITY;
        float most = bound.kernels->most(x, padded, &is_number);
        c->problems[line] = is_number && isfinite(most) ? 0 : 2;
        if (c->allowed != NULL) {
            const uint8_t *allowed = c->allowed + line * c->n;
            for (size_t i = 0; i < c->n; i++) x[i] = allowed[i] ? x[i] : -INFINITY;
            most = bound.kernels->most(x, padded, &is_still);
            if (c->problems[line] == 0 && most == -INFINITY) c->problems[line] = 1;
        }
        const float uniform = c->uniform == NULL ? 0.0f : c->uniform[line];
        const int is_ranked = c->temperature[line] != 0.0f && ((c->top_k[line] > 0 && (size_t)c->top_k[line] < c->n) || c->top_p[line] < 1.0f);
        if (c->problems[line] != 0)
            c->tokens[line] = 0;
        else if (is_ranked)
            c->tokens[line] = draw_ranked(c, line, x, padded, most, uniform, rest);
        else
            c->tokens[line] = bound.kernels->choose(x, padded, most, c->temperature[line], c->min_p[line], uniform, rest);
    }
}

EXPORT void weft_choose(const struct weft_choice *c) { share_sized(choose_lines, c, c->m, 1, 16 * c->m * c->n); }

static void logprob_lines(const void *subject, size_t begin, size_t end) {
    const struct weft_logprobs *l = subject;
    const size_t blocks = (l->n + WEFT_DRAW_BLOCK - 1) / WEFT_DRAW_BLOCK, padded = blocks * WEFT_DRAW_BLOCK;
    float *x = scratch(SCORE_SCRATCH, (padded + blocks) * sizeof(float));
    struct ranked *ranked = scratch(ITEM_SCRATCH, 2 * l->n * sizeof *ranked);
    for (size_t line = begin; line < end; line++) {
        const float *logits = l->logits + (size_t)l->lines[line] * l->n;
        int is_number;
        memcpy(x, logits, l->n * sizeof(float));
        for (size_t i = l->n; i < padded; i++) x[i] = -INFINITY;
        const float most = bound.kernels->most(x, padded, &is_number);
        const double whole = most + log(bound.kernels->weigh(x, padded, most, 1.0f, 0.0f, x + padded));
        l->chosen[line] = (float)(logits[l->tokens[l->lines[line]]] - whole);
        if (l->count > 0) find_likeliest(logits, l->n, l->count, ranked);
        for (size_t i = 0; i < l->count; i++) {
            l->likeliest[line * l->count + i] = ranked[i].token;
            l->values[line * l->count + i] = (float)(ranked[i].logit - whole);
        }
    }
}

EXPORT void weft_logprobs(const struct weft_logprobs *l) { share_sized(logprob_lines, l, l->m, 1, 16 * l->m * l->n); }

EXPORT int weft_api(void) { return WEFT_API; }

/* weft_choose of weft.h: a token of each line of logits. Included by sgemm.c behind blocks.h. */

static void choose_lines(const void *subject, size_t begin, size_t end) {
    const struct weft_choice *c = subject;
    const size_t blocks = (c->n + WEFT_DRAW_BLOCK - 1) / WEFT_DRAW_BLOCK, padded = blocks * WEFT_DRAW_BLOCK;
    float *x = scratch(SCORE_SCRATCH, (padded + blocks) * sizeof(float));
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
        c->tokens[line] = c->problems[line] ? 0 : bound.kernels->choose(x, padded, most, c->temperature[line], c->min_p[line], uniform, x + padded);
    }
}

EXPORT void weft_choose(const struct weft_choice *c) { share_sized(choose_lines, c, c->m, 1, 16 * c->m * c->n); }

EXPORT int weft_api(void) { return WEFT_API; }

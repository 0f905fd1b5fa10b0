/* weft_delta of weft.h: a gated delta layer between its two products, some tokens of all rows at a time.
 *
 * Included by sgemm.c behind blocks.h. Every number is computed whole by one kernel from its own row's numbers, token after
 * token, so neither the rows beside it nor the number of tokens in a call can change a bit.
 */

enum { DELTA_LINES = 64 }; /* that are between convolution and norm at a time: they should stay in the caches */

/* Tokens [start, start + tokens) of every row, line row * tokens + token. */
struct stretch {
    const struct weft_delta *whole;
    size_t start, tokens;
    float *mixed, *gates, *betas; /* by line: channels behind the convolution; a number for each head */
    float *output;                /* of the whole, or memory for that of this stretch, which nobody asks for */
};

static size_t delta_channels(const struct weft_delta_layer *l) { return 2 * l->key_heads * l->width + l->heads * l->height; }
static size_t delta_line(const struct weft_delta_layer *l) { return delta_channels(l) + l->heads * (l->height + 2); }

/* The channels of a row's token; those before the first, at -1 and below, are in `before`. */
static const float *channels_at(const struct weft_delta *d, size_t row, ptrdiff_t token) {
    const struct weft_delta_layer *l = d->layer;
    if (token >= 0) return d->lines + (row * d->stride + (size_t)token) * delta_line(l);
    return d->before + ((row + 1) * (l->taps - 1) - (size_t)-token) * delta_channels(l);
}

static void mix_lines(const void *subject, size_t begin, size_t end) {
    const struct stretch *s = subject;
    const struct weft_delta_layer *l = s->whole->layer;
    const size_t channels = delta_channels(l);
    const float *taps[WEFT_MAX_TAPS];
    for (size_t line = begin; line < end; line++) {
        const size_t row = line / s->tokens, token = s->start + line % s->tokens;
        for (size_t tap = 0; tap < l->taps; tap++) taps[tap] = channels_at(s->whole, row, (ptrdiff_t)(token + tap + 1) - (ptrdiff_t)l->taps);
        float *mixed = s->mixed + line * channels;
        bound.kernels->convolve(taps, l->taps, l->convolution, channels, mixed);
        for (size_t head = 0; head < 2 * l->key_heads; head++) {
            float *x = mixed + head * l->width;
            bound.kernels->norm(x, head < l->key_heads ? l->query_norm : l->key_norm, l->key_eps, x, l->width);
        }
        const float *b = taps[l->taps - 1] + channels + l->heads * l->height, *a = b + l->heads;
        for (size_t head = 0; head < l->heads; head++) {
            const float x = a[head] + l->bias[head], softplus = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
            s->gates[line * l->heads + head] = expf(-l->rate[head] * softplus);
            s->betas[line * l->heads + head] = 1.0f / (1.0f + expf(-b[head]));
        }
    }
}

static void gate_lines(const void *subject, size_t begin, size_t end) {
    const struct stretch *s = subject;
    const struct weft_delta_layer *l = s->whole->layer;
    const size_t width = l->heads * l->height;
    for (size_t line = begin; line < end; line++) {
        const size_t place = line / s->tokens * s->whole->stride + s->start + line % s->tokens;
        float *y = s->whole->output + place * width, *gates = s->mixed + line * delta_channels(l); /* which is read by now */
        bound.kernels->silu(s->whole->lines + place * delta_line(l) + delta_channels(l), gates, width);
        for (size_t head = 0; head < l->heads; head++)
            bound.kernels->norm(y + head * l->height, l->norm, l->eps, y + head * l->height, l->height);
        for (size_t i = 0; i < width; i++) y[i] *= gates[i];
    }
}

/* The delta rule over a stretch; its states are those after it, or with `keeps` in the places of its tokens. */
static void recur_stretch(const struct stretch *s) {
    const struct weft_delta *d = s->whole;
    const struct weft_delta_layer *l = d->layer;
    const size_t channels = delta_channels(l), size = l->heads * l->height * l->width;
    const struct weft_series of_keys = {NULL, s->tokens * channels, channels, l->width};
    struct weft_recurrence r = {.rows = d->rows, .heads = l->heads, .groups = l->heads / l->key_heads, .tokens = s->tokens,
                                .height = l->height, .width = l->width, .value = of_keys, .key = of_keys, .query = of_keys,
                                .gate = {s->gates, s->tokens * l->heads, l->heads, 1}, .beta = {s->betas, s->tokens * l->heads, l->heads, 1},
                                .keeps = d->keeps, .output_tokens = d->output == NULL ? s->tokens : d->stride};
    r.query.at = s->mixed, r.key.at = s->mixed + l->key_heads * l->width, r.value.at = s->mixed + 2 * l->key_heads * l->width;
    r.value.head = l->height;
    for (size_t row = 0; row < (s->tokens == d->tokens ? 1 : d->rows); row++) { /* rows of a part of the tokens lie apart */
        r.first = s->start == 0 ? d->first + row * size : d->keeps ? d->states + (row * d->tokens + s->start - 1) * size : d->states + row * size;
        r.states = d->states + (d->keeps ? row * d->tokens + s->start : row) * size;
        r.output = d->output == NULL ? s->output : d->output + (row * d->stride + s->start) * l->heads * l->height;
        if (s->tokens != d->tokens) r.rows = 1;
        weft_recur(&r);
        r.value.at += r.value.row, r.key.at += r.key.row, r.query.at += r.query.row, r.gate.at += r.gate.row, r.beta.at += r.beta.row;
    }
}

EXPORT void weft_share(work_function *work, const void *subject, size_t total, size_t multiplications) {
    share_sized(work, subject, total, 1, multiplications);
}

static void keep_channels(const struct weft_delta *d) {
    const struct weft_delta_layer *l = d->layer;
    const size_t channels = delta_channels(l), kept = l->taps - 1 + (d->keeps ? d->tokens : 0);
    for (size_t row = 0; row < d->rows; row++)
        for (size_t place = 0; place < kept; place++)
            memcpy(d->after + (row * kept + place) * channels, channels_at(d, row, (ptrdiff_t)(d->tokens + place) - (ptrdiff_t)kept),
                   channels * sizeof(float));
}

EXPORT void weft_delta(const struct weft_delta *d) {
    const struct weft_delta_layer *l = d->layer;
    const size_t channels = delta_channels(l), most = DELTA_LINES / d->rows > 1 ? DELTA_LINES / d->rows : 1;
    const size_t lines = d->rows * (d->tokens < most ? d->tokens : most), own = d->output == NULL ? l->heads * l->height : 0;
    struct stretch s = {.whole = d, .mixed = scratch(LAYER_SCRATCH, lines * (channels + 2 * l->heads + own) * sizeof(float))};
    s.gates = s.mixed + lines * channels, s.betas = s.gates + lines * l->heads, s.output = s.betas + lines * l->heads;
    for (; s.start < d->tokens; s.start += s.tokens) {
        s.tokens = d->tokens - s.start < most ? d->tokens - s.start : most;
        const size_t here = d->rows * s.tokens;
        share_sized(mix_lines, &s, here, 1, 2 * here * channels * l->taps);
        recur_stretch(&s);
        if (d->output != NULL) share_sized(gate_lines, &s, here, 1, 16 * here * l->heads * l->height);
    }
    keep_channels(d);
}

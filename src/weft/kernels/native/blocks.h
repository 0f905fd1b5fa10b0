/* The functions of weft.h: kernels of the chosen instruction set, composed and shared among the pool's threads.
 *
 * Included by sgemm.c behind the kernels. Nothing here adds or multiplies in an order of its own, so what weft.h says about
 * bits holds as long as every number is computed whole by one call of one kernel.
 */

/* Memory of a thread that is kept from call to call; each use inside one call has its own. */
enum scratch_use { ROWS_SCRATCH, WEIGHTS_SCRATCH, UP_SCRATCH, QUERY_SCRATCH, SCORE_SCRATCH, OUTPUT_SCRATCH, ITEM_SCRATCH, NUM_SCRATCHES };

static void *scratch(enum scratch_use use, size_t bytes) {
    static _Thread_local struct {
        void *at;
        size_t bytes;
    } kept[NUM_SCRATCHES];
    if (kept[use].bytes < bytes) {
        free(kept[use].at);
        if (posix_memalign(&kept[use].at, 64, bytes) != 0) abort(); /* MLX has no way to undo half an operation either */
        kept[use].bytes = bytes;
    }
    return kept[use].at;
}

static size_t whole_lanes(size_t count) { return (count + LANES - 1) / LANES * LANES; }

/* Runs work over [0, total), with as much company as its size, in multiplications of eight rows, is worth. */
static void share_sized(work_function *work, const void *subject, size_t total, size_t grain, size_t size) {
    const size_t pieces = 4 * (size_t)pool_threads();
    const size_t chunk = (total + pieces * grain - 1) / (pieces * grain) * grain;
    if (size < SHARED_WORK)
        work(subject, 0, total);
    else
        pool_run(work, subject, total, chunk, size >= WAKING_WORK);
}

/* ---- products with weights of any kind */

enum { EXPANDED_FLOATS = 1 << 12 }; /* weights that are expanded at a time: they should stay in the nearest cache */

/* Columns [begin, end) of a * weights^T into c, whose first column is `begin`. */
static void linear_columns(const struct product *a, const struct weft_weights *w, size_t begin, size_t end, float *c, size_t ldc) {
    struct product part = *a;
    part.ldc = ldc;
    if (w->kind == WEFT_F32) {
        part.n = end - begin, part.b = (const float *)w->codes + begin * w->k, part.ldb = w->k, part.c = c;
        bound.kernels->dot(&part, 0, part.n);
        return;
    }
    const size_t width = whole_lanes(w->k), tile = bound.kernels->columns;
    const size_t tiles = EXPANDED_FLOATS / (tile * width), most = tile * (tiles > 0 ? tiles : 1);
    float *expanded = scratch(WEIGHTS_SCRATCH, most * width * sizeof(float));
    for (size_t n = begin; n < end; n += most) {
        part.n = end - n < most ? end - n : most;
        for (size_t i = 0; i < part.n; i++) bound.kernels->expand(w, n + i, expanded + i * width);
        part.b = expanded, part.ldb = width, part.c = c + (n - begin);
        bound.kernels->dot(&part, 0, part.n);
    }
}

struct panel {
    struct product rows; /* packed as the dot kernels want them */
    const struct weft_linear *linear;
    const struct weft_gated *gated;
    size_t first; /* row of the whole */
};

static void panel_linear(const void *subject, size_t begin, size_t end) {
    const struct panel *panel = subject;
    const struct weft_linear *l = panel->linear;
    float *c = l->c + panel->first * l->ldc;
    linear_columns(&panel->rows, l->weights, begin, end, c + begin, l->ldc);
    for (size_t m = 0; l->bias != NULL && m < panel->rows.m; m++)
        for (size_t n = begin; n < end; n++) c[m * l->ldc + n] += l->bias[n];
    for (size_t m = 0; l->residual != NULL && m < panel->rows.m; m++)
        for (size_t n = begin; n < end; n++) c[m * l->ldc + n] += l->residual[(panel->first + m) * l->weights->n + n];
}

static void panel_gated(const void *subject, size_t begin, size_t end) {
    const struct panel *panel = subject;
    const struct weft_gated *g = panel->gated;
    const size_t n = g->gate->n, count = end - begin;
    float *c = g->c + panel->first * n + begin, *up = scratch(UP_SCRATCH, panel->rows.m * count * sizeof(float));
    linear_columns(&panel->rows, g->gate, begin, end, c, n);
    linear_columns(&panel->rows, g->up, begin, end, up, count);
    for (size_t m = 0; m < panel->rows.m; m++) {
        bound.kernels->silu(c + m * n, c + m * n, count);
        for (size_t i = 0; i < count; i++) c[m * n + i] *= up[m * count + i];
    }
}

/* Runs work over the columns for each panel of rows of a. */
static void over_panels(work_function *work, struct panel panel, size_t m, const float *a, size_t lda, const struct weft_weights *w) {
    const size_t width = whole_lanes(w->k);
    const size_t most = PANEL_FLOATS / width < MIN_PANEL_ROWS ? MIN_PANEL_ROWS : PANEL_FLOATS / width;
    float *packed = scratch(ROWS_SCRATCH, (m < most ? m : most) * width * sizeof(float));
    for (size_t first = 0; first < m; first += most) {
        const struct product rows = {.m = m - first < most ? m - first : most, .k = w->k, .a = a + first * lda, .a_row = lda, .a_column = 1};
        pack(&rows, packed, width);
        panel.first = first;
        panel.rows = (struct product){.m = rows.m, .k = w->k, .alpha = 1.0f, .a = packed, .a_row = width, .a_column = 1};
        share_sized(work, &panel, w->n, 12, w->n * w->k * ((rows.m + 7) / 8));
    }
}

EXPORT void weft_linear(const struct weft_linear *l) {
    over_panels(panel_linear, (struct panel){.linear = l}, l->m, l->a, l->lda, l->weights);
}

EXPORT void weft_gated(const struct weft_gated *g) {
    over_panels(panel_gated, (struct panel){.gated = g}, g->m, g->a, g->gate->k, g->gate);
}

EXPORT void weft_expand(const struct weft_weights *w, size_t row, float *to) { bound.kernels->expand(w, row, to); }

/* ---- norms, gates, rotary positions */

struct normed {
    const float *x, *weight;
    float eps, *y;
    size_t n;
};

static void norm_rows(const void *subject, size_t begin, size_t end) {
    const struct normed *s = subject;
    for (size_t m = begin; m < end; m++) bound.kernels->norm(s->x + m * s->n, s->weight, s->eps, s->y + m * s->n, s->n);
}

EXPORT void weft_norm(const float *x, const float *weight, float eps, float *y, size_t m, size_t n) {
    const struct normed subject = {x, weight, eps, y, n};
    share_sized(norm_rows, &subject, m, 1, 8 * m * n);
}

struct gates {
    const float *x;
    float *y;
};

static void silu_numbers(const void *subject, size_t begin, size_t end) {
    const struct gates *s = subject;
    bound.kernels->silu(s->x + begin, s->y + begin, end - begin);
}

EXPORT void weft_silu(const float *x, float *y, size_t count) {
    const struct gates subject = {x, y};
    share_sized(silu_numbers, &subject, count, LANES, 8 * count);
}

static void rotate_rows(const void *subject, size_t begin, size_t end) {
    const struct weft_rotation *r = subject;
    for (size_t m = begin; m < end; m++) {
        const size_t place = m / r->batch_rows * r->batch_angles + m % r->batch_rows / r->repeat % r->tokens;
        const float *x = r->x + m / r->x_rows * r->x_stride + m % r->x_rows * r->n;
        float *y = r->y + m * r->n;
        if (x != y) memcpy(y + 2 * r->half, x + 2 * r->half, (r->n - 2 * r->half) * sizeof(float));
        bound.kernels->turn(x, r->angles + place * 2 * r->half, y, r->half, r->of_neighbours);
    }
}

EXPORT void weft_rotate(const struct weft_rotation *r) { share_sized(rotate_rows, r, r->m, 1, 8 * r->m * r->n); }

/* ---- attention */

static void softmax_rows(const void *subject, size_t begin, size_t end) {
    const struct weft_scores *s = subject;
    bound.kernels->softmax(s->c, s->span, s->tokens, begin, end);
}

EXPORT void weft_scores(const struct weft_scores *s) {
    struct product p = {.m = s->m, .n = s->span, .k = s->k, .alpha = 1.0f, .beta = s->bias != NULL, .a = s->q, .b = s->keys, .c = s->c,
                        .a_row = s->ldq, .a_column = 1, .ldb = s->ldk, .ldc = s->span};
    for (size_t m = 0; s->bias != NULL && m < s->m; m++) memcpy(s->c + m * s->span, s->bias + m * s->ld_bias, s->span * sizeof(float));
    if (!dot_product(&p)) abort();
    share_sized(softmax_rows, s, s->m, 1, 8 * s->m * s->span);
}

enum { ATTENTION_ROWS = 24, ATTENTION_FLOATS = 1 << 16 }; /* queries, and scores, that are computed together */

/* What a line's head is before attention: normed, turned, scaled. */
struct preparation {
    const float *norm, *angles;
    float eps, scale;
    size_t dim, half;
    int of_neighbours;
};

static void prepare(const struct preparation *p, const float *from, size_t line, float *to) {
    if (p->norm != NULL)
        bound.kernels->norm(from, p->norm, p->eps, to, p->dim);
    else
        memcpy(to, from, p->dim * sizeof(float));
    if (p->angles != NULL) bound.kernels->turn(to, p->angles + line * 2 * p->half, to, p->half, p->of_neighbours);
    if (p->scale != 1.0f)
        for (size_t k = 0; k < p->dim; k++) to[k] *= p->scale;
}

struct appended {
    const struct weft_append *whole;
    const struct weft_row *row;
};

static void append_tokens(const void *subject, size_t begin, size_t end) {
    const struct appended *s = subject;
    const struct weft_append *a = s->whole;
    const struct preparation preparation = {a->norm, a->angles, a->eps, 1.0f, a->dim, a->half, a->of_neighbours};
    for (size_t t = begin; t < end; t++)
        for (size_t head = 0; head < a->kv_heads; head++)
            prepare(&preparation, a->x + (s->row->line + t) * a->stride + head * a->dim, s->row->line + t,
                    s->row->keys + (head * s->row->places + s->row->first + t) * a->dim);
}

EXPORT void weft_append(const struct weft_append *a) {
    for (size_t r = 0; r < a->num_rows; r++) {
        const struct appended subject = {a, &a->rows[r]};
        share_sized(append_tokens, &subject, a->rows[r].tokens, 1, 8 * a->rows[r].tokens * a->kv_heads * a->dim);
    }
}

struct item { /* tokens [begin, end) of a row, with the query heads of one head of keys */
    const struct weft_row *row;
    size_t head, begin, end;
};
struct attention {
    const struct weft_attention *whole;
    const struct item *items;
};

static void attend_item(const struct weft_attention *a, const struct item *item) {
    const struct weft_row *row = item->row;
    const size_t repeat = a->heads / a->kv_heads, count = item->end - item->begin, m = repeat * count, dim = a->dim;
    const size_t width = whole_lanes(dim), span = row->first + item->end;
    float *q = scratch(QUERY_SCRATCH, m * width * sizeof(float)), *scores = scratch(SCORE_SCRATCH, m * span * sizeof(float));
    float *found = scratch(OUTPUT_SCRATCH, m * dim * sizeof(float));
    const struct preparation preparation = {a->norm, a->angles, a->eps, a->scale, dim, a->half, a->of_neighbours};
    for (size_t i = 0; i < m; i++) { /* tokens one after the other, each with all its heads */
        const size_t line = row->line + item->begin + i / repeat;
        prepare(&preparation, a->q + line * a->q_stride + (item->head * repeat + i % repeat) * dim, line, q + i * width);
        memset(q + i * width + dim, 0, (width - dim) * sizeof(float));
    }
    const size_t start = item->head * row->places * dim;
    const struct product dots = {.m = m, .n = span, .k = dim, .alpha = 1.0f, .a = q, .b = row->keys + start, .c = scores,
                                 .a_row = width, .a_column = 1, .ldb = dim, .ldc = span};
    bound.kernels->dot(&dots, 0, span);
    for (size_t i = 0; i < m; i++) {
        const size_t seen = row->first + item->begin + i / repeat + 1;
        bound.kernels->softmax_one(scores + i * span, seen);
        memset(scores + i * span + seen, 0, (span - seen) * sizeof(float));
    }
    const struct product sums = {.m = m, .n = dim, .k = span, .alpha = 1.0f, .a = scores, .b = row->values + start, .c = found,
                                 .a_row = span, .a_column = 1, .ldb = dim, .ldc = dim};
    bound.kernels->axpy(&sums, 0, dim);
    for (size_t t = 0; t < count; t++)
        memcpy(a->output + ((row->line + item->begin + t) * a->heads + item->head * repeat) * dim, found + t * repeat * dim,
               repeat * dim * sizeof(float));
}

static void attend_items(const void *subject, size_t begin, size_t end) {
    const struct attention *a = subject;
    for (size_t i = begin; i < end; i++) attend_item(a->whole, &a->items[i]);
}

static size_t tokens_together(const struct weft_attention *a, const struct weft_row *row) {
    const size_t repeat = a->heads / a->kv_heads, span = row->first + row->tokens;
    size_t rows = ATTENTION_FLOATS / span < ATTENTION_ROWS ? ATTENTION_FLOATS / span : ATTENTION_ROWS;
    return rows / repeat > 1 ? rows / repeat : 1;
}

EXPORT void weft_attend(const struct weft_attention *a) {
    size_t num_items = 0, size = 0;
    for (size_t r = 0; r < a->num_rows; r++) {
        const struct weft_row *row = &a->rows[r];
        const size_t together = tokens_together(a, row);
        num_items += a->kv_heads * ((row->tokens + together - 1) / together);
        size += a->heads * a->dim * (row->first + row->tokens) * (row->tokens + 7) / 8 * 2;
    }
    struct item *items = scratch(ITEM_SCRATCH, num_items * sizeof(struct item)), *next = items;
    for (size_t r = 0; r < a->num_rows; r++) {
        const struct weft_row *row = &a->rows[r];
        const size_t together = tokens_together(a, row);
        for (size_t end = row->tokens; end > 0; end = end > together ? end - together : 0) /* the longest first */
            for (size_t head = 0; head < a->kv_heads; head++)
                *next++ = (struct item){row, head, end > together ? end - together : 0, end};
    }
    const struct attention subject = {a, items};
    if (size < SHARED_WORK)
        attend_items(&subject, 0, num_items);
    else
        pool_run(attend_items, &subject, num_items, 1, size >= WAKING_WORK);
}

/* ---- recurrences */

static void recur_groups(const void *subject, size_t begin, size_t end) { bound.kernels->recur(subject, begin, end); }

EXPORT void weft_recur(const struct weft_recurrence *r) {
    const size_t total = r->rows * r->heads * (r->height / STATE_ROWS);
    share_sized(recur_groups, r, total, 1, 4 * total * r->width * r->tokens);
}

EXPORT int weft_api(void) { return WEFT_API; }

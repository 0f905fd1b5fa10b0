/* The functions of weft.h: kernels of the chosen instruction set, composed and shared among the pool's threads.
 *
 * Included by sgemm.c behind the kernels. Nothing here adds or multiplies in an order of its own, so what weft.h says about
 * bits holds as long as every number is computed whole by one call of one kernel.
 */

static size_t whole_lanes(size_t count) { return (count + LANES - 1) / LANES * LANES; }

/* Runs work over [0, total), with as much company as its size, in multiplications of eight rows, is worth. */
static void share_sized(work_function *work, const void *subject, size_t total, size_t grain, size_t size) {
    const size_t pieces = 8 * (size_t)pool_threads();
    const size_t chunk = (total + pieces * grain - 1) / (pieces * grain) * grain;
    if (size < SHARED_WORK)
        work(subject, 0, total);
    else
        pool_run(work, subject, total, chunk, size >= WAKING_WORK);
}

/* ---- products with weights of any kind */

enum {
    EXPANDED_FLOATS = 1 << 12,  /* weights that are expanded for a few rows at a time: they should stay in the nearest cache */
    MAX_FEW_ROWS = FEW_ROWS,    /* up to here codes of 4 and 8 bits are expanded in registers (few.h), */
    MAX_WIDENED_ROWS = 24,      /* up to here numbers of 16 bits are widened each time they are used: by few tiles of rows */
    MANY_ROWS = 48,             /* from here on rows are packed once, and weights too where several panels of rows use them: */
    PACKED_FLOATS = 1 << 22,    /* so many numbers of the rows, */
    EXPANDED_BLOCK = 1 << 20,   /* and of the weights, at a time, */
    PIECE_COLUMNS = 96,         /* in pieces of a panel of rows and so many columns, a multiple of every tile */
    GROUP_COLUMNS = 48,         /* of the weights that are expanded at a time for tiled rows: a multiple of every tile's columns */
    MAX_PARTS = 8               /* products of the same rows that are computed side by side */
};

struct panel {
    struct product rows; /* packed as the dot kernels want them */
    const float *woven;  /* the same as codes of four bits want them, where these are expanded in registers (few.h) */
    const struct weft_linear *linear;
    const struct weft_gated *gated;
    size_t first;                        /* row of the whole */
    const float *expanded, *expanded_up; /* the weights from `column` on as float32, or NULL */
    size_t column;
};

/* Whether so many rows are multiplied with these weights as they are. */
static int is_taken_as_packed(const struct weft_weights *w, size_t m) {
    const int is_packed = w->kind == WEFT_AFFINE || w->kind == WEFT_MXFP4 || w->kind == WEFT_NVFP4;
    return bound.kernels->few != NULL && is_packed && (w->bits == 4 || w->bits == 8) && m <= MAX_FEW_ROWS;
}

/* Columns [begin, end) of rows * weights^T into c, whose first column is `begin`. */
static void linear_columns(const struct panel *panel, const struct weft_weights *w, const float *weights, size_t begin, size_t end, float *c, size_t ldc) {
    struct product part = panel->rows;
    part.ldc = ldc;
    const size_t width = whole_lanes(w->k), tile = part.is_tiled ? GROUP_COLUMNS : bound.kernels->columns;
    part.is_half = w->kind == WEFT_BF16 && weights == NULL && part.m <= MAX_WIDENED_ROWS;
    if (w->kind == WEFT_F32 || weights != NULL || part.is_half) {
        const size_t bytes = part.is_half ? sizeof(uint16_t) : sizeof(float);
        const char *own = (const char *)w->codes + begin * w->k * bytes;
        part.ldb = weights != NULL ? width : w->k;
        part.b = weights != NULL ? weights + (begin - panel->column) * width : (const float *)(const void *)own;
        part.n = end - begin, part.c = c;
        bound.kernels->dot(&part, 0, part.n);
        return;
    }
    if (is_taken_as_packed(w, part.m)) {
        part.c = c;
        if (w->bits == 4) part.a = panel->woven;
        bound.kernels->few(&part, w, begin, end);
        return;
    }
    const size_t tiles = EXPANDED_FLOATS / (tile * width), most = tile * (tiles > 0 ? tiles : 1);
    float *expanded = scratch(WEIGHTS_SCRATCH, most * width * sizeof(float));
    for (size_t n = begin; n < end; n += most) {
        part.n = end - n < most ? end - n : most;
        for (size_t i = 0; i < part.n; i++) bound.kernels->expand(w, n + i, expanded + i * width);
        part.b = expanded, part.ldb = width, part.c = c + (n - begin);
        bound.kernels->dot(&part, 0, part.n);
    }
}

static void panel_linear(const void *subject, size_t begin, size_t end) {
    const struct panel *panel = subject;
    const struct weft_linear *l = panel->linear;
    float *c = l->c + panel->first * l->ldc;
    linear_columns(panel, l->weights, panel->expanded, begin, end, c + begin, l->ldc);
    for (size_t m = 0; l->bias != NULL && m < panel->rows.m; m++) bound.kernels->add(l->bias + begin, c + m * l->ldc + begin, end - begin);
    for (size_t m = 0; l->residual != NULL && m < panel->rows.m; m++)
        bound.kernels->add(l->residual + (panel->first + m) * l->weights->n + begin, c + m * l->ldc + begin, end - begin);
}

static void panel_gated(const void *subject, size_t begin, size_t end) {
    const struct panel *panel = subject;
    const struct weft_gated *g = panel->gated;
    const size_t n = g->gate->n, count = end - begin, size = panel->rows.m * count;
    float *c = g->c + panel->first * n + begin, *gates = scratch(UP_SCRATCH, 2 * size * sizeof(float)), *ups = gates + size;
    linear_columns(panel, g->gate, panel->expanded, begin, end, gates, count);
    linear_columns(panel, g->up, panel->expanded_up, begin, end, ups, count);
    for (size_t m = 0; m < panel->rows.m; m++) bound.kernels->gated(gates + m * count, ups + m * count, c + m * n, count);
}

/* A product as panel_linear or panel_gated computes it; `up` is NULL or the gated product's second weights. */
struct shared_product {
    work_function *work;
    struct panel panel;
    size_t m, lda;
    const float *a;
    const struct weft_weights *weights, *up;
};

/* Products of the same rows, side by side: their columns are counted on from one to the next. */
struct side_by_side {
    const struct shared_product *parts;
    struct panel *panels;
    size_t count;
};

static void columns_of_all(const void *subject, size_t begin, size_t end) {
    const struct side_by_side *s = subject;
    for (size_t i = 0, first = 0; i < s->count && first < end; first += s->parts[i++].weights->n) {
        const size_t last = first + s->parts[i].weights->n, from = begin > first ? begin : first, to = end < last ? end : last;
        if (from < to) s->parts[i].work(&s->panels[i], from - first, to - first);
    }
}

static int is_any_taken_as_packed(const struct shared_product *s, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (is_taken_as_packed(s[i].weights, s->m) || (s[i].up != NULL && is_taken_as_packed(s[i].up, s->m))) return 1;
    return 0;
}

/* Few rows: the pieces are columns, and whoever takes some expands their weights. */
static void over_columns(const struct shared_product *s, size_t count) {
    const size_t k = s->weights->k, width = whole_lanes(k);
    struct panel panels[MAX_PARTS];
    const int is_tiled = are_tiled(s->m, k);
    float *packed = rows_scratch(packed_floats(s->m, width, is_tiled)), *woven = NULL;
    const struct product rows = {.m = s->m, .k = k, .a = s->a, .a_row = s->lda, .a_column = 1, .is_tiled = is_tiled};
    pack(&rows, packed, width);
    if (is_any_taken_as_packed(s, count)) {
        woven = scratch(WOVEN_SCRATCH, s->m * width * sizeof(float));
        bound.kernels->weave(packed, woven, s->m * width);
    }
    size_t n = 0;
    for (size_t i = 0; i < count; n += s[i++].weights->n) {
        panels[i] = s[i].panel;
        panels[i].rows = (struct product){.m = s->m, .k = k, .alpha = 1.0f, .a = packed, .a_row = packed_row(width, is_tiled), .a_column = 1, .is_tiled = is_tiled};
        panels[i].woven = woven;
    }
    const struct side_by_side all = {s, panels, count};
    share_sized(columns_of_all, &all, n, 24, n * k * ((s->m + 7) / 8));
}

struct packing {
    struct product rows;
    float *to;
    size_t width;
};

static void pack_rows(const void *subject, size_t begin, size_t end) {
    const struct packing *p = subject;
    const struct product part = rows_of(&p->rows, begin, end);
    pack(&part, p->to + begin * packed_row(p->width, p->rows.is_tiled), p->width);
}

struct expansion {
    const struct weft_weights *from;
    float *to;
    size_t first, width;
};

static void expand_columns(const void *subject, size_t begin, size_t end) {
    const struct expansion *e = subject;
    for (size_t i = begin; i < end; i++) bound.kernels->expand(e->from, e->first + i, e->to + i * e->width);
}

/* Weights of `count` columns as float32; NULL where they are already, or there are none. */
static const float *expanded_block(const struct weft_weights *w, enum scratch_use use, size_t first, size_t count) {
    if (w == NULL || w->kind == WEFT_F32) return NULL;
    const size_t width = whole_lanes(w->k);
    const struct expansion e = {w, scratch(use, count * width * sizeof(float)), first, width};
    share_sized(expand_columns, &e, count, 1, count * width);
    return e.to;
}

struct grid { /* of pieces: panels of rows by blocks of columns */
    const struct shared_product *product;
    struct panel whole;
    size_t panel_rows, begin, end;
};

static size_t pieces_of(size_t total, size_t size) { return (total + size - 1) / size; }

static void grid_pieces(const void *subject, size_t begin, size_t end) {
    const struct grid *g = subject;
    const size_t across = pieces_of(g->end - g->begin, PIECE_COLUMNS);
    for (size_t i = begin; i < end; i++) {
        const size_t row = i / across * g->panel_rows, column = g->begin + i % across * PIECE_COLUMNS;
        struct panel panel = g->whole;
        panel.first += row;
        panel.rows = rows_of(&g->whole.rows, row, row + g->panel_rows < g->whole.rows.m ? row + g->panel_rows : g->whole.rows.m);
        g->product->work(&panel, column, column + PIECE_COLUMNS < g->end ? column + PIECE_COLUMNS : g->end);
    }
}

/* Rows of a panel: few enough to stay in cache and to give every thread a piece of n columns, and nearly as many as in the others. */
static size_t panel_rows(size_t m, size_t n, size_t width, int is_tiled) {
    const size_t whole = is_tiled ? BLOCK_ROWS : 12; /* a multiple of every tile */
    const size_t across = pieces_of(n, PIECE_COLUMNS), wanted = pieces_of((size_t)pool_threads(), across), useful = m / MIN_PANEL_ROWS;
    const size_t needed = pieces_of(m, most_panel_rows(width, is_tiled)), shared = wanted < useful ? wanted : useful;
    return pieces_of(pieces_of(m, needed > shared ? needed : shared), whole) * whole;
}

/* Columns of a block whose weights are expanded together; all of them where there is nothing to expand. */
static size_t block_columns(const struct shared_product *s) {
    if (s->weights->kind == WEFT_F32 && (s->up == NULL || s->up->kind == WEFT_F32)) return s->weights->n;
    const size_t pieces = EXPANDED_BLOCK / (whole_lanes(s->weights->k) * PIECE_COLUMNS);
    return PIECE_COLUMNS * (pieces > 0 ? pieces : 1);
}

/* Whether rows need no packing: nothing has to be added to whole lanes, and vectors lie in one cache line each, or the second costs nothing. */
static int is_taken_as_it_is(const struct product *rows) {
    const int is_aligned = (uintptr_t)rows->a % 64 == 0 && rows->a_row % LANES == 0;
    return !rows->is_tiled && rows->k % LANES == 0 && (is_aligned || bound.kernels->tile == NULL);
}

/* Many rows, packed once for all parts. */
static void over_pieces(const struct shared_product *parts, size_t count) {
    const size_t m = parts->m, k = parts->weights->k, width = whole_lanes(k);
    struct product rows = {.m = m, .k = k, .alpha = 1.0f, .a = parts->a, .a_row = parts->lda, .a_column = 1, .is_tiled = are_tiled(m, k)};
    if (!is_taken_as_it_is(&rows)) {
        const struct packing packing = {rows, rows_scratch(packed_floats(m, width, rows.is_tiled)), width};
        share_sized(pack_rows, &packing, m, BLOCK_ROWS, m * width);
        rows.a = packing.to, rows.a_row = packed_row(width, rows.is_tiled);
    }
    for (const struct shared_product *s = parts; s < parts + count; s++) {
        const size_t n = s->weights->n;
        struct grid grid = {.product = s, .whole = s->panel, .panel_rows = panel_rows(m, n, width, rows.is_tiled)};
        const int is_one_panel = grid.panel_rows >= m; /* then every weight is in one piece, which expands it where it is used */
        const size_t columns = is_one_panel ? n : block_columns(s);
        grid.whole.rows = rows;
        for (grid.begin = 0; grid.begin < n; grid.begin = grid.end) {
            grid.end = n - grid.begin < columns ? n : grid.begin + columns;
            grid.whole.column = grid.begin;
            grid.whole.expanded = is_one_panel ? NULL : expanded_block(s->weights, BLOCK_SCRATCH, grid.begin, grid.end - grid.begin);
            grid.whole.expanded_up = is_one_panel ? NULL : expanded_block(s->up, UP_BLOCK_SCRATCH, grid.begin, grid.end - grid.begin);
            pool_run(grid_pieces, &grid, pieces_of(m, grid.panel_rows) * pieces_of(grid.end - grid.begin, PIECE_COLUMNS), 1, 1);
        }
    }
}

/* Products of the same rows, as many at a time as are packed together; what is left may be few. */
static void compute_products(const struct shared_product *whole, size_t count) {
    const size_t fit = PACKED_FLOATS / whole_lanes(whole->weights->k), most = fit < MANY_ROWS ? MANY_ROWS : fit;
    struct shared_product parts[MAX_PARTS];
    for (size_t first = 0; first < whole->m; first += most) {
        for (size_t i = 0; i < count; i++) {
            parts[i] = whole[i];
            parts[i].m = whole->m - first < most ? whole->m - first : most;
            parts[i].a += first * whole[i].lda;
            parts[i].panel.first = first;
        }
        (parts->m < MANY_ROWS ? over_columns : over_pieces)(parts, count);
    }
}

static struct shared_product product_of(const struct weft_linear *l) {
    return (struct shared_product){.work = panel_linear, .panel = {.linear = l}, .m = l->m, .lda = l->lda, .a = l->a, .weights = l->weights};
}

EXPORT void weft_linear(const struct weft_linear *l) {
    const struct shared_product one = product_of(l);
    compute_products(&one, 1);
}

EXPORT void weft_joint(const struct weft_joint *j) {
    struct weft_linear linears[MAX_PARTS];
    struct shared_product products[MAX_PARTS];
    float *c = j->c;
    for (size_t begin = 0, end; begin < j->num_parts; begin = end) {
        end = j->num_parts - begin < MAX_PARTS ? j->num_parts : begin + MAX_PARTS;
        for (size_t i = begin; i < end; c += j->weights[i++]->n) {
            linears[i - begin] = (struct weft_linear){j->m, j->lda, j->ldc, j->a, j->biases[i], NULL, c, j->weights[i]};
            products[i - begin] = product_of(&linears[i - begin]);
        }
        compute_products(products, end - begin);
    }
}

EXPORT void weft_gated(const struct weft_gated *g) {
    const struct shared_product one = {.work = panel_gated, .panel = {.gated = g}, .m = g->m, .lda = g->gate->k, .a = g->a,
                                       .weights = g->gate, .up = g->up};
    compute_products(&one, 1);
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
        bound.kernels->rotate(x, r->angles + place * 2 * r->half, y, r->half, r->of_neighbours);
    }
}

EXPORT void weft_rotate(const struct weft_rotation *r) { share_sized(rotate_rows, r, r->m, 1, 8 * r->m * r->n); }

EXPORT void weft_angles(const struct weft_angles *t) {
    for (size_t m = 0; m < t->m; m++)
        for (size_t i = 0; i < t->half; i++) {
            const float turn = t->places[t->is_shared ? m : m * t->half + i] * t->scale * t->rates[i];
            float *to = t->angles + 2 * m * t->half + i;
            to[0] = cosf(turn), to[t->half] = sinf(turn);
        }
}

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

enum {
    ATTENTION_FLOATS = 1 << 16, /* scores that are computed together: they should stay in the second cache level */
    MOST_QUERIES = 64,          /* of these at most so many, */
    LEAST_QUERIES = 32,         /* and, of a prompt, at least so many: with fewer the keys come from memory too often */
    MANY_QUERIES = 12           /* from here on queries fill vectors (scores.h), below their numbers do */
};

/* What a line's head is before attention: normed, rotated, scaled. */
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
    if (p->angles != NULL) bound.kernels->rotate(to, p->angles + line * 2 * p->half, to, p->half, p->of_neighbours);
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

/* Numbers from one head's query to the next: a gate may stand between. */
static size_t query_stride(const struct weft_attention *a) { return a->is_gated ? 2 * a->dim : a->dim; }

/* The queries of an item, each after the other: tokens, and of each token its heads. */
static void prepare_query(const struct weft_attention *a, const struct item *item, size_t i, float *to) {
    const struct preparation preparation = {a->norm, a->angles, a->eps, a->scale, a->dim, a->half, a->of_neighbours};
    const size_t repeat = a->heads / a->kv_heads, line = item->row->line + item->begin + i / repeat;
    prepare(&preparation, a->q + line * a->q_stride + (item->head * repeat + i % repeat) * query_stride(a), line, to);
}

/* How many keys query i of an item sees. */
static size_t seen_by(const struct weft_attention *a, const struct item *item, size_t i) {
    return item->row->first + item->begin + i / (a->heads / a->kv_heads) + 1;
}

/* Attention's weights of a few queries: `scores` (m, span). */
static void weigh_few(const struct weft_attention *a, const struct item *item, size_t m, size_t span, float *scores) {
    const size_t dim = a->dim, width = whole_lanes(dim);
    float *q = scratch(QUERY_SCRATCH, m * width * sizeof(float));
    for (size_t i = 0; i < m; i++) {
        prepare_query(a, item, i, q + i * width);
        memset(q + i * width + dim, 0, (width - dim) * sizeof(float));
    }
    const struct product dots = {.m = m, .n = span, .k = dim, .alpha = 1.0f, .a = q, .b = item->row->keys + item->head * item->row->places * dim,
                                 .c = scores, .a_row = width, .a_column = 1, .ldb = dim, .ldc = span};
    bound.kernels->dot(&dots, 0, span);
    for (size_t i = 0; i < m; i++) {
        const size_t seen = seen_by(a, item, i);
        bound.kernels->softmax_one(scores + i * span, seen);
        memset(scores + i * span + seen, 0, (span - seen) * sizeof(float));
    }
}

/* Attention's weights of many queries: `scores` (span, many), where many is m in whole lanes. */
static void weigh_many(const struct weft_attention *a, const struct item *item, size_t m, size_t span, float *scores) {
    const size_t dim = a->dim, many = whole_lanes(m);
    float *transposed = scratch(QUERY_SCRATCH, (dim + 1) * many * sizeof(float) + dim * sizeof(float));
    float *seen = transposed + dim * many, *one = seen + many;
    for (size_t i = 0; i < many; i++) {
        if (i < m)
            prepare_query(a, item, i, one);
        else
            memset(one, 0, dim * sizeof(float));
        for (size_t k = 0; k < dim; k++) transposed[k * many + i] = one[k];
        seen[i] = i < m ? (float)seen_by(a, item, i) : 1.0f; /* exact: nobody has 16 million keys */
    }
    bound.kernels->score_keys(item->row->keys + item->head * item->row->places * dim, transposed, dim, many, span, scores);
    bound.kernels->soften(scores, many, span, seen);
}

static void attend_item(const struct weft_attention *a, const struct item *item) {
    const struct weft_row *row = item->row;
    const size_t repeat = a->heads / a->kv_heads, count = item->end - item->begin, m = repeat * count, dim = a->dim;
    const size_t span = row->first + item->end, many = whole_lanes(m);
    float *scores = scratch(SCORE_SCRATCH, many * span * sizeof(float)), *found = scratch(OUTPUT_SCRATCH, m * dim * sizeof(float));
    struct product sums = {.m = m, .n = dim, .k = span, .alpha = 1.0f, .a = scores, .b = row->values + item->head * row->places * dim, .c = found,
                           .a_row = span, .a_column = 1, .ldb = dim, .ldc = dim};
    if (m >= MANY_QUERIES && dim % LANES == 0) {
        weigh_many(a, item, m, span, scores);
        sums.a_row = 1, sums.a_column = many;
    } else {
        weigh_few(a, item, m, span, scores);
    }
    bound.kernels->axpy(&sums, 0, dim);
    for (size_t i = 0; a->is_gated && i < m; i++) {
        const size_t line = row->line + item->begin + i / repeat;
        const float *gates = a->q + line * a->q_stride + (item->head * repeat + i % repeat) * query_stride(a) + dim;
        bound.kernels->gate(gates, found + i * dim, dim);
    }
    for (size_t t = 0; t < count; t++)
        memcpy(a->output + ((row->line + item->begin + t) * a->heads + item->head * repeat) * dim, found + t * repeat * dim,
               repeat * dim * sizeof(float));
}

static void attend_items(const void *subject, size_t begin, size_t end) {
    const struct attention *a = subject;
    for (size_t i = begin; i < end; i++) attend_item(a->whole, &a->items[i]);
}

static size_t tokens_together(const struct weft_attention *a, const struct weft_row *row) {
    const size_t repeat = a->heads / a->kv_heads, most = ATTENTION_FLOATS / (row->first + row->tokens);
    const size_t queries = most < LEAST_QUERIES ? LEAST_QUERIES : most < MOST_QUERIES ? most : MOST_QUERIES;
    return queries / repeat > 1 ? queries / repeat : 1;
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

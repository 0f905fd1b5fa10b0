/* Products of a few rows with packed weights that are expanded in registers, included by kernels.h once for each instruction set.
 *
 * A step of one stream uses every weight once or a few times, so writing its float32 number to memory first costs more than the
 * product. Here the number is made where it is multiplied. What must hold: the numbers are those of packed.h, and the additions
 * those of dot_tile.
 *
 * Sixteen codes of four bits lie in eight bytes. Spread over a vector and shifted down by another count in every eight bytes, code i
 * and code i + 8 come to lie in neighbouring lanes: one instruction instead of two, in an order of its own. Rows are woven into that
 * order before, and sums folded from it, so each running sum takes the k it takes elsewhere and meets the same others.
 */
#if WIDTH == 16
/* Sixteen numbers at a time into the order in which codes of four bits are spread. */
TARGET static void NAME(weave)(const float *from, float *to, size_t count) {
    const __m512i lanes = _mm512_set_epi32(15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
    for (size_t i = 0; i < count; i += LANES) _mm512_storeu_ps(to + i, _mm512_permutexvar_ps(lanes, _mm512_loadu_ps(from + i)));
}

/* Four woven sums of sixteen lanes at once, folded 8, 4, 2, 1 as others are: neighbouring lanes, halves, quarters, pairs. */
INLINE void NAME(woven_sum4)(float *totals, const VECTOR *v) {
    const VECTOR ab = _mm512_add_ps(_mm512_shuffle_ps(v[0], v[1], 0x88), _mm512_shuffle_ps(v[0], v[1], 0xDD));
    const VECTOR cd = _mm512_add_ps(_mm512_shuffle_ps(v[2], v[3], 0x88), _mm512_shuffle_ps(v[2], v[3], 0xDD));
    const VECTOR halves = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x44), _mm512_shuffle_f32x4(ab, cd, 0xEE)); /* ab ab cd cd */
    const __m256 low = _mm512_castps512_ps256(halves), high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(halves), 1));
    const __m256 quarters = _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)); /* ab cd */
    const __m128 first = _mm256_castps256_ps128(quarters), second = _mm256_extractf128_ps(quarters, 1);
    _mm_storeu_ps(totals, _mm_add_ps(_mm_shuffle_ps(first, second, 0x88), _mm_shuffle_ps(first, second, 0xDD)));
}

/* Sixteen weights. Codes of four bits choose among the numbers of their group, and are woven; those of eight are computed: `numbers` is
 * their scale. */
INLINE VECTOR NAME(few_weights)(const int bits, const uint8_t *codes, VECTOR numbers, VECTOR bias) {
    if (bits == 8) {
        const VECTOR wide = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes)));
        return _mm512_add_ps(_mm512_mul_ps(wide, numbers), bias);
    }
    int64_t eight;
    memcpy(&eight, codes, sizeof eight);
    const __m512i shifts = _mm512_set_epi64(28, 24, 20, 16, 12, 8, 4, 0);
    return _mm512_permutexvar_ps(_mm512_srlv_epi64(_mm512_set1_epi64(eight), shifts), numbers);
}

/* Scales and biases of a tile's columns, GROUPS_AT_ONCE of each. */
struct NAME(few_scales) {
    float scales[FEW_COLUMNS][GROUPS_AT_ONCE], biases[FEW_COLUMNS][GROUPS_AT_ONCE];
};

INLINE void NAME(few_read)(struct NAME(few_scales) *s, const struct weft_weights *w, const int columns, size_t n, size_t begin, size_t count) {
    const size_t groups = w->k / w->group;
    for (int j = 0; j < columns; j++) {
        NAME(scales)(w->kind == WEFT_AFFINE ? w->scale_kind : w->kind, w->scales, (n + j) * groups + begin, count, s->scales[j]);
        if (w->kind == WEFT_AFFINE)
            NAME(scales)(w->scale_kind, w->biases, (n + j) * groups + begin, count, s->biases[j]);
        else
            for (size_t i = 0; i < count; i++) s->biases[j][i] = -0.0f; /* changes nothing, not even a zero's sign */
    }
}

/* The groups [first, last) of one tile of c: rows from m on and columns from n on, whose place in c is `to`. `kept`: the tile's sums before, and behind,
 * where these groups are not the first, or not the last. The cache lines asked for at each group belong to the codes that come next. */
INLINE void NAME(few_tile)(const int rows, const int columns, const int bits, const struct product *p, const struct weft_weights *w, size_t m,
                           size_t n, size_t to, size_t first, size_t last, VECTOR *kept) {
    const size_t groups = w->k / w->group, row_bytes = w->k / 8 * bits, lines = (columns * (w->group / 8) * bits + 63) / 64;
    const uint8_t *codes = (const uint8_t *)w->codes + n * row_bytes + first * (w->group / 8) * bits;
    const char *ahead = (const char *)codes + FEW_AHEAD * row_bytes;
    const VECTOR digits = _mm512_loadu_ps(w->kind == WEFT_AFFINE ? FOUR_BIT_WHOLES : FOUR_BIT_FLOATS);
    const float *a = p->a + m * p->a_row + first * w->group;
    struct NAME(few_scales) read;
    VECTOR sums[FEW_SUMS];
    UNROLL for (int i = 0; i < FEW_SUMS; i++) sums[i] = first > 0 && i < rows * columns ? kept[i] : SPREAD(0.0f);
    for (size_t begin = first; begin < last; begin += GROUPS_AT_ONCE) {
        const size_t count = last - begin < GROUPS_AT_ONCE ? last - begin : GROUPS_AT_ONCE;
        NAME(few_read)(&read, w, columns, n, begin, count);
        for (size_t group = 0; group < count; group++) {
            VECTOR numbers[FEW_COLUMNS], biases[FEW_COLUMNS];
            UNROLL for (int j = 0; j < columns; j++) {
                const VECTOR scale = SPREAD(read.scales[j][group]);
                biases[j] = SPREAD(read.biases[j][group]);
                numbers[j] = bits == 8 ? scale : _mm512_add_ps(_mm512_mul_ps(digits, scale), biases[j]);
                if (bits == 8) __asm__("" : "+v"(numbers[j]), "+v"(biases[j]));
            }
            if (m == 0)
                for (size_t line = 0; line < lines; line++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
            for (size_t i = 0; i < w->group; i += LANES, a += LANES, codes += 2 * bits) {
                if (rows <= FEW_LOADED) {
                    VECTOR values[FEW_LOADED];
                    UNROLL for (int row = 0; row < rows; row++) {
                        values[row] = LOAD(a + row * p->a_row);
                        __asm__("" : "+v"(values[row])); /* read once: the compiler would read it for every column */
                    }
                    UNROLL for (int j = 0; j < columns; j++) {
                        const VECTOR weights = NAME(few_weights)(bits, codes + j * row_bytes, numbers[j], biases[j]);
                        UNROLL for (int row = 0; row < rows; row++)
                            sums[row * columns + j] = FMA(values[row], weights, sums[row * columns + j]);
                    }
                } else { /* there are registers for the weights, but not for the rows */
                    VECTOR weights[FEW_COLUMNS];
                    UNROLL for (int j = 0; j < columns; j++) weights[j] = NAME(few_weights)(bits, codes + j * row_bytes, numbers[j], biases[j]);
                    UNROLL for (int row = 0; row < rows; row++) {
                        VECTOR value = LOAD(a + row * p->a_row);
                        __asm__("" : "+v"(value));
                        UNROLL for (int j = 0; j < columns; j++) sums[row * columns + j] = FMA(value, weights[j], sums[row * columns + j]);
                    }
                }
            }
        }
    }
    if (last < groups) {
        UNROLL for (int i = 0; i < rows * columns; i++) kept[i] = sums[i];
        return;
    }
    float totals[FEW_SUMS];
    if (bits == 4)
        UNROLL for (int i = 0; i < rows * columns; i += 4) NAME(woven_sum4)(totals + i, sums + i);
    else
        UNROLL for (int i = 0; i < rows * columns; i += 4) avx512_sum4(totals + i, sums + i);
    UNROLL for (int row = 0; row < rows; row++) settle(p, m + row, to, totals + row * columns, columns);
}

/* Each height of a tile is its own function, with as many columns as there are registers for; `end` may leave fewer. Where rows are too long for the
 * nearest cache all columns add up the groups that fit into it, then the next ones; with up to three rows that does not pay. */
#define FEW_HEIGHT(rows, columns, bits)                                                                                \
    static TARGET __attribute__((noinline)) void NAME(few_##bits##_##rows)(const struct product *p, const struct weft_weights *w, size_t m, \
                                                                           size_t n, size_t end, size_t to) {         \
        VECTOR kept[FEW_BLOCK / columns][rows * columns];                                                              \
        const size_t groups = w->k / w->group, step = few_step(groups, rows * w->group), whole = (end - n) / columns;   \
        for (size_t first = 0; first < groups; first += step) {                                                        \
            const size_t last = groups - first < step ? groups : first + step;                                         \
            for (size_t i = 0; i < whole; i++)                                                                         \
                NAME(few_tile)(rows, columns, bits, p, w, m, n + i * columns, to + i * columns, first, last, kept[i]);   \
        }                                                                                                              \
        for (size_t i = whole * columns; i < end - n; i++) NAME(few_tile)(rows, 1, bits, p, w, m, n + i, to + i, 0, groups, kept[0]); \
    }
#define FEW_SHORT(rows, columns, bits)                                                                                 \
    static TARGET __attribute__((noinline)) void NAME(few_##bits##_##rows)(const struct product *p, const struct weft_weights *w, size_t m, \
                                                                           size_t n, size_t end, size_t to) {         \
        const size_t groups = w->k / w->group;                                                                         \
        for (; n + columns <= end; n += columns, to += columns) NAME(few_tile)(rows, columns, bits, p, w, m, n, to, 0, groups, NULL); \
        for (; n < end; n++, to++) NAME(few_tile)(rows, 1, bits, p, w, m, n, to, 0, groups, NULL);                     \
    }
#define FEW_HEIGHTS(bits)                                                                                              \
    FEW_SHORT(1, 8, bits) FEW_SHORT(2, 6, bits) FEW_SHORT(3, 4, bits) FEW_HEIGHT(4, 4, bits)                           \
    FEW_HEIGHT(5, 3, bits) FEW_HEIGHT(6, 3, bits) FEW_HEIGHT(7, 2, bits) FEW_HEIGHT(8, 2, bits)                        \
    FEW_HEIGHT(9, 2, bits) FEW_HEIGHT(10, 2, bits) FEW_HEIGHT(11, 2, bits) FEW_HEIGHT(12, 2, bits)
#define FEW_NAMES(bits)                                                                                                \
    {NULL, NAME(few_##bits##_1), NAME(few_##bits##_2), NAME(few_##bits##_3), NAME(few_##bits##_4),                      \
     NAME(few_##bits##_5), NAME(few_##bits##_6), NAME(few_##bits##_7), NAME(few_##bits##_8),                           \
     NAME(few_##bits##_9), NAME(few_##bits##_10), NAME(few_##bits##_11), NAME(few_##bits##_12)}
FEW_HEIGHTS(4) FEW_HEIGHTS(8)

/* Columns [begin, end) of rows * weights^T into p->c, whose first column is `begin`. With four bits the rows are woven. */
TARGET static void NAME(few)(const struct product *p, const struct weft_weights *w, size_t begin, size_t end) {
    static void (*const tiles[2][FEW_ROWS + 1])(const struct product *, const struct weft_weights *, size_t, size_t, size_t, size_t) = {
        FEW_NAMES(4), FEW_NAMES(8)};
    const size_t num_tiles = (p->m + FEW_ROWS - 1) / FEW_ROWS;
    for (size_t n = begin; n < end; n += FEW_BLOCK)
        for (size_t tile = 0; tile < num_tiles; tile++) {
            const size_t m = tile * p->m / num_tiles, rows = (tile + 1) * p->m / num_tiles - m;
            tiles[w->bits == 8][rows](p, w, m, n, end - n < FEW_BLOCK ? end : n + FEW_BLOCK, n - begin);
        }
}
#undef FEW_HEIGHT
#undef FEW_SHORT
#undef FEW_HEIGHTS
#undef FEW_NAMES
#endif

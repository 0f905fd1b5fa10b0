/* The arithmetic of the row-exact products, written once and included once for each instruction set.
 *
 * The includer defines NAME(x), TARGET, WIDTH, VECTOR, its loads, stores and arithmetic, and the sizes of tiles: see the three sets in sgemm.c. This file knows nothing of threads, of BLAS, or of why a caller has so many rows.
 *
 * What must hold: the additions behind one element depend on k alone. An element of dot_block is sixteen running sums
 * (lane i takes k = i, i + 16, ...) folded 8, 4, 2, 1; an element of axpy_block is one running sum in the order of k.
 * Tiles of other sizes interleave different elements; they never touch the order inside one.
 */
#define PARTS (LANES / WIDTH)
#define STRETCH 576
#define AXPY_STRIP (AXPY_VECTORS * WIDTH)
#define DOT_SUMS (DOT_ROWS * DOT_COLUMNS)
#define INLINE static inline __attribute__((always_inline)) TARGET
#define UNROLL _Pragma("GCC unroll 32")
/* How many columns ahead of a tile weights are asked for: those of the next tile, or of so many that it takes a while to get there. */
#define DOT_AHEAD(p, is_half) \
    (DOT_COLUMNS * (1 + FAR_BYTES / (DOT_COLUMNS * (p)->ldb * ((is_half) ? sizeof(uint16_t) : sizeof(float)) + 1)))

/* The next WIDTH of the weights from their number `at` on, or `count` of them where not all are there. */
INLINE VECTOR NAME(weights_at)(const void *b, size_t at, const int is_half, const int is_whole, int count) {
    if (is_half) return is_whole ? LOAD_HALVES((const uint16_t *)b + at) : LOAD_SOME_HALVES((const uint16_t *)b + at, count);
    return is_whole ? LOAD((const float *)b + at) : LOAD_SOME((const float *)b + at, count);
}

/* sums (rows, columns) += a (rows, WIDTH) * b (columns, WIDTH); of b only `count` are there when it is not whole. */
INLINE void NAME(dot_step)(const int rows, const int columns, VECTOR sums[DOT_SUMS], const float *a, const struct product *p,
                           size_t at, const int is_half, const int is_whole, int count) {
    VECTOR values[DOT_ROWS];
    UNROLL for (int i = 0; i < rows; i++) values[i] = LOAD(a + i * p->a_row);
    UNROLL for (int j = 0; j < columns; j++) {
        const VECTOR weights = NAME(weights_at)(p->b, at + j * p->ldb, is_half, is_whole, count);
        UNROLL for (int i = 0; i < rows; i++) sums[i * columns + j] = FMA(values[i], weights, sums[i * columns + j]);
    }
}

/* Steps [begin, end) of one part of a tile's sums. The `fetches` cache lines asked for at each step, from `ahead` on, belong to the
 * weights that come next: without them the memory rests while later rows use the weights of this tile (29 instead of
 * 17 GB/s at m = 1, 20 instead of 10 at m = 8; EPYC of family 25, one thread). */
INLINE void NAME(dot_steps)(const int rows, const int columns, const int is_half, VECTOR sums[DOT_SUMS], const float *a, const struct product *p,
                            size_t first, size_t begin, size_t end, const char *ahead, const int fetches) {
    for (size_t k = begin; k + LANES <= end; k += LANES) {
        for (int line = 0; line < fetches; line++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        NAME(dot_step)(rows, columns, sums, a + k, p, first + k, is_half, 1, WIDTH);
    }
}

#if WIDTH == 16
/* Two rows of six sums at once, which share vectors from the first folding on: less to shuffle, and shuffling takes multiplications' time. */
INLINE void NAME(fold_rows)(const VECTOR *upper, const VECTOR *lower, float totals[LANES]) {
    VECTOR halves[6], quarters[3];
    UNROLL for (int j = 0; j < 6; j++) /* of the upper row, of the lower row */
        halves[j] = _mm512_add_ps(_mm512_mask_blend_ps(0xFF00, upper[j], lower[j]), _mm512_shuffle_f32x4(upper[j], lower[j], 0x4E));
    UNROLL for (int j = 0; j < 3; j++)
        quarters[j] = _mm512_add_ps(_mm512_shuffle_f32x4(halves[2 * j], halves[2 * j + 1], 0x88), _mm512_shuffle_f32x4(halves[2 * j], halves[2 * j + 1], 0xDD));
    const VECTOR first = _mm512_add_ps(_mm512_mask_blend_ps(0xCCCC, quarters[0], quarters[1]), _mm512_shuffle_ps(quarters[0], quarters[1], 0x4E));
    const VECTOR second = _mm512_add_ps(quarters[2], _mm512_shuffle_ps(quarters[2], quarters[2], 0x4E));
    const VECTOR found = _mm512_add_ps(_mm512_shuffle_ps(first, second, 0x88), _mm512_shuffle_ps(first, second, 0xDD));
    const __m512i places = _mm512_set_epi32(0, 0, 14, 6, 13, 5, 12, 4, 0, 0, 10, 2, 9, 1, 8, 0);
    STORE(totals, _mm512_permutexvar_ps(places, found));
}
#endif

/* One tile of c. Narrow vectors sweep once for each part of the sixteen lanes, which leaves more registers to the tile,
 * over stretches of k that stay in the nearest cache. */
INLINE void NAME(dot_tile)(const int rows, const int columns, const int is_half, const struct product *p, size_t m, size_t n,
                           const char *ahead, int fetches) {
    const int count = rows * columns;
    VECTOR parts[PARTS][DOT_SUMS + 3];
    for (int part = 0; part < PARTS; part++)
        UNROLL for (int i = 0; i < count + 3; i++) parts[part][i] = SPREAD(0.0f);
    size_t begin = 0, end;
    do {
        end = PARTS == 1 || p->k - begin < STRETCH ? p->k : begin + STRETCH;
        for (int part = 0; part < PARTS; part++) {
            const float *a = p->a + m * p->a_row + part * WIDTH;
            const size_t first = n * p->ldb + part * WIDTH, whole = (end - begin) / LANES * LANES;
            VECTOR sums[DOT_SUMS];
            UNROLL for (int i = 0; i < count; i++) sums[i] = parts[part][i];
            if (fetches > 0)
                NAME(dot_steps)(rows, columns, is_half, sums, a, p, first, begin, end, ahead, fetches);
            else
                NAME(dot_steps)(rows, columns, is_half, sums, a, p, first, begin, end, ahead, 0);
            ahead += whole / LANES * fetches * 64;
            const int left = (int)(end - begin - whole) - part * WIDTH;
            if (left > 0) NAME(dot_step)(rows, columns, sums, a + begin + whole, p, first + begin + whole, is_half, 0, left);
            UNROLL for (int i = 0; i < count; i++) parts[part][i] = sums[i];
        }
        begin = end;
    } while (PARTS > 1 && begin < p->k);
    float totals[DOT_SUMS + 3];
#if WIDTH == 16
    if (columns == 6) {
        float pair[LANES];
        UNROLL for (int i = 0; i < rows; i++) {
            if (i % 2 == 0) NAME(fold_rows)(parts[0] + i * columns, parts[0] + (i + 1 < rows ? i + 1 : i) * columns, pair);
            settle(p, m + i, n, pair + i % 2 * (LANES / 2), columns);
        }
        return;
    }
#endif
    UNROLL for (int i = 0; i < count; i += 4) SUM4(totals + i, parts, i);
    UNROLL for (int i = 0; i < rows; i++) settle(p, m + i, n, totals + i * columns, columns);
}

/* Where the weights of column n begin, to be asked for ahead. */
INLINE const char *NAME(column)(const struct product *p, size_t n, const int is_half) {
    return (const char *)p->b + n * p->ldb * (is_half ? sizeof(uint16_t) : sizeof(float));
}

/* Each height of a tile is its own function: inlined into one, the compiler runs out of registers. */
#define DOT_HEIGHT(rows, kind, is_half)                                                                                \
    static TARGET __attribute__((noinline)) void NAME(dot_wide_##kind##rows)(const struct product *p, size_t m, size_t n, \
                                                                             const char *ahead, int fetches) {         \
        NAME(dot_tile)(rows, DOT_COLUMNS, is_half, p, m, n, ahead, fetches);                                           \
    }                                                                                                                  \
    static TARGET __attribute__((noinline)) void NAME(dot_narrow_##kind##rows)(const struct product *p, size_t m, size_t n) { \
        NAME(dot_tile)(rows, 1, is_half, p, m, n, (const char *)p->b, 0);                                              \
    }                                                                                                                  \
    static TARGET __attribute__((noinline)) size_t NAME(dot_only_##kind##rows)(const struct product *p, size_t n,      \
                                                                               size_t end) {                           \
        for (; n + DOT_COLUMNS <= end; n += DOT_COLUMNS)                                                               \
            NAME(dot_tile)(rows, DOT_COLUMNS, is_half, p, 0, n, NAME(column)(p, n + DOT_AHEAD(p, is_half), is_half),     \
                           (DOT_COLUMNS / (1 + is_half) + PARTS - 1) / PARTS);                                         \
        return n;                                                                                                      \
    }
DOT_HEIGHT(1, , 0) DOT_HEIGHT(2, , 0) DOT_HEIGHT(3, , 0)
DOT_HEIGHT(1, half_, 1) DOT_HEIGHT(2, half_, 1) DOT_HEIGHT(3, half_, 1)
#if DOT_ROWS == 4
DOT_HEIGHT(4, , 0) DOT_HEIGHT(4, half_, 1)
#define DOT_HEIGHTS(kind) {NULL, NAME(kind##1), NAME(kind##2), NAME(kind##3), NAME(kind##4)}
#else
#define DOT_HEIGHTS(kind) {NULL, NAME(kind##1), NAME(kind##2), NAME(kind##3)}
#endif

/* Many rows: the weights of a few columns come from memory for the first tile and from cache for the others. */
static TARGET size_t NAME(dot_many)(const struct product *p, size_t n, size_t end) {
    static void (*const tiles[2][DOT_ROWS + 1])(const struct product *, size_t, size_t, const char *, int) = {
        DOT_HEIGHTS(dot_wide_), DOT_HEIGHTS(dot_wide_half_)};
    const size_t sweeps = PARTS * ((p->m + DOT_ROWS - 1) / DOT_ROWS), lines = DOT_COLUMNS / (1 + p->is_half);
    const size_t fetches = (lines + sweeps - 1) / sweeps;
    for (; n + DOT_COLUMNS <= end; n += DOT_COLUMNS) {
        const char *ahead = NAME(column)(p, n + DOT_COLUMNS, p->is_half), *far = NAME(column)(p, n + 2 * DOT_COLUMNS, p->is_half);
        for (size_t m = 0; m < p->m; m += DOT_ROWS, ahead += fetches * PARTS * p->k * sizeof(float)) {
            const size_t rows = p->m - m < DOT_ROWS ? p->m - m : DOT_ROWS;
            tiles[p->is_half][rows](p, m, n, ahead, ahead < far ? (int)fetches : 0);
        }
    }
    return n;
}

typedef float NAME(floats) __attribute__((vector_size(WIDTH * 4)));
typedef int NAME(bits) __attribute__((vector_size(WIDTH * 4)));

#include "tiled.h"

/* Columns [begin, end) of c = a b^T. */
static void NAME(dot_block)(const struct product *p, size_t begin, size_t end) {
    static size_t (*const only[2][DOT_ROWS + 1])(const struct product *, size_t, size_t) = {DOT_HEIGHTS(dot_only_),
                                                                                           DOT_HEIGHTS(dot_only_half_)};
    static void (*const narrow[2][DOT_ROWS + 1])(const struct product *, size_t, size_t) = {DOT_HEIGHTS(dot_narrow_),
                                                                                           DOT_HEIGHTS(dot_narrow_half_)};
    if (p->is_tiled) {
        NAME(dot_tiled)(p, begin, end);
        return;
    }
    size_t n = p->m <= DOT_ROWS ? only[p->is_half][p->m](p, begin, end) : NAME(dot_many)(p, begin, end);
    for (; n < end; n++)
        for (size_t m = 0; m < p->m; m += DOT_ROWS) narrow[p->is_half][p->m - m < DOT_ROWS ? p->m - m : DOT_ROWS](p, m, n);
}

/* One tile of c = a b: b is read along its rows, each element of a is spread over a vector. The tile is `vectors` wide,
 * or, with one vector, `count` columns. */
INLINE void NAME(axpy_tile)(const int rows, const int vectors, const struct product *p, size_t m, size_t n,
                            const int is_whole, int count) {
    const float *a = p->a + m * p->a_row, *b = p->b + n;
    VECTOR sums[AXPY_ROWS][AXPY_VECTORS];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < vectors; j++) sums[i][j] = SPREAD(0.0f);
    for (size_t k = 0; k < p->k; k++, a += p->a_column, b += p->ldb) {
        VECTOR factors[AXPY_ROWS];
        UNROLL for (int i = 0; i < rows; i++) factors[i] = SPREAD(a[i * p->a_row]);
        UNROLL for (int j = 0; j < vectors; j++) {
            VECTOR values = is_whole ? LOAD(b + j * WIDTH) : LOAD_SOME(b, count);
            UNROLL for (int i = 0; i < rows; i++) sums[i][j] = FMA(factors[i], values, sums[i][j]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++) {
        float totals[AXPY_VECTORS * WIDTH];
        UNROLL for (int j = 0; j < vectors; j++) STORE(totals + j * WIDTH, sums[i][j]);
        settle(p, m + i, n, totals, is_whole ? vectors * WIDTH : count);
    }
}

#define AXPY_HEIGHT(rows)                                                                                              \
    static TARGET __attribute__((noinline)) void NAME(axpy_##rows)(const struct product *p, size_t m, size_t n,        \
                                                                   size_t end) {                                       \
        for (; n + AXPY_VECTORS * WIDTH <= end; n += AXPY_VECTORS * WIDTH)                                             \
            NAME(axpy_tile)(rows, AXPY_VECTORS, p, m, n, 1, 0);                                                        \
        for (; n + WIDTH <= end; n += WIDTH) NAME(axpy_tile)(rows, 1, p, m, n, 1, 0);                                  \
        if (n < end) NAME(axpy_tile)(rows, 1, p, m, n, 0, (int)(end - n));                                             \
    }
AXPY_HEIGHT(1) AXPY_HEIGHT(2) AXPY_HEIGHT(3)
#if AXPY_ROWS == 6
AXPY_HEIGHT(4) AXPY_HEIGHT(5) AXPY_HEIGHT(6)
#endif

static void NAME(axpy_strip)(const struct product *p, size_t width) {
    static void (*const tiles[])(const struct product *, size_t, size_t, size_t) = {
        NULL, NAME(axpy_1), NAME(axpy_2), NAME(axpy_3),
#if AXPY_ROWS == 6
        NAME(axpy_4), NAME(axpy_5), NAME(axpy_6),
#endif
    };
    for (size_t m = 0; m < p->m; m += AXPY_ROWS)
        tiles[p->m - m < AXPY_ROWS ? p->m - m : AXPY_ROWS](p, m, 0, width);
}

/* Columns [begin, end) of c = a b, in strips that stay in cache for all rows but the first. If enough rows use it a
 * strip is copied together: in a wide b its lines lie so far apart that they push each other out. */
static void NAME(axpy_block)(const struct product *p, size_t begin, size_t end) {
    void *copy = NULL;
    if (p->m >= COPY_ROWS && p->ldb > AXPY_STRIP && posix_memalign(&copy, 64, p->k * AXPY_STRIP * sizeof(float)) != 0)
        copy = NULL; /* then it runs without */
    for (size_t n = begin; n < end; n += AXPY_STRIP) {
        const size_t width = end - n < AXPY_STRIP ? end - n : AXPY_STRIP;
        struct product strip = *p;
        strip.b += n;
        strip.c += n;
        if (copy != NULL) {
            for (size_t k = 0; k < p->k; k++)
                memcpy((float *)copy + k * AXPY_STRIP, strip.b + k * p->ldb, width * sizeof(float));
            strip.b = copy;
            strip.ldb = AXPY_STRIP;
        }
        NAME(axpy_strip)(&strip, width);
    }
    free(copy);
}

/* e^x for x <= 0: 2^n times a polynomial over what is left; zero where that is too small for a float, NaN for NaN.
 * Adding 1.5 * 2^23 rounds to a whole number and leaves it in the lowest bits, from where it is moved to the exponent. */
INLINE VECTOR NAME(exponential)(VECTOR x) {
    const VECTOR whole = FMA(x, SPREAD(1.44269504f), SPREAD(12582912.0f));
    const VECTOR n = (VECTOR)((NAME(floats))whole - (NAME(floats))SPREAD(12582912.0f));
    const VECTOR rest = FMA(n, SPREAD(-1.42860677e-6f), FMA(n, SPREAD(-0.693145752f), x));
    VECTOR sum = SPREAD(1.0f / 720);
    sum = FMA(sum, rest, SPREAD(1.0f / 120));
    sum = FMA(sum, rest, SPREAD(1.0f / 24));
    sum = FMA(sum, rest, SPREAD(1.0f / 6));
    sum = FMA(sum, rest, SPREAD(0.5f));
    sum = FMA(sum, rest, SPREAD(1.0f));
    sum = FMA(sum, rest, SPREAD(1.0f));
    const NAME(bits) power = (NAME(bits))sum + ((NAME(bits))whole << 23);
    return (VECTOR)(power & ~((NAME(floats))x < (NAME(floats))SPREAD(-87.0f)));
}

/* x / (1 + e^-x), written so that the exponent is never above zero. */
INLINE VECTOR NAME(silu)(VECTOR x) {
    const NAME(floats) zero = (NAME(floats))SPREAD(0.0f), one = (NAME(floats))SPREAD(1.0f), value = (NAME(floats))x;
    const NAME(bits) is_negative = value < zero, sign = (NAME(bits))(NAME(floats))SPREAD(-0.0f);
    const NAME(floats) small = (NAME(floats))NAME(exponential)((VECTOR)((NAME(bits))value | sign));
    const NAME(floats) top = (NAME(floats))(((NAME(bits))small & is_negative) | ((NAME(bits))one & ~is_negative));
    return (VECTOR)(value * top / (one + small));
}

/* y: the gates of an MLP times the numbers they let through. */
TARGET static void NAME(gated_block)(const float *gates, const float *ups, float *y, size_t count) {
    const size_t whole = count / WIDTH * WIDTH;
    for (size_t i = 0; i < whole; i += WIDTH) {
        const NAME(floats) found = (NAME(floats))NAME(silu)(LOAD(gates + i)) * (NAME(floats))LOAD(ups + i);
        STORE(y + i, found);
    }
    if (whole == count) return;
    const int left = (int)(count - whole);
    const NAME(floats) found = (NAME(floats))NAME(silu)(LOAD_SOME(gates + whole, left)) * (NAME(floats))LOAD_SOME(ups + whole, left);
    float last[WIDTH];
    STORE(last, found);
    memcpy(y + whole, last, (size_t)left * sizeof(float));
}

/* y += x. */
TARGET static void NAME(add_block)(const float *x, float *y, size_t count) {
    size_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        const NAME(floats) found = (NAME(floats))LOAD(y + i) + (NAME(floats))LOAD(x + i);
        STORE(y + i, found);
    }
    for (; i < count; i++) y[i] += x[i];
}

/* SiLU; y may be x. */
TARGET static void NAME(silu_block)(const float *x, float *y, size_t count) {
    const size_t whole = count / WIDTH * WIDTH;
    float last[WIDTH] = {0};
    for (size_t i = 0; i < whole; i += WIDTH) {
        const VECTOR found = NAME(silu)(LOAD(x + i));
        STORE(y + i, found);
    }
    if (whole == count) return;
    memcpy(last, x + whole, (count - whole) * sizeof(float));
    const VECTOR found = NAME(silu)(LOAD(last));
    STORE(last, found);
    memcpy(y + whole, last, (count - whole) * sizeof(float));
}

/* The sigmoid as MLX's operation rounds it, so that a layer of MLX's operations has the bits of ours: 1 / (1 + e^|x|), where
 * e^|x| is 2^n, n a whole number, times a polynomial of MLX's over what is left; infinite above 88. */
INLINE VECTOR NAME(sigmoid)(VECTOR x) {
    const NAME(floats) one = (NAME(floats))SPREAD(1.0f), infinite = (NAME(floats))SPREAD(INFINITY);
    const NAME(bits) sign = (NAME(bits))(NAME(floats))SPREAD(-0.0f);
    const NAME(floats) size = (NAME(floats))((NAME(bits))x & ~sign), turns = size * (NAME(floats))SPREAD(1.442695f);
    const NAME(bits) whole = __builtin_convertvector(turns + (NAME(floats))SPREAD(0.5f), NAME(bits));
    const VECTOR rest = (VECTOR)(turns - __builtin_convertvector(whole, NAME(floats)));
    VECTOR sum = SPREAD(1.535336188319500e-4f);
    sum = FMA(sum, rest, SPREAD(1.339887440266574e-3f));
    sum = FMA(sum, rest, SPREAD(9.618437357674640e-3f));
    sum = FMA(sum, rest, SPREAD(5.550332471162809e-2f));
    sum = FMA(sum, rest, SPREAD(2.402264791363012e-1f));
    sum = FMA(sum, rest, SPREAD(6.931472028550421e-1f));
    sum = FMA(sum, rest, SPREAD(1.0f));
    NAME(floats) power = (NAME(floats))((whole + 127) << 23) * (NAME(floats))sum;
    const NAME(bits) is_large = size > (NAME(floats))SPREAD(88.0f), is_number = size == size;
    power = (NAME(floats))(((NAME(bits))infinite & is_large) | ((NAME(bits))power & ~is_large));
    power = (NAME(floats))(((NAME(bits))power & is_number) | ((NAME(bits))size & ~is_number));
    const NAME(floats) small = one / (one + power), large = one - small;
    const NAME(bits) is_negative = (NAME(floats))x < (NAME(floats))SPREAD(0.0f);
    return (VECTOR)(((NAME(bits))small & is_negative) | ((NAME(bits))large & ~is_negative));
}

/* y times the sigmoids of its gates. */
TARGET static void NAME(gate_block)(const float *gates, float *y, size_t count) {
    const size_t whole = count / WIDTH * WIDTH;
    float last[WIDTH] = {0};
    for (size_t i = 0; i < whole; i += WIDTH) {
        const NAME(floats) found = (NAME(floats))NAME(sigmoid)(LOAD(gates + i)) * (NAME(floats))LOAD(y + i);
        STORE(y + i, found);
    }
    memcpy(last, gates + whole, (count - whole) * sizeof(float));
    const VECTOR found = NAME(sigmoid)(LOAD(last));
    STORE(last, found);
    for (size_t i = whole; i < count; i++) y[i] *= last[i - whole];
}

/* y: for each channel the sum of its numbers at all taps, weighed, first tap first, then SiLU. */
TARGET static void NAME(convolve)(const float *const *taps, size_t num_taps, const float *weights, size_t channels, float *y) {
    size_t at = 0;
    for (; at + WIDTH <= channels; at += WIDTH) {
        VECTOR sum = SPREAD(0.0f);
        for (size_t tap = 0; tap < num_taps; tap++) sum = FMA(LOAD(taps[tap] + at), LOAD(weights + tap * channels + at), sum);
        sum = NAME(silu)(sum);
        STORE(y + at, sum);
    }
    if (at == channels) return;
    const int count = (int)(channels - at);
    VECTOR sum = SPREAD(0.0f);
    for (size_t tap = 0; tap < num_taps; tap++)
        sum = FMA(LOAD_SOME(taps[tap] + at, count), LOAD_SOME(weights + tap * channels + at, count), sum);
    float last[WIDTH];
    sum = NAME(silu)(sum);
    STORE(last, sum);
    memcpy(y + at, last, (size_t)count * sizeof(float));
}

/* One row of scores becomes weights that sum to one. The sum has sixteen lanes, folded 8, 4, 2, 1; zeros behind a row's
 * end change nothing. */
INLINE void NAME(softmax_row)(float *row, size_t count) {
    float last[LANES], most = row[0];
    const size_t whole = count / LANES * LANES;
    NAME(floats) high[PARTS], sums[PARTS];
    for (int part = 0; part < PARTS; part++) high[part] = (NAME(floats))SPREAD(most), sums[part] = (NAME(floats))SPREAD(0.0f);
    for (size_t i = 0; i < count - whole; i++) last[i] = row[whole + i];
    for (size_t i = count - whole; i < LANES; i++) last[i] = row[0];
    for (size_t at = 0; at <= whole; at += LANES)
        UNROLL for (int part = 0; part < PARTS; part++) {
            const NAME(floats) found = (NAME(floats))LOAD((at < whole ? row + at : last) + part * WIDTH);
            const NAME(bits) is_higher = found > high[part];
            high[part] = (NAME(floats))(((NAME(bits))found & is_higher) | ((NAME(bits))high[part] & ~is_higher));
        }
    for (int part = 0; part < PARTS; part++)
        for (int lane = 0; lane < WIDTH; lane++) most = high[part][lane] > most ? high[part][lane] : most;
    for (size_t i = count - whole; i < LANES; i++) last[i] = most - 1e3f;
    for (size_t at = 0; at <= whole; at += LANES)
        UNROLL for (int part = 0; part < PARTS; part++) {
            float *place = (at < whole ? row + at : last) + part * WIDTH;
            const VECTOR weight = NAME(exponential)((VECTOR)((NAME(floats))LOAD(place) - (NAME(floats))SPREAD(most)));
            sums[part] += (NAME(floats))weight;
            STORE(place, weight);
        }
    float lanes[LANES];
    for (int part = 0; part < PARTS; part++) STORE(lanes + part * WIDTH, sums[part]);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    const float share = 1.0f / lanes[0];
    for (size_t at = 0; at < whole; at += WIDTH) {
        const NAME(floats) weight = (NAME(floats))LOAD(row + at) * (NAME(floats))SPREAD(share);
        STORE(row + at, weight);
    }
    for (size_t i = 0; i < count - whole; i++) row[whole + i] = last[i] * share;
}

/* The largest of `count` numbers, a multiple of WEFT_DRAW_BLOCK; *is_number: 0 if one of them is none. */
INLINE float NAME(largest)(const float *x, size_t count, int *is_number) {
    NAME(floats) high = (NAME(floats))LOAD(x);
    NAME(bits) is_any = high != high;
    for (size_t at = 0; at < count; at += WIDTH) {
        const NAME(floats) found = (NAME(floats))LOAD(x + at);
        const NAME(bits) is_higher = found > high;
        is_any |= found != found;
        high = (NAME(floats))(((NAME(bits))found & is_higher) | ((NAME(bits))high & ~is_higher));
    }
    float most = high[0];
    int strange = 0;
    for (int lane = 0; lane < WIDTH; lane++) most = high[lane] > most ? high[lane] : most, strange |= is_any[lane];
    *is_number = !strange;
    return most;
}

/* x become weights of a draw, zero where they are below `min_p`; returns the sum of the block. */
INLINE float NAME(weigh_block)(float *x, float most, float temperature, float min_p) {
    float lanes[LANES] = {0}, total = 0.0f;
    for (int at = 0; at < WEFT_DRAW_BLOCK; at += WIDTH) {
        const NAME(floats) below = ((NAME(floats))LOAD(x + at) - (NAME(floats))SPREAD(most)) / (NAME(floats))SPREAD(temperature);
        NAME(floats) weight = (NAME(floats))NAME(exponential)((VECTOR)below);
        weight = (NAME(floats))((NAME(bits))weight & (weight >= (NAME(floats))SPREAD(min_p)));
        STORE(x + at, weight);
        weight += (NAME(floats))LOAD(lanes + at % LANES);
        STORE(lanes + at % LANES, weight);
    }
    for (int lane = 0; lane < LANES; lane++) total += lanes[lane];
    return total;
}

/* The first place where the running sum of weights exceeds `goal`, looked for in the block where the sum of blocks does.
 * sums[block] is rounded, so the place is looked for at the goal's share of what the block's weights sum up to here: past
 * their end would be the next block's first token, however unlikely. `goal` is below the sum of all. */
INLINE size_t NAME(drawn)(const float *weights, const float *sums, size_t blocks, double goal) {
    double before = 0.0, whole = 0.0, sum = 0.0;
    size_t block = 0, place = 0;
    while (block + 1 < blocks && before + sums[block] <= goal) before += sums[block++];
    const float *here = weights + block * WEFT_DRAW_BLOCK;
    for (size_t i = 0; i < WEFT_DRAW_BLOCK; i++) whole += here[i];
    const double share = (goal - before) / sums[block] * whole;
    while (place + 1 < WEFT_DRAW_BLOCK && (sum += here[place]) <= share) place++;
    return block * WEFT_DRAW_BLOCK + place;
}

/* x, padded with -infinity to whole blocks, become weights of a draw; `sums`: of each block; returns their sum. */
TARGET static double NAME(weigh)(float *x, size_t count, float most, float temperature, float min_p, float *sums) {
    double total = 0.0;
    for (size_t block = 0; block < count / WEFT_DRAW_BLOCK; block++)
        total += sums[block] = NAME(weigh_block)(x + block * WEFT_DRAW_BLOCK, most, temperature, min_p);
    return total;
}

/* One line's token from a copy of its logits, padded with -infinity to whole blocks; `sums`: memory for a number a block. */
TARGET static int32_t NAME(choose)(float *x, size_t count, float most, float temperature, float min_p, float uniform, float *sums) {
    if (temperature == 0.0f) {
        size_t at = 0;
        while (at + 1 < count && x[at] != most) at++;
        return (int32_t)at;
    }
    const double total = NAME(weigh)(x, count, most, temperature, min_p, sums);
    return (int32_t)NAME(drawn)(x, sums, count / WEFT_DRAW_BLOCK, (double)uniform * total);
}

TARGET static float NAME(most)(const float *x, size_t count, int *is_number) { return NAME(largest)(x, count, is_number); }

/* y: a row brought to a mean square of one and weighed; y may be x. */
TARGET static void NAME(norm_row)(const float *x, const float *weight, float eps, float *y, size_t n) {
    const size_t whole = n / LANES * LANES;
    float lanes[LANES];
    NAME(floats) sums[PARTS];
    for (int part = 0; part < PARTS; part++) sums[part] = (NAME(floats))SPREAD(0.0f);
    for (size_t at = 0; at < whole; at += LANES)
        UNROLL for (int part = 0; part < PARTS; part++) {
            const VECTOR found = LOAD(x + at + part * WIDTH);
            sums[part] = (NAME(floats))FMA(found, found, (VECTOR)sums[part]);
        }
    for (int part = 0; part < PARTS; part++) STORE(lanes + part * WIDTH, sums[part]);
    for (size_t i = whole; i < n; i++) lanes[i - whole] += x[i] * x[i];
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    const float scale = 1.0f / sqrtf(lanes[0] / (float)n + eps);
    for (size_t i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

/* y: a row rotated by its angles, `half` cosines and then as many sines: of neighbours, or of halves; y may be x. */
TARGET static void NAME(rotate_row)(const float *x, const float *cosines, float *y, size_t half, int of_neighbours) {
    const float *sines = cosines + half;
    const size_t step = of_neighbours ? 2 : 1, apart = of_neighbours ? 1 : half;
    if (!of_neighbours)
        for (size_t i = 0; i < half; i++) {
            const float first = x[i], second = x[i + half];
            y[i] = first * cosines[i] - second * sines[i];
            y[i + half] = first * sines[i] + second * cosines[i];
        }
    else
        for (size_t i = 0; i < half; i++) {
            const float first = x[step * i], second = x[step * i + apart];
            y[step * i] = first * cosines[i] - second * sines[i];
            y[step * i + apart] = first * sines[i] + second * cosines[i];
        }
}

/* STATE_ROWS rows of one head's state through all tokens: each token reads the state before it and writes the state after
 * it, where `to` says. Rounded as MLX's operations and our products round a decode step's operations. */
struct NAME(passage) {
    const float *from, *value, *key, *query, *gate, *beta;
    float *to, *output;
};

INLINE void NAME(recur_token)(const struct NAME(passage) *p, size_t width, const int is_delta, const int is_gate_wide) {
    VECTOR sums[PARTS][STATE_ROWS];
    float change[STATE_ROWS], totals[STATE_ROWS];
    memcpy(change, p->value, sizeof change);
    if (is_delta) {
        for (int part = 0; part < PARTS; part++)
            for (int one = 0; one < STATE_ROWS; one++) sums[part][one] = SPREAD(0.0f);
        for (size_t at = 0; at < width; at += LANES)
            UNROLL for (int part = 0; part < PARTS; part++) {
                const size_t here = at + (size_t)part * WIDTH;
                const NAME(floats) fading = (NAME(floats))(is_gate_wide ? LOAD(p->gate + here) : SPREAD(p->gate[0]));
                const VECTOR direction = LOAD(p->key + here);
                UNROLL for (int one = 0; one < STATE_ROWS; one++) {
                    const NAME(floats) left = (NAME(floats))LOAD(p->from + one * width + here) * fading;
                    sums[part][one] = FMA((VECTOR)left, direction, sums[part][one]);
                }
            }
        SUM4(totals, sums, 0);
        for (int one = 0; one < STATE_ROWS; one++) change[one] = p->beta[0] * (change[one] - totals[one]);
    }
    for (int part = 0; part < PARTS; part++)
        for (int one = 0; one < STATE_ROWS; one++) sums[part][one] = SPREAD(0.0f);
    for (size_t at = 0; at < width; at += LANES)
        UNROLL for (int part = 0; part < PARTS; part++) {
            const size_t here = at + (size_t)part * WIDTH;
            const NAME(floats) fading = (NAME(floats))(is_gate_wide ? LOAD(p->gate + here) : SPREAD(p->gate[0]));
            const VECTOR direction = LOAD(p->key + here), question = LOAD(p->query + here);
            UNROLL for (int one = 0; one < STATE_ROWS; one++) {
                const NAME(floats) left = (NAME(floats))LOAD(p->from + one * width + here) * fading;
                const VECTOR found = (VECTOR)(left + (NAME(floats))SPREAD(change[one]) * (NAME(floats))direction);
                STORE(p->to + one * width + here, found);
                sums[part][one] = FMA(found, question, sums[part][one]);
            }
        }
    SUM4(totals, sums, 0);
    memcpy(p->output, totals, sizeof totals);
}

/* Where the numbers of a head of row b begin. */
INLINE const float *NAME(series)(const struct weft_series *s, size_t b, size_t head) { return s->at + b * s->row + head * s->head; }

/* Groups of STATE_ROWS rows, `begin` to `end` of all heads' of all rows. */
TARGET static void NAME(recur_block)(const struct weft_recurrence *r, size_t begin, size_t end) {
    const size_t groups = r->height / STATE_ROWS, size = r->height * r->width, heads = r->heads;
    for (size_t group = begin; group < end; group++) {
        const size_t which = group / groups, row = group % groups * STATE_ROWS, b = which / heads, head = which % heads;
        const size_t shared = head / r->groups, after = r->keeps ? heads * size : 0;
        struct NAME(passage) p = {
            .from = r->first + which * size + row * r->width,
            .value = NAME(series)(&r->value, b, head) + row,
            .key = NAME(series)(&r->key, b, shared),
            .query = NAME(series)(&r->query, b, shared),
            .gate = NAME(series)(&r->gate, b, head),
            .beta = r->beta.at == NULL ? NULL : NAME(series)(&r->beta, b, head),
            .to = r->states + ((r->keeps ? b * r->tokens * heads : b * heads) + head) * size + row * r->width,
            .output = r->output + (b * r->output_tokens * heads + head) * r->height + row,
        };
        for (size_t token = 0; token < r->tokens; token++) {
            if (p.beta != NULL)
                NAME(recur_token)(&p, r->width, 1, r->is_gate_wide);
            else
                NAME(recur_token)(&p, r->width, 0, r->is_gate_wide);
            p.from = p.to;
            p.to += after;
            p.value += r->value.token, p.key += r->key.token, p.query += r->query.token, p.gate += r->gate.token;
            if (p.beta != NULL) p.beta += r->beta.token;
            p.output += heads * r->height;
        }
    }
}

/* Rows `begin` to `end` of c. With `tokens` they are those of a prompt's last tokens, each of which sees up to itself. */
TARGET static void NAME(softmax_block)(float *c, size_t n, size_t tokens, size_t begin, size_t end) {
    for (size_t m = begin; m < end; m++) {
        const size_t seen = tokens > 0 ? n - tokens + m % tokens + 1 : n;
        NAME(softmax_row)(c + m * n, seen);
        memset(c + m * n + seen, 0, (n - seen) * sizeof(float));
    }
}

TARGET static void NAME(softmax_one)(float *row, size_t count) { NAME(softmax_row)(row, count); }

#include "packed.h"
#include "few.h"
#include "scores.h"

#undef PARTS
#undef STRETCH
#undef AXPY_STRIP
#undef DOT_SUMS
#undef INLINE
#undef UNROLL
#undef DOT_AHEAD
#undef NAME
#undef TARGET
#undef WIDTH
#undef VECTOR
#undef LOAD
#undef LOAD_SOME
#undef LOAD_HALVES
#undef LOAD_SOME_HALVES
#undef STORE
#undef SPREAD
#undef FMA
#undef SUM4
#undef TRANSPOSE4
#undef LOAD_QUADS
#undef LOAD_QUADS_HALVES
#undef STORE_QUAD
#undef TILE_VECTORS
#undef DOT_HEIGHT
#undef DOT_HEIGHTS
#undef AXPY_HEIGHT
#undef DOT_ROWS
#undef DOT_COLUMNS
#undef AXPY_ROWS
#undef AXPY_VECTORS

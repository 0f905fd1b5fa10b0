/* Products of many rows: columns lie in the lanes, and the sixteen running sums of a number follow each other.
 *
 * Included by kernels.h. dot_tile keeps the sixteen running sums of a number in lanes and folds them at the end. With vectors of fewer lanes that takes
 * many registers and much shuffling; where 512 bits are multiplied twice a cycle, rows come too slowly for it: it reads 160 numbers for 384
 * multiplications, a tile here 52 for 192. So rows and weights are transposed first: pass by pass, one for
 * each remainder of k by sixteen, a tile of c adds up that running sum of all its numbers, as any matrix product adds. Passes come in the order
 * in which dot_tile folds (0 8 4 12 2 10 ...): the sums of a pass whose place ends in t ones, in binary, are added to t others that
 * wait. The additions behind one number are those of dot_tile in their order, and so are the bits.
 */
#define TILE_COLUMNS (TILE_VECTORS * WIDTH)
#define TILE_SIZE (TILE_ROWS * TILE_COLUMNS)
/* The pass of a remainder: its four bits from the other end. */
#define PASS_OF(r) (((r) & 1) << 3 | ((r) & 2) << 1 | ((r) & 4) >> 1 | ((r) & 8) >> 3)

/* One step of a tile: sixteen numbers of TILE_ROWS rows, each to its pass. */
INLINE void NAME(transpose_rows)(const float *const from[TILE_ROWS], float *to, size_t pass) {
    UNROLL for (int at = 0; at < LANES; at += WIDTH) {
        VECTOR quads[4];
        UNROLL for (int i = 0; i < 4; i++) quads[i] = LOAD(from[i] + at);
        TRANSPOSE4(quads);
        UNROLL for (int i = 0; i < 4; i++)
            UNROLL for (int part = 0; part < WIDTH / 4; part++) STORE_QUAD(to + PASS_OF(at + 4 * part + i) * pass, quads[i], part);
    }
}

/* Packs rows of a as [block][pass][tile][step][row of the tile], in blocks of BLOCK_ROWS; zeros are added to whole lanes. */
TARGET static void NAME(tile_rows)(const struct product *p, float *blocks, size_t width) {
    const size_t steps = width / LANES, pass = BLOCK_ROWS * steps + LANES;
    for (size_t m = 0; m < p->m; m += TILE_ROWS) {
        float *tile = blocks + m / BLOCK_ROWS * BLOCK_ROWS * tiled_row(width) + m % BLOCK_ROWS * steps;
        for (size_t step = 0; step < steps; step++) {
            const size_t begin = step * LANES, count = p->k - begin < LANES ? p->k - begin : LANES;
            float lines[TILE_ROWS][LANES];
            const float *from[TILE_ROWS];
            for (size_t i = 0; i < TILE_ROWS; i++) {
                const float *row = p->a + (m + i) * p->a_row + begin * p->a_column;
                from[i] = lines[i];
                if (m + i < p->m && p->a_column == 1 && count == LANES)
                    from[i] = row;
                else
                    for (size_t k = 0; k < LANES; k++) lines[i][k] = m + i < p->m && k < count ? row[k * p->a_column] : 0.0f;
            }
            NAME(transpose_rows)(from, tile + step * TILE_ROWS, pass);
        }
    }
}

/* One step of a vector of columns: sixteen numbers of each column's weights, each to its pass. */
INLINE void NAME(transpose_columns)(const void *b, size_t ldb, const int is_half, float *to, size_t pass) {
    UNROLL for (int at = 0; at < LANES; at += 4) {
        VECTOR quads[4];
        UNROLL for (int j = 0; j < 4; j++)
            quads[j] = is_half ? LOAD_QUADS_HALVES((const uint16_t *)b + j * ldb + at, 4 * ldb) : LOAD_QUADS((const float *)b + j * ldb + at, 4 * ldb);
        TRANSPOSE4(quads);
        UNROLL for (int i = 0; i < 4; i++) STORE(to + PASS_OF(at + i) * pass, quads[i]);
    }
}

/* Weights of `columns` columns, in whole vectors: passes, each with its steps. Zeros are added to whole lanes and vectors. */
INLINE void NAME(tile_columns)(const struct product *p, const int is_half, size_t n, size_t columns, float *group) {
    const size_t steps = (p->k + LANES - 1) / LANES, across = (columns + WIDTH - 1) / WIDTH * WIDTH, pass = steps * across + LANES;
    for (size_t step = 0; step < steps; step++)
        for (size_t column = 0; column < columns; column += WIDTH) {
            const size_t begin = step * LANES, at = (n + column) * p->ldb + begin;
            const uint16_t *halves = (const uint16_t *)(const void *)p->b + at;
            float *to = group + step * across + column;
            if (column + WIDTH <= columns && begin + LANES <= p->k) {
                NAME(transpose_columns)(is_half ? (const void *)halves : p->b + at, p->ldb, is_half, to, pass);
                continue;
            }
            float lines[WIDTH * LANES] = {0};
            for (size_t j = 0; j < WIDTH && column + j < columns; j++)
                for (size_t k = 0; k < LANES && begin + k < p->k; k++) {
                    const uint32_t wide = is_half ? (uint32_t)halves[j * p->ldb + k] << 16 : 0;
                    memcpy(lines + j * LANES + k, is_half ? (const void *)&wide : p->b + at + j * p->ldb + k, sizeof(float));
                }
            NAME(transpose_columns)(lines, LANES, 0, to, pass);
        }
}

TARGET static void NAME(tile_group)(const struct product *p, size_t n, size_t columns, float *group) {
    if (p->is_half)
        NAME(tile_columns)(p, 1, n, columns, group);
    else
        NAME(tile_columns)(p, 0, n, columns, group);
}

INLINE void NAME(tile_step)(const int rows, const int vectors, VECTOR sums[TILE_ROWS][TILE_VECTORS], const float *a, const float *b) {
    VECTOR weights[TILE_VECTORS];
    UNROLL for (int j = 0; j < vectors; j++) weights[j] = LOAD(b + j * WIDTH);
    UNROLL for (int i = 0; i < rows; i++) {
        const VECTOR value = SPREAD(a[i]);
        UNROLL for (int j = 0; j < vectors; j++) sums[i][j] = FMA(value, weights[j], sums[i][j]);
    }
}

/* Some steps of one pass of `tiles` tiles that lie below each other; `apart`: numbers of a between the steps of one tile and those of the next. `kept`: of each
 * tile the sums that wait, of which `adds` are added to those found, and behind them those of this pass if it `is_begun`. Sums go to `to`; to_tile and to_row:
 * how far apart its tiles and rows are. */
INLINE void NAME(run_tiles)(const int rows, const int vectors, const float *a, const float *b, size_t steps, size_t tiles, size_t apart, const float *kept,
                            int adds, int is_begun, float *to, size_t to_tile, size_t to_row) {
    const size_t across = (size_t)vectors * WIDTH;
    for (size_t tile = 0; tile < tiles; tile++, a += apart, kept += (PASS_SUMS + 1) * TILE_SIZE, to += to_tile) {
        const float *weights = b, *const most = a + steps / 4 * 4 * TILE_ROWS, *const end = a + steps * TILE_ROWS;
        VECTOR sums[TILE_ROWS][TILE_VECTORS];
        UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < vectors; j++)
            sums[i][j] = is_begun ? LOAD(kept + PASS_SUMS * TILE_SIZE + i * TILE_COLUMNS + j * WIDTH) : SPREAD(0.0f);
        for (; a < most; a += 4 * TILE_ROWS, weights += 4 * across)
            UNROLL for (int step = 0; step < 4; step++) NAME(tile_step)(rows, vectors, sums, a + step * TILE_ROWS, weights + step * across);
        for (; a < end; a += TILE_ROWS, weights += across) NAME(tile_step)(rows, vectors, sums, a, weights);
        for (int add = 0; add < adds; add++)
            UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < vectors; j++) {
                const VECTOR waiting = LOAD(kept + add * TILE_SIZE + i * TILE_COLUMNS + j * WIDTH);
                sums[i][j] = (VECTOR)((NAME(floats))waiting + (NAME(floats))sums[i][j]);
            }
        UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < vectors; j++) STORE(to + i * to_row + j * WIDTH, sums[i][j]);
    }
}

#define TILE_ARGUMENTS \
    const float *a, const float *b, size_t steps, size_t tiles, size_t apart, const float *kept, int adds, int is_begun, float *to, size_t to_tile, size_t to_row
#define TILE_HEIGHT(rows)                                                                                        \
    static TARGET __attribute__((noinline)) void NAME(wide_tiles_##rows)(TILE_ARGUMENTS) {                       \
        NAME(run_tiles)(rows, TILE_VECTORS, a, b, steps, tiles, apart, kept, adds, is_begun, to, to_tile, to_row); \
    }                                                                                                            \
    static TARGET __attribute__((noinline)) void NAME(narrow_tiles_##rows)(TILE_ARGUMENTS) {                     \
        NAME(run_tiles)(rows, 1, a, b, steps, tiles, apart, kept, adds, is_begun, to, to_tile, to_row);          \
    }
TILE_HEIGHT(1) TILE_HEIGHT(2) TILE_HEIGHT(3) TILE_HEIGHT(4)

/* All rows by the columns of a group: TILE_COLUMNS, or up to WIDTH. `ahead`: `bytes` of weights to ask for meanwhile. */
static TARGET void NAME(dot_group)(const struct product *p, size_t n, size_t columns, const float *group, const char *ahead, size_t bytes) {
    static void (*const heights[2][TILE_ROWS + 1])(TILE_ARGUMENTS) = {
        {NULL, NAME(narrow_tiles_1), NAME(narrow_tiles_2), NAME(narrow_tiles_3), NAME(narrow_tiles_4)},
        {NULL, NAME(wide_tiles_1), NAME(wide_tiles_2), NAME(wide_tiles_3), NAME(wide_tiles_4)}};
    float kept[BLOCK_ROWS / TILE_ROWS][PASS_SUMS + 1][TILE_SIZE] __attribute__((aligned(64))), found[BLOCK_ROWS * TILE_COLUMNS] __attribute__((aligned(64)));
    const size_t steps = (p->k + LANES - 1) / LANES, across = columns < TILE_COLUMNS ? WIDTH : TILE_COLUMNS;
    const size_t fetches = (bytes / 64 + LANES - 1) / (LANES * ((p->m + BLOCK_ROWS - 1) / BLOCK_ROWS));
    const int is_direct = p->alpha == 1.0f && p->beta == 0.0f && columns == across;
    for (size_t block = 0; block < p->m; block += BLOCK_ROWS) {
        const size_t rows = p->m - block < BLOCK_ROWS ? p->m - block : BLOCK_ROWS, whole = rows / TILE_ROWS, rest = rows % TILE_ROWS;
        const float *a = p->a + block * p->a_row, *b = group;
        float *c = is_direct ? p->c + block * p->ldc + n : found;
        const size_t c_row = is_direct ? p->ldc : TILE_COLUMNS;
        for (int pass = 0; pass < LANES; pass++, a += BLOCK_ROWS * steps + LANES, b += steps * across + LANES) {
            for (size_t line = 0; line < fetches; line++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
            for (size_t m = 0; pass == LANES - 2 && m < rows; m++) {
                __builtin_prefetch(c + m * c_row, 1, 3);
                __builtin_prefetch(c + m * c_row + across - 1, 1, 3);
            }
            for (size_t begin = 0; begin < steps; begin += PASS_STEPS) {
                const size_t left = steps - begin, count = left < PASS_STEPS ? left : PASS_STEPS, apart = (steps - count) * TILE_ROWS;
                const int is_over = count == left, is_last = is_over && pass == LANES - 1, adds = is_over ? __builtin_ctz(~(unsigned)pass) : 0;
                const size_t to_row = is_last ? c_row : TILE_COLUMNS, to_tile = is_last ? TILE_ROWS * c_row : (PASS_SUMS + 1) * TILE_SIZE;
                const float *first = a + begin * TILE_ROWS, *weights = b + begin * across;
                float *to = is_last ? c : kept[0][is_over ? adds : PASS_SUMS];
                heights[across == TILE_COLUMNS][TILE_ROWS](first, weights, count, whole, apart, kept[0][0], adds, begin > 0, to, to_tile, to_row);
                if (rest > 0)
                    heights[across == TILE_COLUMNS][rest](first + whole * steps * TILE_ROWS, weights, count, 1, apart, kept[whole][0], adds, begin > 0,
                                                          to + whole * to_tile, to_tile, to_row);
            }
        }
        for (size_t m = 0; !is_direct && m < rows; m++) settle(p, block + m, n, found + m * TILE_COLUMNS, (int)columns);
    }
}

/* Columns [begin, end) of c = a b^T where the rows of a are tiled. */
static void NAME(dot_tiled)(const struct product *p, size_t begin, size_t end) {
    const size_t bytes = p->ldb * (p->is_half ? sizeof(uint16_t) : sizeof(float));
    const size_t pass = (p->k + LANES - 1) / LANES * TILE_COLUMNS + LANES;
    float *group = scratch(GROUP_SCRATCH, LANES * pass * sizeof(float));
    for (size_t n = begin, columns; n < end; n += columns) {
        columns = end - n >= TILE_COLUMNS ? TILE_COLUMNS : end - n < WIDTH ? end - n : WIDTH;
        NAME(tile_group)(p, n, columns, group);
        NAME(dot_group)(p, n, columns, group, (const char *)p->b + (n + columns) * bytes, columns * bytes);
    }
}

#undef TILE_COLUMNS
#undef TILE_SIZE
#undef PASS_OF
#undef TILE_HEIGHT
#undef TILE_ARGUMENTS

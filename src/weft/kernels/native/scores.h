/* Attention of many queries at once, included by kernels.h once for each instruction set.
 *
 * A vector holds one number of as many queries, so nothing has to be folded across its lanes. `queries` is (k, many): number k of
 * all queries lie together; `scores` is (span, many): the scores of one key. `many` is a multiple of LANES, k too.
 *
 * What must hold: the bits are those of dot_tile and of softmax_row, which take the queries one by one: a score is sixteen running
 * sums (sum i takes k = i, i + 16, ...) folded 8, 4, 2, 1; the sum behind a softmax is sixteen running sums over the keys, folded alike.
 */
#define SCORE_TILE (SCORE_KEYS * SCORE_VECTORS)

INLINE VECTOR NAME(add)(VECTOR a, VECTOR b) { return (VECTOR)((NAME(floats))a + (NAME(floats))b); }

/* found = running sums `lane` and `lane` + 8 of a tile, added. */
INLINE void NAME(score_pair)(const int keys, const int vectors, const float *key, const float *queries, size_t k, size_t many, int lane,
                             VECTOR found[SCORE_TILE]) {
    VECTOR low[SCORE_TILE], high[SCORE_TILE];
    UNROLL for (int i = 0; i < keys * vectors; i++) low[i] = high[i] = SPREAD(0.0f);
    for (size_t at = (size_t)lane; at < k; at += LANES) {
        const float *first = queries + at * many, *second = first + LANES / 2 * many;
        UNROLL for (int i = 0; i < keys; i++) {
            const VECTOR one = SPREAD(key[(size_t)i * k + at]), other = SPREAD(key[(size_t)i * k + at + LANES / 2]);
            UNROLL for (int j = 0; j < vectors; j++) {
                low[i * vectors + j] = FMA(one, LOAD(first + j * WIDTH), low[i * vectors + j]);
                high[i * vectors + j] = FMA(other, LOAD(second + j * WIDTH), high[i * vectors + j]);
            }
        }
    }
    UNROLL for (int i = 0; i < keys * vectors; i++) found[i] = NAME(add)(low[i], high[i]);
}

/* Scores of a few queries (`vectors` of them) for a few keys. The pairs come in the order in which the folding wants them, so at
 * most three of its sums wait: for the other half of 4, of 2 and of 1. */
INLINE void NAME(score_tile)(const int keys, const int vectors, const float *key, const float *queries, size_t k, size_t many,
                             float *scores) {
    VECTOR waiting[3][SCORE_TILE], found[SCORE_TILE];
    const int count = keys * vectors, lanes[8] = {0, 4, 2, 6, 1, 5, 3, 7};
    UNROLL for (int pair = 0; pair < 8; pair++) {
        NAME(score_pair)(keys, vectors, key, queries, k, many, lanes[pair], found);
        UNROLL for (int i = 0; i < count; i++) {
            if (pair % 2 == 1) found[i] = NAME(add)(waiting[0][i], found[i]);
            if (pair % 4 == 3) found[i] = NAME(add)(waiting[1][i], found[i]);
            if (pair % 8 == 7) found[i] = NAME(add)(waiting[2][i], found[i]);
            if (pair % 2 == 0) waiting[0][i] = found[i];
            if (pair % 4 == 1) waiting[1][i] = found[i];
            if (pair % 8 == 3) waiting[2][i] = found[i];
        }
    }
    UNROLL for (int i = 0; i < keys; i++)
        UNROLL for (int j = 0; j < vectors; j++) STORE(scores + (size_t)i * many + j * WIDTH, found[i * vectors + j]);
}

static TARGET __attribute__((noinline)) void NAME(score_some)(const float *key, const float *queries, size_t k, size_t many, float *scores) {
    NAME(score_tile)(SCORE_KEYS, SCORE_VECTORS, key, queries, k, many, scores);
}

static TARGET __attribute__((noinline)) void NAME(score_one)(const float *key, const float *queries, size_t k, size_t many, float *scores) {
    NAME(score_tile)(1, 1, key, queries, k, many, scores);
}

/* Scores of all queries for keys [0, span), which lie one after the other. */
TARGET static void NAME(score_keys)(const float *keys, const float *queries, size_t k, size_t many, size_t span, float *scores) {
    size_t key = 0;
    for (; key + SCORE_KEYS <= span; key += SCORE_KEYS) {
        size_t query = 0;
        for (; query + SCORE_VECTORS * WIDTH <= many; query += SCORE_VECTORS * WIDTH)
            NAME(score_some)(keys + key * k, queries + query, k, many, scores + key * many + query);
        for (; query < many; query += WIDTH)
            for (size_t one = key; one < key + SCORE_KEYS; one++)
                NAME(score_one)(keys + one * k, queries + query, k, many, scores + one * many + query);
    }
    for (; key < span; key++)
        for (size_t query = 0; query < many; query += WIDTH)
            NAME(score_one)(keys + key * k, queries + query, k, many, scores + key * many + query);
}

/* Columns of scores become weights that sum to one; query q sees its first seen[q] keys, and weighs the others with zero. */
INLINE void NAME(soften_vector)(float *scores, size_t many, size_t span, const float *seen) {
    const VECTOR limit = LOAD(seen);
    NAME(floats) high = (NAME(floats))LOAD(scores), sums[LANES];
    for (size_t key = 0; key < span; key++) {
        const NAME(floats) found = (NAME(floats))LOAD(scores + key * many);
        const NAME(bits) is_higher = (found > high) & ((NAME(floats))SPREAD((float)key) < (NAME(floats))limit);
        high = (NAME(floats))(((NAME(bits))found & is_higher) | ((NAME(bits))high & ~is_higher));
    }
    for (int lane = 0; lane < LANES; lane++) sums[lane] = (NAME(floats))SPREAD(0.0f);
    for (size_t key = 0; key < span; key++) {
        float *place = scores + key * many;
        const NAME(bits) is_seen = (NAME(floats))SPREAD((float)key) < (NAME(floats))limit;
        const VECTOR weight = NAME(exponential)((VECTOR)((NAME(floats))LOAD(place) - high));
        const VECTOR kept = (VECTOR)((NAME(bits))weight & is_seen);
        sums[key % LANES] += (NAME(floats))kept;
        STORE(place, kept);
    }
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
    const NAME(floats) share = (NAME(floats))SPREAD(1.0f) / sums[0];
    for (size_t key = 0; key < span; key++) {
        const VECTOR weight = (VECTOR)((NAME(floats))LOAD(scores + key * many) * share);
        STORE(scores + key * many, weight);
    }
}

TARGET static void NAME(soften)(float *scores, size_t many, size_t span, const float *seen) {
    for (size_t query = 0; query < many; query += WIDTH) NAME(soften_vector)(scores + query, many, span, seen + query);
}

#undef SCORE_TILE
#undef SCORE_KEYS
#undef SCORE_VECTORS

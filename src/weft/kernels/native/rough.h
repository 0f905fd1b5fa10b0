/* Products for guesses: codes of four bits times rows of eight, in whole numbers. Included by sgemm.c behind blocks.h.
 *
 * A draft token is verified, so its product may be rough: rows are rounded to eight bits in groups as the weights are, and one instruction
 * multiplies 64 numbers where the exact product has sixteen. No answer is ever made of these numbers.
 */
enum {
    ROUGH_GROUP = 64,                /* numbers with a scale: of weights, and of rows; two groups fill a vector */
    ROUGH_PAIR = 2 * ROUGH_GROUP,
    ROUGH_ROWS = 4,                  /* of a tile: more are computed in several */
    ROUGH_COLUMNS = 4
};

/* A row in eight bits: of each pair of groups the numbers at even places, then those at odd ones, as codes of four bits unpack; a scale for
 * each of the sixteen sums that a pair has; and the sums of groups, which biases are multiplied by, in whole vectors. */
struct rough_row {
    int8_t *codes;
    float *scales, *sums;
};

struct rough {
    const struct weft_linear *linear;
    struct rough_row rows[ROUGH_ROWS];
    size_t first, count;
};

#if defined(__x86_64__)
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,fma")))

/* A group of a row in eight bits. */
VNNI static void round_group(const float *x, size_t group, const struct rough_row *to) {
    __m512 own[4], most = _mm512_setzero_ps();
    __m512i total = _mm512_setzero_si512();
    for (int i = 0; i < 4; i++) {
        own[i] = _mm512_loadu_ps(x + i * LANES);
        most = _mm512_max_ps(most, _mm512_abs_ps(own[i]));
    }
    const float largest = _mm512_reduce_max_ps(most);
    const __m512 by = _mm512_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
    int8_t *codes = to->codes + group / 2 * ROUGH_PAIR + group % 2 * (ROUGH_GROUP / 2);
    const __m512i apart = _mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0); /* even places, then odd ones */
    for (int i = 0; i < 4; i++) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(own[i], by));
        const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_permutexvar_epi32(apart, whole));
        total = _mm512_add_epi32(total, whole);
        _mm_storel_epi64((__m128i *)(codes + i * 8), bytes);
        _mm_storel_epi64((__m128i *)(codes + ROUGH_GROUP + i * 8), _mm_unpackhi_epi64(bytes, bytes));
    }
    _mm256_storeu_ps(to->scales + group * (LANES / 2), _mm256_set1_ps(largest / 127.0f));
    to->sums[group] = (float)_mm512_reduce_add_epi32(total) * (largest / 127.0f); /* of what is multiplied: biases take away most of it */
}

/* Numbers of `columns` neighbouring columns and `rows` rows; the first of each column is at n. */
VNNI static inline __attribute__((always_inline)) void rough_tile(const int rows, const int columns, const struct rough *r, size_t n) {
    const struct weft_linear *l = r->linear;
    const struct weft_weights *w = l->weights;
    const size_t groups = w->k / ROUGH_GROUP;
    const uint8_t *codes = (const uint8_t *)w->codes + n * w->k / 2;
    const float *scales = (const float *)w->scales + n * groups, *biases = (const float *)w->biases + n * groups;
    const __m512i low = _mm512_set1_epi8(15), halves = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    __m512 sums[ROUGH_ROWS * ROUGH_COLUMNS];
    _Pragma("GCC unroll 16") for (int i = 0; i < rows * columns; i++) sums[i] = _mm512_setzero_ps();
    for (size_t group = 0; group < groups; group += 2) {
        const __mmask64 here = group + 1 < groups ? ~(__mmask64)0 : 0xFFFFFFFFu;
        const __mmask16 known = group + 1 < groups ? 3 : 1;
        _Pragma("GCC unroll 4") for (int j = 0; j < columns; j++) {
            const __m512i packed = _mm512_maskz_loadu_epi8(here, codes + j * (w->k / 2) + group * (ROUGH_GROUP / 2));
            const __m512i even = _mm512_and_si512(packed, low), odd = _mm512_and_si512(_mm512_srli_epi16(packed, 4), low);
            const __m512 scale = _mm512_permutexvar_ps(halves, _mm512_maskz_loadu_ps(known, scales + j * groups + group));
            _Pragma("GCC unroll 4") for (int row = 0; row < rows; row++) {
                const int8_t *own = r->rows[row].codes + group * ROUGH_GROUP;
                const __m512i evens = _mm512_dpbusd_epi32(_mm512_setzero_si512(), even, _mm512_loadu_si512(own));
                const __m512i dots = _mm512_dpbusd_epi32(evens, odd, _mm512_loadu_si512(own + ROUGH_GROUP));
                const __m512 factor = _mm512_mul_ps(scale, _mm512_loadu_ps(r->rows[row].scales + group * (LANES / 2)));
                sums[row * columns + j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), factor, sums[row * columns + j]);
            }
        }
    }
    for (size_t group = 0; group < groups; group += LANES) {
        const __mmask16 here = groups - group >= LANES ? 0xFFFF : (__mmask16)((1u << (groups - group)) - 1);
        for (int j = 0; j < columns; j++) {
            const __m512 shift = _mm512_maskz_loadu_ps(here, biases + j * groups + group);
            for (int row = 0; row < rows; row++)
                sums[row * columns + j] = _mm512_fmadd_ps(shift, _mm512_loadu_ps(r->rows[row].sums + group), sums[row * columns + j]);
        }
    }
    for (int row = 0; row < rows; row++) {
        float totals[ROUGH_COLUMNS], *c = l->c + (r->first + row) * l->ldc + n;
        if (columns == 4)
            avx512_sum4(totals, sums + row * columns);
        else
            totals[0] = _mm512_reduce_add_ps(sums[row]);
        for (int j = 0; j < columns; j++) {
            const float bias = l->bias == NULL ? 0.0f : l->bias[n + j];
            c[j] = totals[j] + bias + (l->residual == NULL ? 0.0f : l->residual[(r->first + row) * w->n + n + j]);
        }
    }
}

#define ROUGH_HEIGHT(rows)                                                                                          \
    VNNI static __attribute__((noinline)) void rough_##rows(const struct rough *r, size_t n, size_t end) {           \
        for (; n + ROUGH_COLUMNS <= end; n += ROUGH_COLUMNS) rough_tile(rows, ROUGH_COLUMNS, r, n);                  \
        for (; n < end; n++) rough_tile(rows, 1, r, n);                                                              \
    }
ROUGH_HEIGHT(1) ROUGH_HEIGHT(2) ROUGH_HEIGHT(3) ROUGH_HEIGHT(4)
#undef ROUGH_HEIGHT

static void rough_columns(const void *subject, size_t begin, size_t end) {
    static void (*const heights[])(const struct rough *, size_t, size_t) = {NULL, rough_1, rough_2, rough_3, rough_4};
    const struct rough *r = subject;
    heights[r->count](r, begin, end);
}

/* Whether a product with these weights may be computed so. */
static int is_rough(const struct weft_weights *w) {
    const int is_packed = w->kind == WEFT_AFFINE && w->bits == 4 && w->group == ROUGH_GROUP && w->scale_kind == WEFT_F32;
    return is_packed && strncmp(bound.kernels->name, "avx512", 6) == 0 && __builtin_cpu_supports("avx512vnni");
}
#else
static void round_group(const float *x, size_t group, const struct rough_row *to) {}
static void rough_columns(const void *subject, size_t begin, size_t end) {}
static int is_rough(const struct weft_weights *w) { return 0; }
#endif

EXPORT void weft_rough(const struct weft_linear *l) {
    if (!is_rough(l->weights)) {
        weft_linear(l);
        return;
    }
    const size_t groups = l->weights->k / ROUGH_GROUP, pairs = (groups + 1) / 2, lanes = whole_lanes(groups);
    const size_t bytes = pairs * ROUGH_PAIR + (pairs * LANES + lanes) * sizeof(float);
    int8_t *memory = scratch(ROUGH_SCRATCH, ROUGH_ROWS * bytes);
    memset(memory, 0, ROUGH_ROWS * bytes);
    struct rough r = {.linear = l};
    for (size_t row = 0; row < ROUGH_ROWS; row++) {
        float *scales = (float *)(void *)(memory + row * bytes + pairs * ROUGH_PAIR);
        r.rows[row] = (struct rough_row){memory + row * bytes, scales, scales + pairs * LANES};
    }
    for (; r.first < l->m; r.first += r.count) {
        r.count = l->m - r.first < ROUGH_ROWS ? l->m - r.first : ROUGH_ROWS;
        for (size_t row = 0; row < r.count; row++)
            for (size_t group = 0; group < groups; group++) round_group(l->a + (r.first + row) * l->lda + group * ROUGH_GROUP, group, &r.rows[row]);
        share_sized(rough_columns, &r, l->weights->n, 16, l->weights->n * l->weights->k / 4);
    }
}

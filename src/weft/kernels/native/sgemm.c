/* cblas_sgemm, cblas_dgemm and cblas_cgemm for MLX's CPU build: our own float32 product, OpenBLAS for the rest.
 *
 * Bound into the process by weft/kernels/blas.py before MLX is loaded; knows nothing of MLX or Python. float32 is computed here
 * because OpenBLAS packs the weights anew for every call, which costs a small batch twice its time, and because here a
 * row's bits depend on that row and the weights alone, not on how many rows there are. What is not ours is forwarded to
 * a CBLAS opened at run time.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pool.h"
#include "weft.h"

#define EXPORT __attribute__((visibility("default")))
enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };
enum { LANES = WEFT_LANES, STATE_ROWS = WEFT_STATE_ROWS };
enum { /* of tiles whose packed weights are expanded in registers (few.h): */
    FEW_ROWS = 12,   /* most rows, */
    FEW_LOADED = 8,  /* and up to how many of them there are registers for; */
    FEW_COLUMNS = 8, /* most columns, */
    FEW_SUMS = 24,   /* and sums; */
    FEW_BLOCK = 48,  /* columns that share what the nearest cache has of the rows; */
    FEW_AHEAD = 24   /* how many columns ahead codes are asked for */
};

enum {
    SHARED_WORK = 1 << 16,   /* about 6 microseconds alone: from here on a watching thread is worth a word, */
    WAKING_WORK = 1 << 17,   /* and from here on a sleeping one, for which the system is asked to wake it */
    PANEL_FLOATS = 1 << 17,  /* rows of a that stay in the second cache level while the weights pass by */
    TILED_PANEL_FLOATS = 1 << 20, /* the same of tiled rows, which are read in one sweep: the third level will do */
    LONG_ROW = 1 << 10,      /* tiles of longer rows do not fit into the nearest cache */
    MIN_PANEL_ROWS = 48,     /* fewer, and the weights come from memory too often */
    SHORT_SUM = 256,         /* below, the folding of the lanes costs more than OpenBLAS's packing of many rows */
    SHORT_SUM_ROWS = 48,
    COPY_ROWS = 64,          /* from here on a strip of b is worth a copy */
    FAR_BYTES = 6 << 10      /* weights are asked for this long before they are used: one row, bfloat16, 16 instead of 23 microseconds */
};

/* c (m, n) = alpha * a (m, k) * b + beta * c, where b is (n, k) for the dot kernels and (k, n) for the axpy kernels. For the dot
 * kernels b may be in halves: the upper sixteen bits of each number, whose others are zero (bfloat16). */
struct product {
    size_t m, n, k;
    float alpha, beta;
    const float *a, *b;
    float *c;
    size_t a_row, a_column, ldb, ldc; /* the dot kernels want a_column = 1 and rows padded with zeros to whole lanes */
    int is_half, is_tiled; /* is_tiled: the rows of a lie as tile_rows of kernels.h leaves them */
};

static __attribute__((noinline)) void settle_scaled(const struct product *p, float *c, const float *totals, int count) {
    if (p->beta == 0.0f) /* then c may hold anything, also NaN */
        for (int i = 0; i < count; i++) c[i] = p->alpha * totals[i];
    else
        for (int i = 0; i < count; i++) c[i] = p->alpha * totals[i] + p->beta * c[i];
}

static inline __attribute__((always_inline)) void settle(const struct product *p, size_t m, size_t n,
                                                         const float *totals, int count) {
    float *c = p->c + m * p->ldc + n;
    if (p->alpha == 1.0f && p->beta == 0.0f)
        memcpy(c, totals, (size_t)count * sizeof(float));
    else
        settle_scaled(p, c, totals, count);
}

/* Where rows are tiled (tiled.h): rows of a tile, rows that share a piece of the weights while it is in the nearest cache, steps of such a piece, and
 * sums that wait for others. */
enum { TILE_ROWS = 4, BLOCK_ROWS = 16, PASS_STEPS = 128, PASS_SUMS = 4 };

/* Numbers from one tiled row to the next, `width` being whole lanes: a cache line more, or passes would push each other out of the cache. */
static size_t tiled_row(size_t width) { return width + LANES; }

/* Numbers that the nearest cache holds. */
static size_t near_floats = 8192;

/* How many groups of a few rows are added up at a time: all, or nearly equal parts that stay in the nearest cache; `size`: the rows' numbers in a group. */
static size_t few_step(size_t groups, size_t size) {
    const size_t near = near_floats / size, parts = near == 0 ? groups : (groups + near - 1) / near;
    return (groups + parts - 1) / parts;
}

/* Memory of a thread that is kept from call to call; each use inside one call has its own. */
enum scratch_use { ROWS_SCRATCH, GROUP_SCRATCH, WOVEN_SCRATCH, WEIGHTS_SCRATCH, UP_SCRATCH, BLOCK_SCRATCH, UP_BLOCK_SCRATCH, QUERY_SCRATCH, SCORE_SCRATCH, OUTPUT_SCRATCH, ITEM_SCRATCH, LAYER_SCRATCH, ROUGH_SCRATCH,
                   NUM_SCRATCHES };

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

/* ---- the instruction sets: all add in the same order, and those with a fused multiply-add agree bit for bit */

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,fma")))
#define AVX2 __attribute__((target("avx2,fma")))

/* Four sums of sixteen lanes at once: halves, quarters, pairs, single lanes. */
AVX512 static inline __attribute__((always_inline)) void avx512_sum4(float *totals, const __m512 *v) {
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x44), _mm512_shuffle_f32x4(v[0], v[1], 0xEE));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x44), _mm512_shuffle_f32x4(v[2], v[3], 0xEE));
    __m512 sums = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    sums = _mm512_add_ps(sums, _mm512_shuffle_ps(sums, sums, 0x4E));
    sums = _mm512_add_ps(sums, _mm512_shuffle_ps(sums, sums, 0xB1));
    const __m512i firsts = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
    _mm_storeu_ps(totals, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, sums)));
}

AVX512 static inline __attribute__((always_inline)) __m512 avx512_load_some(const float *from, int count) {
    return _mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
}

AVX512 static inline __attribute__((always_inline)) __m512 avx512_widen(__m256i halves) {
    /* Each half to the upper sixteen bits of its number, in one instruction instead of two. */
    const __m512i places = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAAu, places, _mm512_castsi256_si512(halves)));
}

/* In each quarter four vectors of four, transposed. */
AVX512 static inline __attribute__((always_inline)) void avx512_transpose4(__m512 four[4]) {
    const __m512 a = _mm512_unpacklo_ps(four[0], four[1]), b = _mm512_unpackhi_ps(four[0], four[1]);
    const __m512 c = _mm512_unpacklo_ps(four[2], four[3]), d = _mm512_unpackhi_ps(four[2], four[3]);
    four[0] = _mm512_shuffle_ps(a, c, 0x44), four[1] = _mm512_shuffle_ps(a, c, 0xEE);
    four[2] = _mm512_shuffle_ps(b, d, 0x44), four[3] = _mm512_shuffle_ps(b, d, 0xEE);
}

/* Four numbers of each of four columns. */
AVX512 static inline __attribute__((always_inline)) __m512 avx512_load_quads(const float *from, size_t apart) {
    const __m512 one = _mm512_castps128_ps512(_mm_loadu_ps(from)), two = _mm512_insertf32x4(one, _mm_loadu_ps(from + apart), 1);
    return _mm512_insertf32x4(_mm512_insertf32x4(two, _mm_loadu_ps(from + 2 * apart), 2), _mm_loadu_ps(from + 3 * apart), 3);
}

AVX512 static inline __attribute__((always_inline)) __m512 avx512_load_quads_halves(const uint16_t *from, size_t apart) {
    uint64_t quads[4];
    for (int i = 0; i < 4; i++) memcpy(&quads[i], from + i * apart, sizeof *quads);
    return avx512_widen(_mm256_loadu_si256((const __m256i *)quads));
}

#define NAME(x) avx512_##x
#define TARGET AVX512
#define WIDTH 16
#define VECTOR __m512
#define LOAD(p) _mm512_loadu_ps(p)
#define LOAD_SOME(p, count) avx512_load_some(p, count)
#define LOAD_HALVES(p) avx512_widen(_mm256_loadu_si256((const __m256i *)(p)))
#define LOAD_SOME_HALVES(p, count) avx512_widen(_mm256_maskz_loadu_epi16((__mmask16)((1u << (count)) - 1), p))
#define STORE(p, v) _mm512_storeu_ps(p, v)
#define SPREAD(x) _mm512_set1_ps(x)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define SUM4(totals, parts, i) avx512_sum4(totals, parts[0] + (i))
#define TRANSPOSE4(four) avx512_transpose4(four)
#define LOAD_QUADS(p, apart) avx512_load_quads(p, apart)
#define LOAD_QUADS_HALVES(p, apart) avx512_load_quads_halves(p, apart)
#define STORE_QUAD(p, v, part) _mm_storeu_ps(p, (part) == 0 ? _mm512_castps512_ps128(v) : _mm512_extractf32x4_ps(v, part))
#define TILE_VECTORS 3
#define DOT_ROWS 4
#define DOT_COLUMNS 6
#define AXPY_ROWS 6
#define AXPY_VECTORS 4
#define SCORE_KEYS 4
#define SCORE_VECTORS 2
#include "kernels.h"

AVX2 static inline __attribute__((always_inline)) void avx2_sum4(float *totals, const __m256 *low,
                                                                   const __m256 *high) {
    __m256 a8 = _mm256_add_ps(low[0], high[0]), b8 = _mm256_add_ps(low[1], high[1]);
    __m256 c8 = _mm256_add_ps(low[2], high[2]), d8 = _mm256_add_ps(low[3], high[3]);
    __m256 ab = _mm256_add_ps(_mm256_blend_ps(a8, b8, 0xF0), _mm256_permute2f128_ps(a8, b8, 0x21));
    __m256 cd = _mm256_add_ps(_mm256_blend_ps(c8, d8, 0xF0), _mm256_permute2f128_ps(c8, d8, 0x21));
    __m256 sums = _mm256_add_ps(_mm256_blend_ps(ab, cd, 0xCC), _mm256_shuffle_ps(ab, cd, 0x4E));
    sums = _mm256_add_ps(sums, _mm256_shuffle_ps(sums, sums, 0xB1)); /* a a c c | b b d d */
    _mm_storeu_ps(totals, _mm_blend_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1), 0xA));
}

/* In each half four vectors of four, transposed. */
AVX2 static inline __attribute__((always_inline)) void avx2_transpose4(__m256 four[4]) {
    const __m256 a = _mm256_unpacklo_ps(four[0], four[1]), b = _mm256_unpackhi_ps(four[0], four[1]);
    const __m256 c = _mm256_unpacklo_ps(four[2], four[3]), d = _mm256_unpackhi_ps(four[2], four[3]);
    four[0] = _mm256_shuffle_ps(a, c, 0x44), four[1] = _mm256_shuffle_ps(a, c, 0xEE);
    four[2] = _mm256_shuffle_ps(b, d, 0x44), four[3] = _mm256_shuffle_ps(b, d, 0xEE);
}

AVX2 static inline __attribute__((always_inline)) __m256 avx2_load_some(const float *from, int count) {
    const __m256i lanes = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    return _mm256_maskload_ps(from, _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes));
}

AVX2 static inline __attribute__((always_inline)) __m256 avx2_widen(__m128i halves) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

AVX2 static inline __attribute__((always_inline)) __m256 avx2_load_some_halves(const uint16_t *from, int count) {
    uint16_t halves[8] = {0};
    memcpy(halves, from, (size_t)(count < 8 ? count : 8) * sizeof *halves);
    return avx2_widen(_mm_loadu_si128((const __m128i *)halves));
}

#define NAME(x) avx2_##x
#define TARGET AVX2
#define WIDTH 8
#define VECTOR __m256
#define LOAD(p) _mm256_loadu_ps(p)
#define LOAD_SOME(p, count) avx2_load_some(p, count)
#define LOAD_HALVES(p) avx2_widen(_mm_loadu_si128((const __m128i *)(p)))
#define LOAD_SOME_HALVES(p, count) avx2_load_some_halves(p, count)
#define STORE(p, v) _mm256_storeu_ps(p, v)
#define SPREAD(x) _mm256_set1_ps(x)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define SUM4(totals, parts, i) avx2_sum4(totals, parts[0] + (i), parts[1] + (i))
#define TRANSPOSE4(four) avx2_transpose4(four)
#define LOAD_QUADS(p, apart) _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps((p) + (apart)), 1)
#define LOAD_QUADS_HALVES(p, apart) avx2_widen(_mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)(p)), _mm_loadl_epi64((const __m128i *)((p) + (apart)))))
#define STORE_QUAD(p, v, part) _mm_storeu_ps(p, (part) == 0 ? _mm256_castps256_ps128(v) : _mm256_extractf128_ps(v, 1))
#define TILE_VECTORS 3
#define DOT_ROWS 3
#define DOT_COLUMNS 4
#define AXPY_ROWS 3
#define AXPY_VECTORS 4
#define SCORE_KEYS 2
#define SCORE_VECTORS 2
#include "kernels.h"
#endif

typedef float four __attribute__((vector_size(16)));

static inline __attribute__((always_inline)) four plain_load_some(const float *from, int count) {
    four value = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int lane = 0; lane < 4 && lane < count; lane++) value[lane] = from[lane];
    return value;
}

static inline __attribute__((always_inline)) four plain_load(const float *from) {
    four value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline __attribute__((always_inline)) four plain_load_some_halves(const uint16_t *from, int count) {
    uint32_t wide[4] = {0, 0, 0, 0};
    four value;
    for (int lane = 0; lane < 4 && lane < count; lane++) wide[lane] = (uint32_t)from[lane] << 16;
    memcpy(&value, wide, sizeof value);
    return value;
}

static inline __attribute__((always_inline)) float plain_sum(four a, four b, four c, four d) {
    four sums = (a + c) + (b + d);
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/* Four vectors of four, transposed. */
static inline __attribute__((always_inline)) void plain_transpose4(four rows[4]) {
    const four a = rows[0], b = rows[1], c = rows[2], d = rows[3];
    for (int i = 0; i < 4; i++) rows[i] = (four){a[i], b[i], c[i], d[i]};
}

#define PLAIN_SUM(parts, i) plain_sum(parts[0][i], parts[1][i], parts[2][i], parts[3][i])
#define NAME(x) plain_##x
#define TARGET
#define WIDTH 4
#define VECTOR four
#define LOAD(p) plain_load(p)
#define LOAD_SOME(p, count) plain_load_some(p, count)
#define LOAD_HALVES(p) plain_load_some_halves(p, 4)
#define LOAD_SOME_HALVES(p, count) plain_load_some_halves(p, count)
#define STORE(p, v) memcpy(p, &(v), sizeof(four))
#define SPREAD(x) ((four){x, x, x, x})
#if defined(__aarch64__)
#include <arm_neon.h>
#define FMA(a, b, c) ((four)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#else
#define FMA(a, b, c) ((c) + (a) * (b)) /* never contracted: setup.py says -ffp-contract=off */
#endif
#define SUM4(totals, parts, i) \
    for (int each = 0; each < 4; each++) (totals)[each] = PLAIN_SUM(parts, (i) + each)
#define TRANSPOSE4(rows) plain_transpose4(rows)
#define LOAD_QUADS(p, apart) plain_load(p)
#define LOAD_QUADS_HALVES(p, apart) plain_load_some_halves(p, 4)
#define STORE_QUAD(p, v, part) memcpy(p, &(v), sizeof(four))
#if defined(__aarch64__)
#define DOT_ROWS 4
#define DOT_COLUMNS 6
#define TILE_VECTORS 6
#else
#define DOT_ROWS 3
#define DOT_COLUMNS 4
#define TILE_VECTORS 2
#endif
#define AXPY_ROWS 3
#define AXPY_VECTORS 4
#define SCORE_KEYS 2
#define SCORE_VECTORS 2
#include "kernels.h"

struct kernels {
    const char *name;
    size_t columns; /* of a tile of dot products */
    size_t shift;   /* numbers before the first row of a, so that rows and weights lie in different halves of a cache line */
    size_t tiled_rows, tiled_long_rows; /* the least number of rows that are tiled, and of those longer than LONG_ROW */
    void (*tile)(const struct product *, float *tiles, size_t width);
    void (*dot)(const struct product *, size_t begin, size_t end);
    void (*axpy)(const struct product *, size_t begin, size_t end);
    void (*softmax)(float *, size_t n, size_t tokens, size_t begin, size_t end);
    void (*softmax_one)(float *, size_t count);
    void (*score_keys)(const float *keys, const float *queries, size_t k, size_t many, size_t span, float *scores);
    void (*soften)(float *scores, size_t many, size_t span, const float *seen);
    void (*silu)(const float *, float *, size_t count);
    void (*gated)(const float *gates, const float *ups, float *, size_t count);
    void (*add)(const float *, float *, size_t count);
    void (*gate)(const float *gates, float *, size_t count);
    void (*norm)(const float *, const float *weight, float eps, float *, size_t n);
    void (*rotate)(const float *, const float *angles, float *, size_t half, int of_neighbours);
    void (*recur)(const struct weft_recurrence *, size_t begin, size_t end);
    void (*expand)(const struct weft_weights *, size_t row, float *);
    void (*few)(const struct product *, const struct weft_weights *, size_t begin, size_t end); /* NULL: there is none */
    void (*weave)(const float *, float *, size_t count);
    void (*convolve)(const float *const *taps, size_t num_taps, const float *weights, size_t channels, float *);
    float (*most)(const float *, size_t count, int *is_number);
    double (*weigh)(float *, size_t count, float most, float temperature, float min_p, float *sums);
    int32_t (*choose)(float *, size_t count, float most, float temperature, float min_p, float uniform, float *sums);
    size_t fast_rows; /* of dot products; with more, OpenBLAS is faster (EPYC of family 25, same instructions) */
};

#define KERNELS(name, set, columns, shift, tiled_rows, tiled_long_rows, tile, few, weave, fast_rows)                                                             \
    {name, columns, shift, tiled_rows, tiled_long_rows, tile, set##_dot_block, set##_axpy_block, set##_softmax_block, set##_softmax_one, set##_score_keys,      \
     set##_soften, set##_silu_block, set##_gated_block, set##_add_block, set##_gate_block, set##_norm_row, set##_rotate_row,    \
     set##_recur_block, set##_expand, few, weave, set##_convolve, set##_most, set##_weigh, set##_choose, fast_rows}

static const struct kernels all_kernels[] = {
#if defined(__x86_64__)
    KERNELS("avx512_tiled", avx512, 6, 0, 128, 96, avx512_tile_rows, avx512_few, avx512_weave, SIZE_MAX),
    KERNELS("avx512", avx512, 6, 0, 0, 0, NULL, avx512_few, avx512_weave, SIZE_MAX),
    KERNELS("avx2", avx2, 4, 8, 48, 48, avx2_tile_rows, NULL, NULL, 12),
#endif
#if defined(__aarch64__)
    KERNELS("plain", plain, 6, 0, 24, 12, plain_tile_rows, NULL, NULL, 8),
#else
    KERNELS("plain", plain, 4, 0, 0, 0, NULL, NULL, NULL, 8),
    KERNELS("plain_tiled", plain, 4, 0, 2, 1, plain_tile_rows, NULL, NULL, 8), /* what aarch64 runs, for tests elsewhere */
#endif
};
enum { NUM_KERNELS = sizeof all_kernels / sizeof *all_kernels };

static int can_run(const char *name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (strncmp(name, "avx512", 6) == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (strcmp(name, "avx2") == 0) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return strncmp(name, "plain", 5) == 0;
}

/* Whether these kernels are the faster ones of their instructions here. A Zen 4 multiplies 512 bits once a cycle, for which rows come fast enough from
 * the second cache level; twice a cycle is too fast, unless rows and weights are tiled. */
static int is_fastest(const char *name) {
#if defined(__x86_64__)
    return strcmp(name, "avx512_tiled") != 0 || !__builtin_cpu_is("amdfam19h");
#else
    return 1;
#endif
}

/* ---- what MLX calls */

typedef void sgemm_function(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *,
                            int);
typedef void dgemm_function(int, int, int, int, int, int, double, const double *, int, const double *, int, double,
                            double *, int);
typedef void cgemm_function(int, int, int, int, int, int, const void *, const void *, int, const void *, int,
                            const void *, void *, int);

/* Set by the weft_blas_ functions below before the first product. */
static struct {
    sgemm_function *sgemm;
    dgemm_function *dgemm;
    cgemm_function *cgemm;
    const struct kernels *kernels;
    int is_exact;
} bound = {.is_exact = 1};

/* Shares a product by columns or rows, `grain` at least to each, with as much company as its size is worth. */
static void share(work_function *work, const struct product *p, size_t total, size_t grain) {
    const size_t size = p->n * p->k * ((p->m + 7) / 8), pieces = 4 * (size_t)pool_threads();
    const size_t chunk = (total + pieces * grain - 1) / (pieces * grain) * grain;
    if (size < SHARED_WORK)
        work(p, 0, total);
    else
        pool_run(work, p, total, chunk, size >= WAKING_WORK);
}

static void dot_columns(const void *p, size_t begin, size_t end) { bound.kernels->dot(p, begin, end); }
static void axpy_columns(const void *p, size_t begin, size_t end) { bound.kernels->axpy(p, begin, end); }

static struct product rows_of(const struct product *whole, size_t begin, size_t end) {
    struct product part = *whole;
    part.m = end - begin;
    part.a += begin * part.a_row;
    part.c += begin * part.ldc;
    return part;
}

static void axpy_rows(const void *whole, size_t begin, size_t end) {
    struct product part = rows_of(whole, begin, end);
    bound.kernels->axpy(&part, 0, part.n);
}

/* Whether so many rows are tiled; transposing weights does not pay for few of them. */
static int are_tiled(size_t m, size_t k) {
    return bound.kernels->tile != NULL && m >= (k <= LONG_ROW ? bound.kernels->tiled_rows : bound.kernels->tiled_long_rows);
}

/* Numbers from one packed row to the next. */
static size_t packed_row(size_t width, int is_tiled) { return is_tiled ? tiled_row(width) : width; }

/* Numbers that so many packed rows take; blocks of tiles are whole ones. */
static size_t packed_floats(size_t m, size_t width, int is_tiled) {
    return (is_tiled ? (m + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS : m) * packed_row(width, is_tiled);
}

/* The rows of a as the dot kernels want them, each beginning on a cache line. */
static void pack(const struct product *p, float *packed, size_t width) {
    if (p->is_tiled) {
        bound.kernels->tile(p, packed, width);
        return;
    }
    for (size_t m = 0; m < p->m; m++, packed += width) {
        const float *row = p->a + m * p->a_row;
        if (p->a_column == 1)
            memcpy(packed, row, p->k * sizeof(float));
        else
            for (size_t k = 0; k < p->k; k++) packed[k] = row[k * p->a_column];
        memset(packed + p->k, 0, (width - p->k) * sizeof(float));
    }
}

/* The most rows of a panel: few enough to stay in cache while the weights pass by, and whole blocks of tiles. */
static size_t most_panel_rows(size_t width, int is_tiled) {
    const size_t fit = (is_tiled ? TILED_PANEL_FLOATS : PANEL_FLOATS) / width;
    return (fit < MIN_PANEL_ROWS ? MIN_PANEL_ROWS : fit) / BLOCK_ROWS * BLOCK_ROWS;
}

/* Memory for packed rows. */
static float *rows_scratch(size_t count) { return (float *)scratch(ROWS_SCRATCH, (count + LANES) * sizeof(float)) + bound.kernels->shift; }

static int dot_product(const struct product *p) {
    const size_t width = (p->k + LANES - 1) / LANES * LANES;
    const int is_tiled = are_tiled(p->m, p->k);
    const size_t most = most_panel_rows(width, is_tiled), rows = p->m < most ? p->m : most;
    float *packed = rows_scratch(packed_floats(rows, width, is_tiled));
    for (size_t m = 0; m < p->m; m += rows) {
        struct product panel = rows_of(p, m, p->m - m < rows ? p->m : m + rows);
        panel.is_tiled = is_tiled;
        pack(&panel, packed, width);
        panel.a = packed;
        panel.a_row = packed_row(width, is_tiled);
        panel.a_column = 1;
        share(dot_columns, &panel, panel.n, 24);
    }
    return 1;
}

static int axpy_product(const struct product *p) {
    if (p->n / 64 >= 2 * (size_t)pool_threads() || p->m < 12)
        share(axpy_columns, p, p->n, 64);
    else
        share(axpy_rows, p, p->m, 6); /* many rows and few columns, as in attention over a prompt */
    return 1;
}

static int is_faster_elsewhere(const struct product *p) {
    return p->m > bound.kernels->fast_rows || (p->k < SHORT_SUM && p->m > SHORT_SUM_ROWS);
}

/* Computes c = a b, or c = a b^T if b is transposed; 0 if that is left to the library behind. */
static int computed_here(struct product p, int is_b_transposed) {
    if (!bound.is_exact && is_b_transposed && is_faster_elsewhere(&p)) return 0;
    if (p.n == 1 && !is_b_transposed && p.ldb == 1) { /* a column is also a row */
        is_b_transposed = 1;
        p.ldb = p.k;
    }
    if (p.n == 1 && is_b_transposed && p.ldc == 1 && p.a_column == 1) { /* weights by a vector: seen from the other side */
        struct product swapped = {1, p.m, p.k, p.alpha, p.beta, p.b, p.a, p.c, p.k, 1, p.a_row, p.m};
        return dot_product(&swapped);
    }
    return is_b_transposed ? dot_product(&p) : axpy_product(&p);
}

static int is_plain(int order, int trans_a, int trans_b, int m, int n, int k) {
    return order == ROW_MAJOR && (trans_a == NO_TRANS || trans_a == TRANS) &&
           (trans_b == NO_TRANS || trans_b == TRANS) && m > 0 && n > 0 && k > 0;
}

EXPORT void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                        const float *b, int ldb, float beta, float *c, int ldc) {
    const size_t a_row = trans_a == TRANS ? 1 : (size_t)lda, a_column = trans_a == TRANS ? (size_t)lda : 1;
    const struct product p = {(size_t)m, (size_t)n, (size_t)k, alpha,    beta,        a,
                              b,         c,         a_row,     a_column, (size_t)ldb, (size_t)ldc};
    if (!is_plain(order, trans_a, trans_b, m, n, k) || !computed_here(p, trans_b == TRANS))
        bound.sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

EXPORT void cblas_dgemm(int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double *a,
                        int lda, const double *b, int ldb, double beta, double *c, int ldc) {
    bound.dgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

EXPORT void cblas_cgemm(int order, int trans_a, int trans_b, int m, int n, int k, const void *alpha, const void *a,
                        int lda, const void *b, int ldb, const void *beta, void *c, int ldc) {
    bound.cgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

#include "blocks.h"
#include "delta.h"
#include "choice.h"
#include "rough.h"

/* ---- what weft/kernels/blas.py calls */

static void *find(void *library, const char *name) {
    char prefixed[64] = "scipy_"; /* as the OpenBLAS that PyPI carries spells them */
    void *symbol = dlsym(library, strcat(prefixed, name));
    return symbol != NULL ? symbol : dlsym(library, name);
}

/* Chooses the kernels of this name, or the first this machine can run and is fast with; 0 if it can not. */
EXPORT int weft_blas_kernels(const char *name) {
    for (int i = 0; i < NUM_KERNELS; i++) {
        if (!can_run(all_kernels[i].name)) continue;
        if (name == NULL ? !is_fastest(all_kernels[i].name) : strcmp(name, all_kernels[i].name) != 0) continue;
        bound.kernels = &all_kernels[i];
        const long near_bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE); /* 0 or less where it is not known */
        if (near_bytes > 0) near_floats = (size_t)near_bytes / sizeof(float);
        return 1;
    }
    return 0;
}

/* On: every product is computed here whatever its number of rows. Off: where OpenBLAS is faster, it is asked. */
EXPORT void weft_blas_exact(int is_exact) { bound.is_exact = is_exact; }

/* Returns how many there were before. */
EXPORT int weft_blas_threads(int threads) { return pool_set_threads(threads); }

/* Opens the CBLAS to forward to; 0 if it can not be loaded or lacks one of the three products. */
EXPORT int weft_blas_open(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) return 0;
    sgemm_function *sgemm = (sgemm_function *)find(library, "cblas_sgemm");
    dgemm_function *dgemm = (dgemm_function *)find(library, "cblas_dgemm");
    cgemm_function *cgemm = (cgemm_function *)find(library, "cblas_cgemm");
    if (sgemm == NULL || dgemm == NULL || cgemm == NULL) return 0;
    if (bound.sgemm == NULL && pthread_atfork(NULL, NULL, pool_after_fork) != 0) return 0;
    bound.sgemm = sgemm;
    bound.dgemm = dgemm;
    bound.cgemm = cgemm;
    return weft_blas_kernels(NULL);
}

/* What the CPU kernels compute, a line for each case with a hash of its bits: `make aarch64` compares the lines of several processors.
 *
 * The argument names the kernels; without one they are the fastest here. Every input is made of its place alone, so it is the same everywhere.
 */
#include "../../src/weft/kernels/native/sgemm.c"

#include <stdio.h>

enum { MOST = 1 << 20, HEADS = 4, KV_HEADS = 2, DIM = 32, PLACES = 80 };

static float x[MOST], y[MOST], out[MOST], more[MOST];
static uint8_t codes[MOST], scales[MOST], biases[MOST];

static uint32_t mixed(uint32_t place) {
    place = (place ^ 61) ^ (place >> 16);
    place *= 9;
    place ^= place >> 4;
    place *= 0x27d4eb2d;
    return place ^ (place >> 15);
}

/* Numbers between -1 and 1. */
static void fill(float *numbers, size_t count, uint32_t seed) {
    for (size_t i = 0; i < count; i++) numbers[i] = (float)(mixed((uint32_t)i + seed) % 20011) / 10005.5f - 1.0f;
}

/* Numbers of 16 bits that are neither large nor tiny: `low` is the exponent of the smallest, of those that end at bit `at`. */
static void fill_halves(uint8_t *to, size_t count, uint32_t seed, unsigned at, unsigned low) {
    for (size_t i = 0; i < count; i++) {
        const uint32_t bits = mixed((uint32_t)i + seed);
        const uint16_t half = (uint16_t)((bits & 0x8000u) | (low + (bits >> 16) % 4) << at | (bits & ((1u << at) - 1)));
        memcpy(to + 2 * i, &half, sizeof half);
    }
}

static void told(const char *what, size_t a, size_t b, size_t c, const void *bits, size_t bytes) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ ((const uint8_t *)bits)[i]) * 1099511628211u;
    printf("%s %zu %zu %zu %016llx\n", what, a, b, c, (unsigned long long)hash);
}

struct packing_kind {
    const char *name;
    enum weft_kind kind, scale_kind;
    size_t bits, group;
};

static const struct packing_kind kinds[] = {
    {"float32", WEFT_F32, WEFT_F32, 32, 1},        {"float16", WEFT_F16, WEFT_F16, 16, 1},         {"bfloat16", WEFT_BF16, WEFT_BF16, 16, 1},
    {"2 bits", WEFT_AFFINE, WEFT_F16, 2, 64},      {"3 bits", WEFT_AFFINE, WEFT_BF16, 3, 32},      {"4 bits", WEFT_AFFINE, WEFT_F32, 4, 32},
    {"4 bits of 64", WEFT_AFFINE, WEFT_BF16, 4, 64}, {"5 bits", WEFT_AFFINE, WEFT_F16, 5, 64},     {"6 bits", WEFT_AFFINE, WEFT_F32, 6, 64},
    {"8 bits", WEFT_AFFINE, WEFT_F16, 8, 32},      {"mxfp4", WEFT_MXFP4, WEFT_F32, 4, 32},         {"nvfp4", WEFT_NVFP4, WEFT_F32, 4, 16},
};
enum { NUM_KINDS = sizeof kinds / sizeof *kinds };

static void fill_scales(uint8_t *to, size_t count, const struct packing_kind *kind, uint32_t seed) {
    if (kind->kind == WEFT_MXFP4 || kind->kind == WEFT_NVFP4)
        for (size_t i = 0; i < count; i++) to[i] = (uint8_t)((kind->kind == WEFT_MXFP4 ? 120 : 40) + mixed((uint32_t)i + seed) % 10);
    else if (kind->scale_kind == WEFT_F32)
        fill((float *)(void *)to, count, seed);
    else
        fill_halves(to, count, seed, kind->scale_kind == WEFT_F16 ? 10 : 7, kind->scale_kind == WEFT_F16 ? 9 : 119);
}

static struct weft_weights weights_of(const struct packing_kind *kind, size_t n, size_t k) {
    if (kind->kind == WEFT_F32)
        fill((float *)(void *)codes, n * k, 7);
    else if (kind->bits == 16)
        fill_halves(codes, n * k, 7, kind->kind == WEFT_F16 ? 10 : 7, kind->kind == WEFT_F16 ? 12 : 123);
    else {
        for (size_t i = 0; i < n * k * kind->bits / 8; i++) codes[i] = (uint8_t)mixed((uint32_t)i + 7);
        fill_scales(scales, n * k / kind->group, kind, 11);
        fill_scales(biases, n * k / kind->group, kind, 13);
    }
    return (struct weft_weights){kind->kind, kind->scale_kind, n, k, kind->bits, kind->group, codes, scales, kind->kind == WEFT_AFFINE ? biases : NULL};
}

static void products(const struct packing_kind *kind) {
    static const size_t rows[] = {1, 2, 3, 4, 5, 8, 9, 12, 13, 17, 24, 25, 48, 67, 128, 131}, columns[] = {1, 7, 50};
    static const size_t lengths[] = {1, 15, 17, 31, 64, 192, 576, 2112};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (size_t j = 0; j < sizeof columns / sizeof *columns; j++)
            for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
                const size_t m = rows[i], n = columns[j], k = lengths[l];
                if (k % kind->group != 0 || (kind->bits < 16 && k * kind->bits % 32 != 0) || (k > 576 && (m > 25 || n < 50))) continue;
                const struct weft_weights w = weights_of(kind, n, k);
                fill(x, m * k, 3), fill(more, m * n + n, 5);
                const struct weft_linear linear = {m, k, n, x, more, more + n, out, &w};
                weft_linear(&linear);
                told(kind->name, m, n, k, out, m * n * sizeof(float));
                if (j != 2 || l % 2 != 0) continue;
                const struct weft_gated gated = {m, x, out, &w, &w};
                weft_gated(&gated);
                told("gated", m, n, k, out, m * n * sizeof(float));
            }
}

static void rows_alone(void) {
    for (size_t n = 1; n <= 70; n++) {
        fill(x, 3 * n, 17), fill(y, n, 19);
        weft_norm(x, y, 1e-5f, out, 3, n);
        told("norm", 3, n, 0, out, 3 * n * sizeof(float));
        weft_silu(x, out, 3 * n);
        told("silu", 3, n, 0, out, 3 * n * sizeof(float));
    }
}

static void attention(size_t tokens, size_t first, int is_gated) {
    const size_t stride = (1 + (size_t)is_gated) * HEADS * DIM;
    fill(x, tokens * stride, 23), fill(y, KV_HEADS * PLACES * DIM, 29), fill(more, KV_HEADS * PLACES * DIM + DIM * (tokens + 1), 31);
    const struct weft_row row = {.keys = y, .values = more, .places = PLACES, .first = first, .tokens = tokens};
    const float *norm = more + KV_HEADS * PLACES * DIM, *angles = norm + DIM;
    const struct weft_attention a = {&row, 1, HEADS, KV_HEADS, DIM, stride, DIM / 2, x, angles, norm, 0.2f, 1e-6f, is_gated, is_gated, out};
    weft_attend(&a);
    told("attention", tokens, first, (size_t)is_gated, out, tokens * HEADS * DIM * sizeof(float));
}

static void recurrence(size_t tokens, int is_delta) {
    enum { WIDTH_ = 32, HEIGHT = 8 };
    fill(x, tokens * HEADS * (2 * WIDTH_ + HEIGHT + 2), 37), fill(y, HEADS * HEIGHT * WIDTH_, 41);
    const struct weft_series value = {x, 0, HEADS * HEIGHT, HEIGHT}, key = {x + tokens * HEADS * HEIGHT, 0, HEADS * WIDTH_, WIDTH_};
    const struct weft_series query = {key.at + tokens * HEADS * WIDTH_, 0, HEADS * WIDTH_, WIDTH_}, gate = {query.at + tokens * HEADS * WIDTH_, 0, HEADS, 1};
    const struct weft_series beta = {is_delta ? gate.at + tokens * HEADS : NULL, 0, HEADS, 1};
    const struct weft_recurrence r = {1, HEADS, 1, tokens, HEIGHT, WIDTH_, value, key, query, gate, beta, 0, y, more, 0, out, tokens};
    weft_recur(&r);
    told("recurrence", tokens, (size_t)is_delta, 0, out, tokens * HEADS * HEIGHT * sizeof(float));
    told("its states", tokens, (size_t)is_delta, 0, more, HEADS * HEIGHT * WIDTH_ * sizeof(float));
}

static void choices(void) {
    static int32_t tokens[4], problems[4];
    static const float temperature[] = {0.0f, 0.7f, 1.0f, 1.3f}, min_p[] = {0, 0, 0.05f, 0}, top_p[] = {1, 1, 1, 0.8f}, uniform[] = {0.1f, 0.3f, 0.6f, 0.9f};
    static const int32_t top_k[] = {0, 0, 0, 20};
    for (size_t n = 1; n < 1200; n = n * 3 / 2 + 1) {
        fill(x, 4 * n, 43);
        const struct weft_choice c = {4, n, x, NULL, temperature, min_p, top_p, uniform, top_k, tokens, problems};
        weft_choose(&c);
        told("choice", 4, n, 0, tokens, sizeof tokens);
    }
}

int main(int count, char **words) {
    if (!weft_blas_kernels(count > 1 ? words[1] : NULL)) return 2;
    for (int i = 0; i < NUM_KINDS; i++) products(&kinds[i]);
    rows_alone();
    for (size_t tokens = 1; tokens < 40; tokens += 3)
        for (int is_gated = 0; is_gated < 2; is_gated++) attention(tokens, 0, is_gated), attention(tokens, 37, is_gated);
    for (size_t tokens = 1; tokens < 12; tokens++) recurrence(tokens, 0), recurrence(tokens, 1);
    choices();
    return 0;
}

/* The kernels' thread pool under a thread sanitizer: `make race`. Several callers at once, each result compared with one thread's. */
#include "../../src/weft/kernels/native/sgemm.c"

#include <stdio.h>

/* N * K is large enough for the pool to be woken. */
enum { CALLERS = 3, TURNS = 60, M = 9, N = 4200, K = 130, SPAN = 90, DIM = 16 };

static float x[M * K], weights[N * K], line[3 * DIM], keys[SPAN * DIM], values[SPAN * DIM];
static float right[M * N], right_attended[DIM];

static void compute(float *product, float *attended) {
    const struct weft_weights w = {.kind = WEFT_F32, .n = N, .k = K, .bits = 32, .group = K, .codes = weights};
    const struct weft_linear linear = {.m = M, .lda = K, .ldc = N, .a = x, .c = product, .weights = &w};
    weft_linear(&linear);
    const struct weft_row row = {.keys = keys, .values = values, .places = SPAN, .first = SPAN - 1, .tokens = 1};
    const struct weft_attention attention = {.rows = &row, .num_rows = 1, .heads = 1, .kv_heads = 1, .dim = DIM, .q_stride = 3 * DIM,
                                             .q = line, .scale = 0.25f, .output = attended};
    weft_attend(&attention);
}

static void *call(void *wrong) {
    static _Thread_local float product[M * N], attended[DIM];
    for (int turn = 0; turn < TURNS; turn++) {
        compute(product, attended);
        *(int *)wrong += memcmp(product, right, sizeof right) != 0 || memcmp(attended, right_attended, sizeof right_attended) != 0;
    }
    return NULL;
}

static void fill(float *numbers, size_t count) {
    for (size_t i = 0; i < count; i++) numbers[i] = (float)(i * 7919 % 1000) / 500.0f - 1.0f;
}

int main(void) {
    pthread_t callers[CALLERS];
    int wrong[CALLERS] = {0}, total = 0;
    fill(x, M * K), fill(weights, N * K), fill(line, 3 * DIM), fill(keys, SPAN * DIM), fill(values, SPAN * DIM);
    if (!weft_blas_kernels(NULL)) return 2;
    compute(right, right_attended);
    weft_blas_threads(3);
    for (int i = 0; i < CALLERS; i++) pthread_create(&callers[i], NULL, call, &wrong[i]);
    for (int i = 0; i < CALLERS; i++) pthread_join(callers[i], NULL), total += wrong[i];
    printf("%d callers, %d turns each, %d wrong\n", CALLERS, TURNS, total);
    return total != 0;
}

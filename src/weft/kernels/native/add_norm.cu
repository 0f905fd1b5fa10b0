// The body of the kernel; mlx writes its signature from the names in cuda.py.
// sum = x + y, and its RMSNorm times a weight; a block: one line of `width` numbers, eight to a thread at a time, VECTORS times. With PARTS y is the sum
// of as many arrays, added in their order and rounded to T: the segments of a product. Squares are added up as lines_normed.cu adds them.
const int width = x_shape[1], lines = x_shape[0];
const size_t from = size_t(blockIdx.x) * width;
__shared__ float parts[32];
float added[VECTORS][COLUMNS], squares = 0.0f;
#pragma unroll
for (int i = 0; i < VECTORS; i++) {
    const int at = (threadIdx.x + i * blockDim.x) * COLUMNS;
    if (at >= width) break;
    float other[COLUMNS] = {};
    load_columns(x + from + at, added[i]);
    if constexpr (PARTS > 0) {
        float part[PARTS > 0 ? PARTS : 1][COLUMNS];
#pragma unroll
        for (int j = 0; j < PARTS; j++) load_columns(y + size_t(j) * lines * width + from + at, part[j]);
#pragma unroll
        for (int j = 0; j < PARTS; j++)
            for (int k = 0; k < COLUMNS; k++) other[k] += part[j][k];
        for (int k = 0; k < COLUMNS; k++) other[k] = rounded<T>(other[k]);
    } else {
        load_columns(y + from + at, other);
    }
    for (int k = 0; k < COLUMNS; k++) {
        added[i][k] = rounded<T>(added[i][k] + other[k]);
        squares = __fmaf_rn(added[i][k], added[i][k], squares);
    }
    store_columns(added[i], sum + from + at);
}
squares = sum_of_warp(squares);
if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = squares;
__syncthreads();
squares = 0.0f;
for (int i = 0; i < blockDim.x / 32; i++) squares += parts[i];
const float factor = rsqrtf(squares / width + EPS);
#pragma unroll
for (int i = 0; i < VECTORS; i++) {
    const int at = (threadIdx.x + i * blockDim.x) * COLUMNS;
    if (at >= width) break;
    float scaled[COLUMNS];
    load_columns(weight + at, scaled);
    for (int k = 0; k < COLUMNS; k++) scaled[k] *= added[i][k] * factor;
    store_columns(scaled, normed + from + at);
}

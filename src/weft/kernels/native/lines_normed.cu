// Before product_few.cu: its lines are x + y, rounded to T, then normalised and scaled by `norm`, as add_norm.cu does it; every block computes all of them for
// itself, so there must be few. The sums go to `sum`. Squares are added up as by NORM_THREADS threads, of which each has eight numbers VECTORS times.
SHARED_POOL(uint4, normed_pool);
__shared__ float squares_of[32];
const int num_lines = x_shape[0], width = x_shape[1];
auto prepare_lines = [&]() -> const T* {
    T* normed = reinterpret_cast<T*>(normed_pool);
    for (int line = 0; line < num_lines; line++) {
        const size_t from = size_t(line) * width;
        T* own_line = normed + from;
        for (int first = 0; first < NORM_THREADS; first += blockDim.x) {
            const int own = first + threadIdx.x;
            if (own >= NORM_THREADS) break;
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                const int at = (own + i * NORM_THREADS) * COLUMNS;
                if (at >= width) break;
                float added[COLUMNS], other[COLUMNS];
                load_columns(x + from + at, added);
                load_columns(y + from + at, other);
                for (int k = 0; k < COLUMNS; k++) {
                    added[k] = rounded<T>(added[k] + other[k]);
                    squares = __fmaf_rn(added[k], added[k], squares);
                }
                store_columns(added, own_line + at);
                if (blockIdx.x + blockIdx.y == 0) store_columns(added, sum + from + at);
            }
            squares = sum_of_warp(squares);
            if (own % 32 == 0) squares_of[own / 32] = squares;
        }
        __syncthreads();
        float squares = 0.0f;
        for (int i = 0; i < NORM_THREADS / 32; i++) squares += squares_of[i];
        const float factor = rsqrtf(squares / width + EPS);
        for (int at = threadIdx.x * COLUMNS; at < width; at += blockDim.x * COLUMNS) {
            float added[COLUMNS], scaled[COLUMNS];
            load_columns(own_line + at, added);
            load_columns(norm + at, scaled);
            for (int k = 0; k < COLUMNS; k++) scaled[k] *= added[k] * factor;
            store_columns(scaled, own_line + at);
        }
        __syncthreads();
    }
    return normed;
};

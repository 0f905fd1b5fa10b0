// Where the memory of a step's rows is. Included as text in front of the kernels of cuda_paged.py, behind columns.h.
//
// `rows` (B, 4) has of each row: the slot of its recurrent states, the tokens it holds, the position of its first new token, and where its pages begin in
// `pages` (W, 2): of each page the row that it belongs to (−1: none), and its number. Line i of a step is token i % T of row i / T.
// Keys and values are [pages, heads, PAGE, dim]. Kernels write to them, and to states, in place: MLX does not know, so whoever reads them later must
// have an output of the kernel that wrote among its inputs, or be evaluated later.
constexpr int FIELDS = 4, SLOT = 0, LENGTH = 1, POSITION = 2, FIRST_PAGE = 3;

// What attention found over the pages 0 to `last` of a row, put together. Of each page there are VALUE_DIM sums, the highest score and the sum of weights,
// `stride` numbers apart. They are read behind the first cache: other blocks of the same launch may have written them.
struct Weighed {
    float highest, total;
};

// The highest score of all pages and the sum of all weights, found by a warp, whose lanes all get them.
template <int VALUE_DIM>
__device__ inline Weighed weigh_pages(const float* part, size_t stride, int last) {
    const int lane = threadIdx.x % 32;
    Weighed found = {-INFINITY, 0.0f};
    for (int page = lane; page <= last; page += 32) found.highest = fmaxf(found.highest, __ldcg(part + page * stride + VALUE_DIM));
    for (int step = 16; step; step /= 2) found.highest = fmaxf(found.highest, __shfl_xor_sync(0xffffffff, found.highest, step));
    for (int page = lane; page <= last; page += 32)
        found.total += __expf(__ldcg(part + page * stride + VALUE_DIM) - found.highest) * __ldcg(part + page * stride + VALUE_DIM + 1);
    found.total = sum_of_warp(found.total);
    return found;
}

// One column of the values' weighted mean.
template <int VALUE_DIM>
__device__ inline float unite_column(const float* part, size_t stride, int last, int column, Weighed weighed) {
    float sum = 0.0f;
#pragma unroll 8
    for (int page = 0; page <= last; page++) {
        const float* here = part + page * stride;
        sum = __fmaf_rn(__expf(__ldcg(here + VALUE_DIM) - weighed.highest), __ldcg(here + column), sum);
    }
    return sum / weighed.total;
}

// The place of a token's first number in keys or values of HEADS heads of DIM numbers.
template <int HEADS, int DIM>
__device__ inline size_t place_of(const int* rows, const int* pages, int row, int token, int head) {
    const int at = rows[row * FIELDS + LENGTH] + token, page = pages[(rows[row * FIELDS + FIRST_PAGE] + at / PAGE) * 2 + 1];
    return ((size_t(page) * HEADS + head) * PAGE + at % PAGE) * DIM;
}

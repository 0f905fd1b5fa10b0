// Where the memory of a step's rows is. Included as text in front of the kernels of cuda_paged.py, behind columns.h.
//
// `rows` (B, 4) has of each row: the slot of its recurrent states, the tokens it holds, the position of its first new token, and where its pages begin in
// `pages` (W, 2): of each page the row that it belongs to (−1: none), and its number. Line i of a step is token i % T of row i / T.
// Keys and values are [pages, heads, PAGE, dim]. Kernels write to them, and to states, in place: MLX does not know, so whoever reads them later must
// have an output of the kernel that wrote among its inputs, or be evaluated later.
constexpr int FIELDS = 4, SLOT = 0, LENGTH = 1, POSITION = 2, FIRST_PAGE = 3;

// What attention over the pages 0 to `last` of a row found for one column, put together: of each page there are VALUE_DIM sums, the highest score and the
// sum of weights, `stride` numbers apart. Read behind the first cache: other blocks of the same launch may have written them.
template <int VALUE_DIM>
__device__ inline float united(const float* part, size_t stride, int last, int column) {
    float highest = -INFINITY, total = 0.0f, sum = 0.0f;
#pragma unroll 4
    for (int page = 0; page <= last; page++) highest = fmaxf(highest, __ldcg(part + page * stride + VALUE_DIM));
#pragma unroll 4
    for (int page = 0; page <= last; page++) {
        const float* here = part + page * stride;
        const float share = __expf(__ldcg(here + VALUE_DIM) - highest);
        total += share * __ldcg(here + VALUE_DIM + 1);
        sum += share * __ldcg(here + column);
    }
    return sum / total;
}

// The place of a token's first number in keys or values of HEADS heads of DIM numbers.
template <int HEADS, int DIM>
__device__ inline size_t place_of(const int* rows, const int* pages, int row, int token, int head) {
    const int at = rows[row * FIELDS + LENGTH] + token, page = pages[(rows[row * FIELDS + FIRST_PAGE] + at / PAGE) * 2 + 1];
    return ((size_t(page) * HEADS + head) * PAGE + at % PAGE) * DIM;
}

// Where the memory of a step's rows is. Included as text in front of the kernels of cuda_paged.py, behind columns.h.
//
// `rows` (B, 4) has of each row: the slot of its recurrent states, the tokens it holds, the position of its first new token, and where its pages begin in
// `pages` (W, 2): of each page the row that it belongs to (−1: none), and its number. Line i of a step is token i % T of row i / T.
// Keys and values are [pages, heads, PAGE, dim]. Kernels write to them, and to states, in place: MLX does not know, so whoever reads them later must
// have an output of the kernel that wrote among its inputs, or be evaluated later.
constexpr int FIELDS = 4, SLOT = 0, LENGTH = 1, POSITION = 2, FIRST_PAGE = 3;

// The place of a token's first number in keys or values of HEADS heads of DIM numbers.
template <int HEADS, int DIM>
__device__ inline size_t place_of(const int* rows, const int* pages, int row, int token, int head) {
    const int at = rows[row * FIELDS + LENGTH] + token, page = pages[(rows[row * FIELDS + FIRST_PAGE] + at / PAGE) * 2 + 1];
    return ((size_t(page) * HEADS + head) * PAGE + at % PAGE) * DIM;
}

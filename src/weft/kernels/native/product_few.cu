// The body of the kernel; mlx writes its signature from the names in cuda_product.py.
// out (M, N) = x (M, K) · w (N, K)ᵀ for few lines, where all is in reading w. A block: ROW_TILES · 16 rows of w and LINES lines, eight or a multiple of
// sixteen; each of its eight warps has a segment of K, and reads AHEAD blocks of it before it multiplies them. GATED: out (M, N / 2) is silu(first half)
// · second half. What stands before this text says where the lines are: lines_given.cu, lines_shared.cu or lines_normed.cu.
constexpr int ROWS = ROW_TILES * 16, EIGHT_LINES = LINES / 8, LINE_TILES = (LINES + 15) / 16, NUMBERS = 8 * TOGETHER, WORDS = NUMBERS * BITS / 32;
__shared__ float parts[SEGMENTS][LINES][ROWS + 1];
const int num_rows = w_shape[0], first_row = blockIdx.y * ROWS, first_line = blockIdx.x * LINES;
const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
const int blocks = width / (4 * NUMBERS), end = segment_start(warp + 1, blocks);
const unsigned* rows[ROW_TILES * 2];
const T* row_scales[ROW_TILES * 2];
const T* row_biases[ROW_TILES * 2];
const uint4* lines[EIGHT_LINES];  // those beyond the last reach only sums that are not written
#pragma unroll
for (int j = 0; j < ROW_TILES * 2; j++) {
    const size_t row = weight_row<ENDING>(first_row, j * 8 + group, num_rows);
    rows[j] = reinterpret_cast<const unsigned*>(w) + row * (width * BITS / 32) + quad * WORDS;
    row_scales[j] = scales + (BITS == 16 ? 0 : row * (width / GROUP));
    row_biases[j] = biases + (BITS == 16 ? 0 : row * (width / GROUP));
}
unsigned words[AHEAD][ROW_TILES * 2][WORDS], scaling[AHEAD][ROW_TILES * 2];
auto fetch = [&](int first) {
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ahead++) {
        const int block = min(first + ahead, end - 1);
#pragma unroll
        for (int j = 0; j < ROW_TILES * 2; j++) {
            read_once<WORDS>(words[ahead][j], rows[j] + size_t(block) * 4 * WORDS);
            if constexpr (BITS < 16) {
                const int at = (block * 4 + quad) * NUMBERS / GROUP;
                scaling[ahead][j] = scale_and_bias(row_scales[j] + at, row_biases[j] + at);
            }
        }
    }
};
int first = segment_start(warp, blocks);
if (first < end) fetch(first);  // on its way while lines are prepared
const T* prepared = prepare_lines();
#pragma unroll
for (int i = 0; i < EIGHT_LINES; i++)
    lines[i] = reinterpret_cast<const uint4*>(prepared + size_t(min(first_line + i * 8 + group, num_lines - 1)) * width) + quad * TOGETHER;

float sums[ROW_TILES * 2][LINE_TILES][4] = {};
auto multiply_fetched = [&](auto is_whole) {  // as many blocks as were read ahead, or fewer: without a look at their number all lines are read at once
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ahead++) {
        if (!is_whole.value && first + ahead >= end) break;
#pragma unroll
        for (int eight = 0; eight < TOGETHER; eight++) {
            uint4 own[LINE_TILES * 2] = {};
#pragma unroll
            for (int i = 0; i < EIGHT_LINES; i++) own[i] = in_order<BITS>(lines[i][(first + ahead) * 4 * TOGETHER + eight]);
#pragma unroll
            for (int j = 0; j < ROW_TILES * 2; j++) {
                const unsigned* packed = words[ahead][j] + eight * BITS / 4;
                uint4 row;
                if constexpr (BITS == 16)
                    row = {packed[0], packed[1], packed[2], packed[3]};
                else
                    row = unpack_eight<T, BITS>(packed, scaling[ahead][j]);
#pragma unroll
                for (int i = 0; i < LINE_TILES; i++) multiply<T>(sums[j][i], own[i * 2], own[i * 2 + 1], row);
            }
        }
    }
};
while (first < end) {
    if (first + AHEAD <= end)
        multiply_fetched(Flag<true>());
    else
        multiply_fetched(Flag<false>());
    first += AHEAD;
    if (first < end) fetch(first);
}
#pragma unroll
for (int j = 0; j < ROW_TILES * 2; j++)
#pragma unroll
    for (int i = 0; i < LINE_TILES; i++)
#pragma unroll
        for (int k = 0; k < (LINES < 16 ? 2 : 4); k++) parts[warp][i * 16 + group + k / 2 * 8][j * 8 + quad * 2 + k % 2] = sums[j][i][k];
__syncthreads();
auto total = [&](int line, int row) {
    float found = 0.0f;
#pragma unroll
    for (int segment = 0; segment < SEGMENTS; segment++) found += parts[segment][line][row];
    return found;
};
constexpr int OUT_ROWS = ENDING == GATED ? ROWS / 2 : ROWS;
const int out_rows = ENDING == GATED ? num_rows / 2 : num_rows, first_out = blockIdx.y * OUT_ROWS;
for (int at = threadIdx.x; at < OUT_ROWS * LINES; at += 256) {
    const int own = at % OUT_ROWS, line = at / OUT_ROWS;
    if (first_out + own >= out_rows || first_line + line >= num_lines) continue;
    T* target = out + size_t(first_line + line) * out_rows + first_out + own;
    if constexpr (ENDING == GATED)
        *target = gated<T>(total(line, own / 8 * 16 + own % 8), total(line, own / 8 * 16 + own % 8 + 8));
    else
        *target = static_cast<T>(total(line, own));
}

// The body of the kernel; mlx writes its signature from the names in cuda_product.py.
// out (M, N) = x (M, K) · w (N, K)ᵀ for few lines, where all is in reading w. A block: ROW_TILES · 16 rows of w and LINE_TILES · 8 lines; each
// of its eight warps has a segment of K, and reads AHEAD blocks of it before it multiplies them.
constexpr int ROWS = ROW_TILES * 16, LINES = LINE_TILES * 8, NUMBERS = 8 * TOGETHER, WORDS = NUMBERS * BITS / 32;
__shared__ float parts[SEGMENTS][LINES][ROWS + 1];
const int num_lines = x_shape[0], width = x_shape[1], num_rows = w_shape[0];
const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
const int first_row = blockIdx.y * ROWS, first_line = blockIdx.x * LINES;
const int blocks = width / (4 * NUMBERS), end = segment_start(warp + 1, blocks);
const unsigned* rows[ROW_TILES * 2];
const T* row_scales[ROW_TILES * 2];
const T* row_biases[ROW_TILES * 2];
const uint4* lines[LINE_TILES];
#pragma unroll
for (int j = 0; j < ROW_TILES * 2; j++) {
    const size_t row = min(first_row + j * 8 + group, num_rows - 1);
    rows[j] = reinterpret_cast<const unsigned*>(w) + row * (width * BITS / 32) + quad * WORDS;
    row_scales[j] = scales + (BITS == 16 ? 0 : row * (width / GROUP));
    row_biases[j] = biases + (BITS == 16 ? 0 : row * (width / GROUP));
}
#pragma unroll
for (int i = 0; i < LINE_TILES; i++)  // those beyond the last reach only sums that are not written
    lines[i] = reinterpret_cast<const uint4*>(x + size_t(min(first_line + i * 8 + group, num_lines - 1)) * width) + quad * TOGETHER;

float sums[ROW_TILES][LINE_TILES][4] = {};
for (int first = segment_start(warp, blocks); first < end; first += AHEAD) {
    unsigned words[AHEAD][ROW_TILES * 2][WORDS];
    T factors[AHEAD][ROW_TILES * 2], shifts[AHEAD][ROW_TILES * 2];
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ahead++) {
        const int block = min(first + ahead, end - 1);
#pragma unroll
        for (int j = 0; j < ROW_TILES * 2; j++) {
            read_once<WORDS>(words[ahead][j], rows[j] + size_t(block) * 4 * WORDS);
            if constexpr (BITS < 16) {
                const int at = (block * 4 + quad) * NUMBERS / GROUP;
                factors[ahead][j] = row_scales[j][at];
                shifts[ahead][j] = row_biases[j][at];
            }
        }
    }
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ahead++) {
        if (first + ahead >= end) break;
#pragma unroll
        for (int eight = 0; eight < TOGETHER; eight++) {
            uint4 own[LINE_TILES];
#pragma unroll
            for (int i = 0; i < LINE_TILES; i++) own[i] = in_order<BITS>(__ldg(lines[i] + (first + ahead) * 4 * TOGETHER + eight));
#pragma unroll
            for (int j = 0; j < ROW_TILES; j++) {
                uint4 pair[2];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const unsigned* packed = words[ahead][j * 2 + half] + eight * BITS / 4;
                    if constexpr (BITS == 16)
                        pair[half] = {packed[0], packed[1], packed[2], packed[3]};
                    else
                        pair[half] = unpack_eight<T, BITS>(packed, factors[ahead][j * 2 + half], shifts[ahead][j * 2 + half]);
                }
#pragma unroll
                for (int i = 0; i < LINE_TILES; i++) multiply<T>(sums[j][i], pair[0], pair[1], own[i]);
            }
        }
    }
}
#pragma unroll
for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
    for (int i = 0; i < LINE_TILES; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) parts[warp][i * 8 + quad * 2 + k % 2][j * 16 + group + k / 2 * 8] = sums[j][i][k];
__syncthreads();
for (int at = threadIdx.x; at < ROWS * LINES; at += 256) {
    const int own = at % ROWS, line = at / ROWS;
    float total = 0.0f;
#pragma unroll
    for (int segment = 0; segment < SEGMENTS; segment++) total += parts[segment][line][own];
    if (first_row + own < num_rows && first_line + line < num_lines)
        out[size_t(first_line + line) * num_rows + first_row + own] = static_cast<T>(total);
}

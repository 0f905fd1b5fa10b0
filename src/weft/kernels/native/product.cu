// The body of the kernel; mlx writes its signature from the names in cuda_product.py.
// out (M, N) = x (M, K) · w (N, K)ᵀ for many lines. A block: ROW_TILES · 16 rows of w and LINE_TILES · 8 lines; K passes through shared
// memory in stages of BLOCKS · 32. A warp has OWN_ROWS and OWN_LINES of the tiles. Rows of 4 or 8 bits are unpacked on the way; with 16
// there are no scales and biases, and any array stands for them.
constexpr int ROWS = ROW_TILES * 16, LINES = LINE_TILES * 8, WARPS = 8;
constexpr int OWN_ROWS = ROW_TILES / WARP_ROWS, WARP_LINES = LINE_TILES < WARPS / WARP_ROWS ? LINE_TILES : WARPS / WARP_ROWS;
constexpr int OWN_LINES = LINE_TILES / WARP_LINES;
constexpr int LINE_PIECES = BLOCKS * 4, ROW_PIECES = BLOCKS * BITS / 4;  // of 16 bytes, in a line and in a row of a stage
constexpr int FIRST_LINE = ROWS * ROW_PIECES, STAGE = FIRST_LINE + LINES * LINE_PIECES;
extern __shared__ uint4 memory[];
const int num_lines = x_shape[0], width = x_shape[1], num_rows = w_shape[0];
const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
const int first_row = blockIdx.y * ROWS, first_line = blockIdx.x * LINES;
const int stages = (width / 32 + BLOCKS - 1) / BLOCKS, row_pieces = width * BITS / 128;
const uint4* all_rows = reinterpret_cast<const uint4*>(w);
const uint4* all_lines = reinterpret_cast<const uint4*>(x);

auto fetch = [&](int stage) {
    if (stage < stages) {
        uint4* target = memory + stage % STAGES * STAGE;
#pragma unroll
        for (int piece = threadIdx.x; piece < FIRST_LINE; piece += 256) {
            const int own = piece / ROW_PIECES, at = piece % ROW_PIECES, from = stage * ROW_PIECES + at;
            if (from < row_pieces)
                copy_later(target + swizzled<ROW_PIECES, BITS / 4>(own, at), all_rows + size_t(min(first_row + own, num_rows - 1)) * row_pieces + from);
        }
#pragma unroll
        for (int piece = threadIdx.x; piece < LINES * LINE_PIECES; piece += 256) {
            const int own = piece / LINE_PIECES, at = piece % LINE_PIECES, from = stage * LINE_PIECES + at;
            if (from < width / 8 && first_line + own < num_lines)  // what stays of others reaches only sums that are not written
                copy_later(target + FIRST_LINE + swizzled<LINE_PIECES, 4>(own, at), all_lines + size_t(first_line + own) * (width / 8) + from);
        }
    }
    close_copies();
};

float sums[OWN_ROWS][OWN_LINES][4] = {}, totals[OWN_ROWS][OWN_LINES][4] = {};
const int own_row = warp / WARP_LINES * OWN_ROWS * 16, own_line = warp % WARP_LINES * OWN_LINES * 8;
auto row_numbers = [&](const uint4* here, int row, int stage, int number) {  // eight of a row, from this number of the stage on
    const uint4* piece = here + swizzled<ROW_PIECES, BITS / 4>(row, number * BITS / 128);
    if constexpr (BITS == 16) {
        return *piece;
    } else {
        const size_t of = size_t(min(first_row + row, num_rows - 1)) * (width / GROUP) + (stage * BLOCKS * 32 + number) / GROUP;
        return unpack_eight<T, BITS>(reinterpret_cast<const unsigned*>(piece) + number * BITS / 32 % 4, scales[of], biases[of]);
    }
};
auto close_segment = [&]() {
#pragma unroll
    for (int j = 0; j < OWN_ROWS; j++)
#pragma unroll
        for (int i = 0; i < OWN_LINES; i++)
#pragma unroll
            for (int k = 0; k < 4; k++) totals[j][i][k] += sums[j][i][k], sums[j][i][k] = 0.0f;
};
const int blocks = width / (32 * TOGETHER);
int segment = 0, segment_end = segment_start(1, blocks) * TOGETHER;
#pragma unroll
for (int stage = 0; stage < STAGES - 1; stage++) fetch(stage);
for (int stage = 0; stage < stages; stage++) {
    await_copies<STAGES - 2>();
    __syncthreads();
    fetch(stage + STAGES - 1);
    if (warp >= WARP_ROWS * WARP_LINES) continue;
    const uint4* here = memory + stage % STAGES * STAGE;
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
        const int place = stage * BLOCKS + block;
        if (place * 32 >= width) break;
        while (place >= segment_end) {
            close_segment();
            segment_end = segment_start(++segment + 1, blocks) * TOGETHER;
        }
        const int number = block / TOGETHER * 32 * TOGETHER + quad * 8 * TOGETHER + block % TOGETHER * 8;
        uint4 lines[OWN_LINES];
#pragma unroll
        for (int i = 0; i < OWN_LINES; i++)
            lines[i] = in_order<BITS>(here[FIRST_LINE + swizzled<LINE_PIECES, 4>(own_line + i * 8 + group, number / 8)]);
#pragma unroll
        for (int j = 0; j < OWN_ROWS; j++) {
            const uint4 high = row_numbers(here, own_row + j * 16 + group, stage, number);
            const uint4 low = row_numbers(here, own_row + j * 16 + 8 + group, stage, number);
#pragma unroll
            for (int i = 0; i < OWN_LINES; i++) multiply<T>(sums[j][i], high, low, lines[i]);
        }
    }
}
if (warp < WARP_ROWS * WARP_LINES) {
    close_segment();
#pragma unroll
    for (int j = 0; j < OWN_ROWS; j++)
#pragma unroll
        for (int i = 0; i < OWN_LINES; i++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int row = first_row + own_row + j * 16 + group + k / 2 * 8;
                const int line = first_line + own_line + i * 8 + quad * 2 + k % 2;
                if (row < num_rows && line < num_lines) out[size_t(line) * num_rows + row] = static_cast<T>(totals[j][i][k]);
            }
}

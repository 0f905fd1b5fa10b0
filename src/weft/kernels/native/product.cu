// The body of the kernel; mlx writes its signature from the names in cuda_product.py.
// out (M, N) = x (M, K) · w (N, K)ᵀ for many lines. A block: WARP_ROWS · OWN_ROWS tiles of 16 rows of w and WARP_LINES · OWN_LINES tiles of 16 lines, of
// which each warp has OWN_ROWS and OWN_LINES; K passes through shared memory in stages. Rows of 4 or 8 bits are unpacked on the way; with 16 there are
// no scales and biases, and any array stands for them. GATED: out (M, N / 2) is silu(first half) · second half. APART: the segments of K are spread over
// gridDim.z blocks, and out (SEGMENTS, M, N) holds the sum of each, for the next kernel to add in order.
constexpr int TOGETHER = 16 / BITS, EIGHTS = 4 * TOGETHER, STAGE_BLOCKS = BITS == 16 ? 2 : 1;  // blocks of 32 · TOGETHER numbers
constexpr int ROWS = WARP_ROWS * OWN_ROWS * 16, LINES = WARP_LINES * OWN_LINES * 16, WORKERS = WARP_ROWS * WARP_LINES * 32;
constexpr int ROW_PIECES = STAGE_BLOCKS * 4, LINE_PIECES = STAGE_BLOCKS * EIGHTS;  // of 16 bytes, in a stage
constexpr int FIRST_LINE = ROWS * ROW_PIECES, STAGE = FIRST_LINE + LINES * LINE_PIECES;
constexpr int ROW_TURNS = (FIRST_LINE + WORKERS - 1) / WORKERS, LINE_TURNS = (LINES * LINE_PIECES + WORKERS - 1) / WORKERS;
SHARED_POOL(uint4, memory);
const int num_lines = x_shape[0], width = x_shape[1], num_rows = w_shape[0];
const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad_line = lane / 4, quad = lane % 4;
const int first_row = blockIdx.y * ROWS, first_line = blockIdx.x * LINES;
const int blocks = width / (32 * TOGETHER), row_pieces = blocks * 4, line_pieces = width / 8;
const int end_segment = (blockIdx.z + 1) * SEGMENTS / gridDim.z;
int segment = blockIdx.z * SEGMENTS / gridDim.z;
const int begin = segment_start(segment, blocks), end = segment_start(end_segment, blocks), stages = (end - begin + STAGE_BLOCKS - 1) / STAGE_BLOCKS;

unsigned row_from[ROW_TURNS], line_from[LINE_TURNS];  // the first piece that this thread copies of each of its rows and lines
#pragma unroll
for (int i = 0; i < ROW_TURNS; i++) {
    const int piece = threadIdx.x + i * WORKERS;
    row_from[i] = unsigned(weight_row<ENDING>(first_row, piece / ROW_PIECES, num_rows)) * row_pieces + begin * 4 + piece % ROW_PIECES;
}
#pragma unroll
for (int i = 0; i < LINE_TURNS; i++) {
    const int piece = threadIdx.x + i * WORKERS;
    line_from[i] = unsigned(min(first_line + piece / LINE_PIECES, num_lines - 1)) * line_pieces + begin * EIGHTS + piece % LINE_PIECES;
}
auto fetch = [&](int stage) {
    if (stage < stages) {
        uint4* target = memory + stage % STAGES * STAGE;
        const bool is_whole = begin + (stage + 1) * STAGE_BLOCKS <= blocks;
#pragma unroll
        for (int i = 0; i < ROW_TURNS; i++) {
            const int piece = threadIdx.x + i * WORKERS, own = piece / ROW_PIECES, at = piece % ROW_PIECES;
            if ((FIRST_LINE % WORKERS == 0 || piece < FIRST_LINE) && (is_whole || at < 4))
                copy_later(target + swizzled<ROW_PIECES, 1>(own, at), reinterpret_cast<const uint4*>(w) + row_from[i] + stage * ROW_PIECES);
        }
#pragma unroll
        for (int i = 0; i < LINE_TURNS; i++) {
            const int piece = threadIdx.x + i * WORKERS, own = piece / LINE_PIECES, at = piece % LINE_PIECES;
            if ((LINES * LINE_PIECES % WORKERS == 0 || own < LINES) && (is_whole || at < EIGHTS))
                copy_later(target + FIRST_LINE + swizzled<LINE_PIECES, TOGETHER>(own, at), reinterpret_cast<const uint4*>(x) + line_from[i] + stage * LINE_PIECES);
        }
    }
    close_copies();
};

const int own_row = warp / WARP_LINES * OWN_ROWS * 16, own_line = warp % WARP_LINES * OWN_LINES * 16;
float sums[OWN_ROWS * 2][OWN_LINES][4] = {}, totals[OWN_ROWS * 2][OWN_LINES][4] = {};
auto close_segment = [&]() {
#pragma unroll
    for (int j = 0; j < OWN_ROWS * 2; j++)
#pragma unroll
        for (int i = 0; i < OWN_LINES; i++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                if constexpr (ENDING == APART) {
                    const int row = first_row + own_row + j * 8 + quad * 2 + k % 2, line = first_line + own_line + i * 16 + quad_line + k / 2 * 8;
                    if (row < num_rows && line < num_lines) out[(size_t(segment) * num_lines + line) * num_rows + row] = sums[j][i][k];
                } else {
                    totals[j][i][k] += sums[j][i][k];
                }
                sums[j][i][k] = 0.0f;
            }
    segment++;
};

// Scales and biases of the rows of a block of numbers; for 16 bits there are none.
unsigned scaling[OWN_ROWS * 2], next_scaling[OWN_ROWS * 2];
auto read_scaling = [&](int block) {
    if constexpr (BITS < 16) {
#pragma unroll
        for (int j = 0; j < OWN_ROWS * 2; j++) {
            const int row = weight_row<ENDING>(first_row, own_row + j * 8 + quad_line, num_rows);
            const size_t at = size_t(row) * (width / GROUP) + (min(block, blocks - 1) * 32 + quad * 8) * TOGETHER / GROUP;
            next_scaling[j] = scale_and_bias(scales + at, biases + at);
        }
    }
};
auto row_numbers = [&](uint4 words, unsigned scaled, int eight) {
    if constexpr (BITS == 16) {
        return words;
    } else {
        const unsigned four[4] = {words.x, words.y, words.z, words.w};
        return unpack_eight<T, BITS>(four + eight * BITS / 4, scaled);
    }
};

int segment_end = segment_start(segment + 1, blocks);
#pragma unroll
for (int stage = 0; stage < STAGES - 1; stage++) fetch(stage);
read_scaling(begin);
for (int stage = 0; stage < stages; stage++) {
    await_copies<STAGES - 2>();
    __syncthreads();
    fetch(stage + STAGES - 1);
    if constexpr (BITS < 16) {
#pragma unroll
        for (int j = 0; j < OWN_ROWS * 2; j++) scaling[j] = next_scaling[j];
        read_scaling(begin + stage + 1);
    }
    const uint4* here = memory + stage % STAGES * STAGE;
#pragma unroll
    for (int of_stage = 0; of_stage < STAGE_BLOCKS; of_stage++) {
        const int block = begin + stage * STAGE_BLOCKS + of_stage;
        if (block >= end) break;
        while (block >= segment_end) {
            close_segment();
            segment_end = segment_start(segment + 1, blocks);
        }
        uint4 words[OWN_ROWS * 2];
        if constexpr (BITS < 16) {
#pragma unroll
            for (int j = 0; j < OWN_ROWS * 2; j++) words[j] = here[swizzled<ROW_PIECES, 1>(own_row + j * 8 + quad_line, of_stage * 4 + quad)];
        }
#pragma unroll
        for (int eight = 0; eight < TOGETHER; eight++) {
            uint4 lines[OWN_LINES][2];
#pragma unroll
            for (int i = 0; i < OWN_LINES * 2; i++) {
                const int piece = of_stage * EIGHTS + quad * TOGETHER + eight;
                lines[i / 2][i % 2] = in_order<BITS>(here[FIRST_LINE + swizzled<LINE_PIECES, TOGETHER>(own_line + i * 8 + quad_line, piece)]);
            }
#pragma unroll
            for (int j = 0; j < OWN_ROWS * 2; j++) {
                if constexpr (BITS == 16) words[j] = here[swizzled<ROW_PIECES, 1>(own_row + j * 8 + quad_line, of_stage * 4 + quad)];
                const uint4 row = row_numbers(words[j], scaling[j], eight);
#pragma unroll
                for (int i = 0; i < OWN_LINES; i++) multiply<T>(sums[j][i], lines[i][0], lines[i][1], row);
            }
        }
    }
}
while (segment < end_segment) close_segment();

// What the block has found, by lines in shared memory, leaves in pieces of 16 bytes.
if constexpr (ENDING != APART) {
    constexpr int OUT_ROWS = ENDING == GATED ? ROWS / 2 : ROWS, STRIDE = OUT_ROWS + 8;
    T* tile = reinterpret_cast<T*>(memory);
    await_copies<0>();
    __syncthreads();
#pragma unroll
    for (int j = 0; j < OWN_ROWS * 2; j += ENDING == GATED ? 2 : 1)
#pragma unroll
        for (int i = 0; i < OWN_LINES; i++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                T* line = tile + (own_line + i * 16 + quad_line + k / 2 * 8) * STRIDE + quad * 2 + k % 2;
                if constexpr (ENDING == GATED)
                    line[own_row / 2 + j * 4] = gated<T>(totals[j][i][k], totals[j + 1][i][k]);
                else
                    line[own_row + j * 8] = static_cast<T>(totals[j][i][k]);
            }
    __syncthreads();
    const int out_rows = ENDING == GATED ? num_rows / 2 : num_rows, first = blockIdx.y * OUT_ROWS;
    for (int piece = threadIdx.x; piece < LINES * OUT_ROWS / 8; piece += WORKERS) {
        const int line = piece / (OUT_ROWS / 8), at = piece % (OUT_ROWS / 8) * 8;
        if (first_line + line >= num_lines) break;
        auto* target = out + size_t(first_line + line) * out_rows + first + at;
        const T* source = tile + line * STRIDE + at;
        if (first + at + 8 <= out_rows && out_rows % 8 == 0) {
            *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
        } else {
            for (int i = 0; i < 8; i++)
                if (first + at + i < out_rows) target[i] = source[i];
        }
    }
}

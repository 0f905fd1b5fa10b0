// The body of the kernel; mlx writes its signature from the names in ragged.py.
// The gated delta rule over the lines of several prompts' chunks. Row r has the lines from starts[r] to starts[r + 1]. Queries, keys and
// values, gates and betas may be parts of wider lines: each has the width of a line and the place of its first number. Eight threads: OWN lines
// of one head's state, KEY_DIM numbers each, through all tokens of a row, one after the other, so that no bit depends on how many there are
// or where a prompt is cut, nor on OWN. A block: LINES lines of a head. Tokens pass through shared memory BATCH at a time, the next
// ones on their way while these are computed.
constexpr int BATCH = 16, LINES = 16 * OWN, PIECES = KEY_DIM / 8, NUMBERS = KEY_DIM / 8;
constexpr int SIDE = KEY_DIM % 64 == 0 ? 8 : 4, TIMES = NUMBERS / SIDE;  // a thread has so many numbers side by side, so many times
__shared__ uint4 all_keys[2][BATCH * PIECES], all_queries[2][BATCH * PIECES], all_values[2][BATCH * LINES / 8];
__shared__ float gates[2][BATCH], betas[2][BATCH];
const int part = threadIdx.x % 8, first_line = threadIdx.x / 8 * OWN, head = blockIdx.y, row = blockIdx.z;
const int first = starts[row], end = starts[row + 1], line = blockIdx.x * LINES + first_line;
const size_t of_line = ((size_t(row) * HEADS + head) * VALUE_DIM + line) * KEY_DIM + part * SIDE;
const float rate = expf(static_cast<float>(log_rate[head])), shift = static_cast<float>(bias[head]);
alignas(16) float numbers[OWN][TIMES][SIDE];
float fade = 0.0f, write = 0.0f;
#pragma unroll
for (int j = 0; j < OWN; j++)
#pragma unroll
    for (int i = 0; i < TIMES; i++)
#pragma unroll
        for (int k = 0; k < SIDE; k += 4)
            *reinterpret_cast<float4*>(&numbers[j][i][k]) =
                *reinterpret_cast<const float4*>(state + of_line + j * KEY_DIM + i * 8 * SIDE + k);

auto fetch = [&](int from) {  // the tokens from this line on
    const int tokens = min(BATCH, end - from), at = (from - first) / BATCH % 2;
    for (int piece = threadIdx.x; piece < tokens * PIECES; piece += 128) {
        const size_t where = size_t(from + piece / PIECES) * KEY_WIDTH + head / GROUP * KEY_DIM + piece % PIECES * 8;
        copy_later(&all_keys[at][piece], key + where + KEY_AT);
        copy_later(&all_queries[at][piece], query + where);
    }
    for (int piece = threadIdx.x; piece < tokens * (LINES / 8); piece += 128) {
        const size_t where = size_t(from + piece / (LINES / 8)) * VALUE_WIDTH + VALUE_AT + head * VALUE_DIM + blockIdx.x * LINES;
        copy_later(&all_values[at][piece], value + where + piece % (LINES / 8) * 8);
    }
    close_copies();
    if (threadIdx.x < tokens) {
        fade = static_cast<float>(fading[size_t(from + threadIdx.x) * GATE_WIDTH + FADING_AT + head]);
        write = static_cast<float>(writing[size_t(from + threadIdx.x) * GATE_WIDTH + WRITING_AT + head]);
    }
};

if (first < end) fetch(first);
for (int from = first; from < end; from += BATCH) {
    const int tokens = min(BATCH, end - from), at = (from - first) / BATCH % 2;
    if (threadIdx.x < tokens) {
        const float x = fade + shift;
        gates[at][threadIdx.x] = expf(-rate * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)))));
        betas[at][threadIdx.x] = 1.0f / (1.0f + expf(-write));
    }
    await_copies<0>();
    __syncthreads();
    if (from + BATCH < end) fetch(from + BATCH);
    const T* const some_keys = reinterpret_cast<const T*>(all_keys[at]) + part * SIDE;
    const T* const some_queries = reinterpret_cast<const T*>(all_queries[at]) + part * SIDE;
    const T* const some_values = reinterpret_cast<const T*>(all_values[at]) + first_line;
#pragma unroll 4
    for (int token = 0; token < tokens; token++) {
        float direction[TIMES][SIDE], asked[TIMES][SIDE];
#pragma unroll
        for (int i = 0; i < TIMES; i++) {
            read_side<SIDE>(some_keys + token * KEY_DIM + i * 8 * SIDE, direction[i]);
            read_side<SIDE>(some_queries + token * KEY_DIM + i * 8 * SIDE, asked[i]);
        }
        const float gate = gates[at][token], beta = betas[at][token];
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            float found[4] = {}, output[4] = {};
#pragma unroll
            for (int i = 0; i < TIMES; i++)
#pragma unroll
                for (int k = 0; k < SIDE; k++) {
                    numbers[j][i][k] *= gate;
                    found[k % 4] += numbers[j][i][k] * direction[i][k];
                }
            float sum = (found[0] + found[1]) + (found[2] + found[3]);
            for (int step = 4; step; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
            const float change = beta * (static_cast<float>(some_values[token * LINES + j]) - sum);
#pragma unroll
            for (int i = 0; i < TIMES; i++)
#pragma unroll
                for (int k = 0; k < SIDE; k++) {
                    numbers[j][i][k] += change * direction[i][k];
                    output[k % 4] += numbers[j][i][k] * asked[i][k];
                }
            sum = (output[0] + output[1]) + (output[2] + output[3]);
            for (int step = 4; step; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
            if (part == 0) out[(size_t(from + token) * HEADS + head) * VALUE_DIM + line + j] = static_cast<T>(sum);
        }
    }
}
#pragma unroll
for (int j = 0; j < OWN; j++)
#pragma unroll
    for (int i = 0; i < TIMES; i++)
#pragma unroll
        for (int k = 0; k < SIDE; k += 4)
            *reinterpret_cast<float4*>(last + of_line + j * KEY_DIM + i * 8 * SIDE + k) =
                *reinterpret_cast<const float4*>(&numbers[j][i][k]);

// The body of the kernel; mlx writes its signature from the names in cuda_paged.py.
// All of a gated delta layer's step between its two products: the convolution over time, the gated delta rule, and the gated norm. A block: one head of one
// row, through all its tokens. `projected` (lines, …) has queries, keys and values (CHANNELS numbers), then the gates of the norm, betas and decays. In place:
// `columns` (slots, RING, CHANNELS), of which token p of a row is at p % RING, so that no block reads what another one writes, and a row may go back to any
// of the step's tokens; and `state` (slots, HEADS, VALUE_DIM, KEY_DIM). With KEEPS_STATES `kept` has the states after each line.
constexpr int GROUP = HEADS / KEY_HEADS, KEYS = KEY_HEADS * KEY_DIM, CHANNELS = 2 * KEYS + HEADS * VALUE_DIM, KEPT = TAPS - 1;
constexpr int FOURS = KEY_DIM / 32, TURNS = VALUE_DIM / 32, MOST = (KEY_DIM > VALUE_DIM ? KEY_DIM : VALUE_DIM) / 32;
alignas(16) __shared__ float query[KEY_DIM], key[KEY_DIM], value[VALUE_DIM], output[VALUE_DIM];
const int head = blockIdx.x, row = blockIdx.y, tokens = projected_shape[0] / rows_shape[0], stride = projected_shape[1];
const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = threadIdx.x % 8, team = threadIdx.x / 8;
const int slot = rows[row * FIELDS + SLOT], length = rows[row * FIELDS + LENGTH];
const T* lines = projected + size_t(row) * tokens * stride;
T* ring = const_cast<T*>(columns) + size_t(slot) * RING * CHANNELS;
float* held = const_cast<float*>(state) + (size_t(slot) * HEADS + head) * VALUE_DIM * KEY_DIM + part * 4;

// Eight threads have one line of the state, KEY_DIM numbers, in fours by turns; a thread has TURNS lines.
alignas(16) float numbers[TURNS][FOURS][4];
#pragma unroll
for (int j = 0; j < TURNS; j++)
#pragma unroll
    for (int i = 0; i < FOURS; i++) copy_numbers<4>(held + (team + j * 32) * KEY_DIM + i * 32, numbers[j][i]);
const float rate = expf(static_cast<float>(log_rate[head])), shift = static_cast<float>(bias[head]);

for (int token = 0; token < tokens; token++) {
    const T* line = lines + size_t(token) * stride;
    if (warp < 3) {  // one warp the query, one the key, one the values
        const int first = warp == 0 ? head / GROUP * KEY_DIM : warp == 1 ? KEYS + head / GROUP * KEY_DIM : 2 * KEYS + head * VALUE_DIM;
        const int own = (warp < 2 ? KEY_DIM : VALUE_DIM) / 32;
        const bool is_writer = warp == 2 || head % GROUP == 0;
        float found[MOST], squares = 0.0f;
#pragma unroll
        for (int i = 0; i < MOST; i++) {
            if (i >= own) break;
            const int channel = first + lane + i * 32;
            float sum = 0.0f;
#pragma unroll
            for (int tap = 0; tap < TAPS; tap++) {
                const int at = token + tap - KEPT;
                const T input = at >= 0 ? lines[size_t(at) * stride + channel] : ring[size_t((length + at + RING) % RING) * CHANNELS + channel];
                sum += static_cast<float>(input) * static_cast<float>(taps[channel * TAPS + tap]);
            }
            sum = rounded<T>(sum);
            found[i] = rounded<T>(sum / (1.0f + expf(-sum)));
            squares += found[i] * found[i];
            if (is_writer) ring[size_t((length + token) % RING) * CHANNELS + channel] = line[channel];
        }
        float factor = 1.0f;
        if (warp < 2) factor = rsqrtf(sum_of_warp(squares) + 1e-6f) * (warp == 0 ? rsqrtf(float(KEY_DIM)) : 1.0f);
        float* target = warp == 0 ? query : warp == 1 ? key : value;
#pragma unroll
        for (int i = 0; i < MOST; i++)
            if (i < own) target[lane + i * 32] = rounded<T>(found[i] * factor);
    }
    const float x = static_cast<float>(line[FADING_AT + head]) + shift, beta = 1.0f / (1.0f + expf(-static_cast<float>(line[WRITING_AT + head])));
    const float decay = expf(-rate * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)))));
    __syncthreads();
    alignas(16) float direction[FOURS][4], asked[FOURS][4];
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        copy_numbers<4>(key + part * 4 + i * 32, direction[i]);
        copy_numbers<4>(query + part * 4 + i * 32, asked[i]);
    }
#pragma unroll
    for (int j = 0; j < TURNS; j++) {
        float found = 0.0f, result = 0.0f;
#pragma unroll
        for (int i = 0; i < FOURS; i++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                numbers[j][i][k] *= decay;
                found += numbers[j][i][k] * direction[i][k];
            }
        for (int step = 4; step; step /= 2) found += __shfl_xor_sync(0xffffffff, found, step);
        const float change = beta * (value[team + j * 32] - found);
#pragma unroll
        for (int i = 0; i < FOURS; i++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                numbers[j][i][k] += change * direction[i][k];
                result += numbers[j][i][k] * asked[i][k];
            }
        for (int step = 4; step; step /= 2) result += __shfl_xor_sync(0xffffffff, result, step);
        if (part == 0) output[team + j * 32] = rounded<T>(result);
        if constexpr (KEEPS_STATES) {
            const size_t to = ((size_t(row) * tokens + token) * HEADS + head) * VALUE_DIM + team + j * 32;
#pragma unroll
            for (int i = 0; i < FOURS; i++) copy_numbers<4>(numbers[j][i], kept + to * KEY_DIM + part * 4 + i * 32);
        }
    }
    __syncthreads();
    if (warp == 0) {  // it also has the next token's query: no other warp writes to `output` before that
        float squares = 0.0f;
        for (int at = lane; at < VALUE_DIM; at += 32) squares += output[at] * output[at];
        const float factor = rsqrtf(sum_of_warp(squares) / VALUE_DIM + EPS);
        for (int at = lane; at < VALUE_DIM; at += 32) {
            const float gate = static_cast<float>(line[CHANNELS + head * VALUE_DIM + at]);
            const float normed = rounded<T>(output[at] * factor * static_cast<float>(norm[at]));
            out[((size_t(row) * tokens + token) * HEADS + head) * VALUE_DIM + at] = static_cast<T>(normed * gate / (1.0f + expf(-gate)));
        }
    }
}
#pragma unroll
for (int j = 0; j < TURNS; j++)
#pragma unroll
    for (int i = 0; i < FOURS; i++) copy_numbers<4>(numbers[j][i], held + (team + j * 32) * KEY_DIM + i * 32);

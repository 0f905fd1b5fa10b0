// The body of the kernel; mlx writes its signature from the names in cuda.py.
// Of the projections of a gated delta layer (lines, C + …) the first C channels: convolved over time with the taps of each channel,
// through SiLU, queries and keys brought to length one. A warp: one head of one line. `next`: the convolution's next state. Row r has
// the lines from starts[r] to starts[r + 1].
constexpr int CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM, KEPT = TAPS - 1;
const int lane = threadIdx.x % 32, head = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
const int line = blockIdx.y, row = rows[line], start = starts[row], tokens = starts[row + 1] - start, token = line - start;
const int stride = projected_shape[1];
const bool is_value = head >= 2 * KEY_HEADS;
const int own = (is_value ? VALUE_DIM : KEY_DIM) / 32;
const int first = (is_value ? 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM : head * KEY_DIM) + lane;
if (head < 2 * KEY_HEADS + VALUE_HEADS) {
    constexpr int MOST = (KEY_DIM > VALUE_DIM ? KEY_DIM : VALUE_DIM) / 32;
    float found[MOST], squares = 0.0f;
    auto input = [&](int at, int channel) {  // of the convolution; before the first token its state
        return static_cast<float>(at < 0 ? state[(size_t(row) * KEPT + KEPT + at) * CHANNELS + channel]
                                         : projected[size_t(start + at) * stride + channel]);
    };
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        if (i >= own) break;
        const int channel = first + i * 32;
        float sum = 0.0f;
        for (int tap = 0; tap < TAPS; tap++)
            sum += input(token + tap - KEPT, channel) * static_cast<float>(taps[channel * TAPS + tap]);
        sum = static_cast<float>(static_cast<T>(sum));
        found[i] = static_cast<float>(static_cast<T>(sum / (1.0f + expf(-sum))));
        squares += found[i] * found[i];
        if (token == tokens - 1)
            for (int at = 0; at < KEPT; at++)
                next[(size_t(row) * KEPT + at) * CHANNELS + channel] = static_cast<T>(input(tokens - KEPT + at, channel));
    }
    float factor = 1.0f;
    if (!is_value) {
        for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(0xffffffff, squares, step);
        factor = rsqrtf(squares + 1e-6f) * (head < KEY_HEADS ? rsqrtf(float(KEY_DIM)) : 1.0f);
    }
#pragma unroll
    for (int i = 0; i < MOST; i++)
        if (i < own) out[size_t(line) * CHANNELS + first + i * 32] = static_cast<T>(found[i] * factor);
}

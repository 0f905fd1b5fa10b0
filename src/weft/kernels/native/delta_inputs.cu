// The body of the kernel; mlx writes its signature from the names in cuda.py.
// Of the projections of a gated delta layer (lines, C + …) the first C channels: convolved over time with the taps of each channel,
// through SiLU, queries and keys brought to length one. A warp: one head of RUN lines, one after the other: what the convolution reads of the line
// before is still there. A thread: SIDE neighbouring channels, several times. `next`: the convolution's next state. Row r has the lines from starts[r]
// to starts[r + 1].
constexpr int CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM, KEPT = TAPS - 1;
constexpr int MOST = (KEY_DIM > VALUE_DIM ? KEY_DIM : VALUE_DIM) / (32 * SIDE);
const int lane = threadIdx.x % 32, head = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, stride = projected_shape[1];
const bool is_value = head >= 2 * KEY_HEADS;
const int own = (is_value ? VALUE_DIM : KEY_DIM) / (32 * SIDE);
const int first = (is_value ? 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM : head * KEY_DIM) + lane * SIDE;
if (head < 2 * KEY_HEADS + VALUE_HEADS) {
    alignas(16) T window[MOST][TAPS][SIDE], weights[MOST][SIDE * TAPS];  // the last columns of this line's row, the newest one last
#pragma unroll
    for (int i = 0; i < MOST; i++)
        if (i < own) {
#pragma unroll
            for (int tap = 0; tap < TAPS; tap++) copy_numbers<SIDE>(taps + (first + i * 32 * SIDE) * TAPS + tap * SIDE, weights[i] + tap * SIDE);
        }
    const int begin = blockIdx.y * RUN, end = min(begin + RUN, projected_shape[0]);
    int row = -1, start = 0, tokens = 0;
    for (int line = begin; line < end; line++) {
        const int its = rows[line];
        const bool is_new = its != row;
        if (is_new) row = its, start = starts[row], tokens = starts[row + 1] - start;
        const int token = line - start;
        float found[MOST][SIDE], squares = 0.0f;
#pragma unroll
        for (int i = 0; i < MOST; i++) {
            if (i >= own) break;
            const int channel = first + i * 32 * SIDE;
#pragma unroll
            for (int tap = 0; tap < KEPT; tap++) {
                const int at = token + tap - KEPT;
                if (is_new)  // before the first token the convolution's state
                    copy_numbers<SIDE>(at < 0 ? state + (size_t(row) * KEPT + KEPT + at) * CHANNELS + channel
                                              : projected + size_t(start + at) * stride + channel, window[i][tap]);
                else
#pragma unroll
                    for (int k = 0; k < SIDE; k++) window[i][tap][k] = window[i][tap + 1][k];
            }
            copy_numbers<SIDE>(projected + size_t(line) * stride + channel, window[i][KEPT]);
#pragma unroll
            for (int k = 0; k < SIDE; k++) {
                float sum = 0.0f;
#pragma unroll
                for (int tap = 0; tap < TAPS; tap++)
                    sum = __fmaf_rn(static_cast<float>(window[i][tap][k]), static_cast<float>(weights[i][k * TAPS + tap]), sum);
                sum = rounded<T>(sum);
                found[i][k] = rounded<T>(sum / (1.0f + __expf(-sum)));
                squares = __fmaf_rn(found[i][k], found[i][k], squares);
            }
            if (token == tokens - 1)
#pragma unroll
                for (int at = 0; at < KEPT; at++) copy_numbers<SIDE>(window[i][at + 1], next + (size_t(row) * KEPT + at) * CHANNELS + channel);
        }
        float factor = 1.0f;
        if (!is_value) factor = rsqrtf(sum_of_warp(squares) + 1e-6f) * (head < KEY_HEADS ? rsqrtf(float(KEY_DIM)) : 1.0f);
#pragma unroll
        for (int i = 0; i < MOST; i++)
            if (i < own) {
                alignas(16) T scaled[SIDE];
#pragma unroll
                for (int k = 0; k < SIDE; k++) scaled[k] = static_cast<T>(found[i][k] * factor);
                copy_numbers<SIDE>(scaled, out + size_t(line) * CHANNELS + first + i * 32 * SIDE);
            }
    }
}

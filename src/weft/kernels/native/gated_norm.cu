// The body of the kernel; mlx writes its signature from the names in cuda.py.
// RMSNorm of each head of x (lines, HEADS · DIM), times a weight and SiLU of the head's gate in wider lines. A warp: one head of one line.
const int lane = threadIdx.x % 32, head = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, line = blockIdx.y;
if (head < HEADS) {
    const size_t from = (size_t(line) * HEADS + head) * DIM, gate_from = size_t(line) * gates_shape[1] + GATE_AT + head * DIM;
    float squares = 0.0f;
    for (int at = lane; at < DIM; at += 32) squares += static_cast<float>(x[from + at]) * static_cast<float>(x[from + at]);
    for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(0xffffffff, squares, step);
    const float factor = rsqrtf(squares / DIM + EPS);
    for (int at = lane; at < DIM; at += 32) {
        const float gate = static_cast<float>(gates[gate_from + at]);
        const float normed = static_cast<float>(static_cast<T>(static_cast<float>(x[from + at]) * factor * static_cast<float>(weight[at])));
        out[from + at] = static_cast<T>(normed * gate / (1.0f + expf(-gate)));
    }
}

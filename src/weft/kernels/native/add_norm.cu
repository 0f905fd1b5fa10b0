// The body of the kernel; mlx writes its signature from the names in cuda.py.
// sum = x + y, and its RMSNorm times a weight; a block: one line of `width` numbers.
const int width = x_shape[1];
const size_t from = size_t(blockIdx.x) * width;
__shared__ float parts[THREADS / 32];
float squares = 0.0f;
for (int at = threadIdx.x; at < width; at += THREADS) {
    const T added = static_cast<T>(static_cast<float>(x[from + at]) + static_cast<float>(y[from + at]));
    sum[from + at] = added;
    squares += static_cast<float>(added) * static_cast<float>(added);
}
for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(0xffffffff, squares, step);
if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = squares;
__syncthreads();
squares = 0.0f;
for (int i = 0; i < THREADS / 32; i++) squares += parts[i];
const float factor = rsqrtf(squares / width + eps[0]);
for (int at = threadIdx.x; at < width; at += THREADS)
    normed[from + at] = static_cast<T>(static_cast<float>(sum[from + at]) * factor * static_cast<float>(weight[at]));

// The body of the kernel; mlx writes its signature from the names in cuda.py.
// A depthwise convolution over time, x (B, S, C) by w (C, TAPS, 1) to (B, S - TAPS + 1, C); a thread: one number.
const int channels = x_shape[2], tokens = x_shape[1] - TAPS + 1, channel = blockIdx.x * blockDim.x + threadIdx.x;
if (channel < channels) {
    const T* from = x + (size_t(blockIdx.z) * x_shape[1] + blockIdx.y) * channels + channel;
    float sum = 0.0f;
    for (int i = 0; i < TAPS; i++)
        sum += static_cast<float>(from[size_t(i) * channels]) * static_cast<float>(w[channel * TAPS + i]);
    out[(size_t(blockIdx.z) * tokens + blockIdx.y) * channels + channel] = static_cast<T>(sum);
}

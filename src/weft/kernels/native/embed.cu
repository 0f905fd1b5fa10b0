// The body of the kernel; mlx writes its signature from the names in cuda_product.py.
// The embeddings of tokens: their rows of a weight (N, width), unpacked if they are packed. A thread: eight numbers.
const int width = w_shape[1] * (BITS == 16 ? 1 : 32 / BITS), vectors = width / 8;
const int at = blockIdx.x * blockDim.x + threadIdx.x, line = at / vectors, vector = at % vectors;
if (line < tokens_shape[0]) {
    const size_t row = tokens[line];
    const unsigned* words = reinterpret_cast<const unsigned*>(w) + (row * vectors + vector) * BITS / 4;
    T* target = out + size_t(line) * width + vector * 8;
    if constexpr (BITS == 16) {
        *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(words);
    } else {
        const size_t group = row * (width / GROUP) + vector * 8 / GROUP;
        const float scale = static_cast<float>(scales[group]), bias = static_cast<float>(biases[group]);
        for (int i = 0; i < 8; i++) {
            const unsigned bits = words[i * BITS / 32] >> (i * BITS % 32) & ((1u << BITS) - 1);
            target[i] = static_cast<T>(static_cast<float>(static_cast<T>(static_cast<float>(bits) * scale)) + bias);  // rounded twice, as mlx does
        }
    }
}

// Before product_few.cu: its lines are those of x, copied into shared memory while the first rows are on their way.
SHARED_POOL(uint4, lines_pool);
const int num_lines = x_shape[0], width = x_shape[1];
auto prepare_lines = [&]() -> const T* {
    for (int piece = threadIdx.x; piece < num_lines * width / 8; piece += blockDim.x) lines_pool[piece] = reinterpret_cast<const uint4*>(x)[piece];
    __syncthreads();
    return reinterpret_cast<const T*>(lines_pool);
};

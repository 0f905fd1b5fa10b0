// Numbers of a kernel's arrays, several at a time. Included as text in front of the kernels of cuda.py and cuda_paged.py.

// COLUMNS neighbouring numbers, as floats.
template <typename T>
__device__ inline void load_columns(const T* from, float* to) {
    alignas(16) T raw[COLUMNS];
    const uint4* source = reinterpret_cast<const uint4*>(from);
    uint4* target = reinterpret_cast<uint4*>(raw);
    for (int i = 0; i < int(COLUMNS * sizeof(T) / 16); i++) target[i] = source[i];
    for (int i = 0; i < COLUMNS; i++) to[i] = static_cast<float>(raw[i]);
}

template <typename T>
__device__ inline void store_columns(const float* from, T* to) {
    alignas(16) T raw[COLUMNS];
    for (int i = 0; i < COLUMNS; i++) raw[i] = static_cast<T>(from[i]);
    uint4* target = reinterpret_cast<uint4*>(to);
    for (int i = 0; i < int(COLUMNS * sizeof(T) / 16); i++) target[i] = reinterpret_cast<const uint4*>(raw)[i];
}

template <int COUNT, typename T>
__device__ inline void copy_numbers(const T* from, T* to) {
    if constexpr (COUNT * sizeof(T) == 16)
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    else if constexpr (COUNT * sizeof(T) == 8)
        *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
    else
        for (int i = 0; i < COUNT; i++) to[i] = from[i];
}

// A number as T holds it.
template <typename T>
__device__ inline float rounded(float number) {
    return static_cast<float>(static_cast<T>(number));
}

// The sum of a number over the lanes of a warp, which all lanes get.
__device__ inline float sum_of_warp(float number) {
    for (int step = 16; step; step /= 2) number += __shfl_xor_sync(0xffffffff, number, step);
    return number;
}

// What the kernel of matrix products (product.cu) is made of. Included as text in front of it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename T>
constexpr bool IS_HALF = false;
template <>
constexpr bool IS_HALF<__half> = true;

// Add the products of 16 numbers of 16 rows and 8 lines.
template <typename T>
__device__ inline void multiply_half(float* sums, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f) {
    if constexpr (!IS_HALF<T>)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(f));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(f));
}

// Add the products of 32 numbers of 16 rows and 8 lines. A thread brings 8 neighbouring numbers of two rows and of a line: which of
// the numbers of an instruction they are does not matter, as long as it is the same for rows and lines. Two chains of additions, to
// be added at the end: one would wait for itself.
template <typename T>
__device__ inline void multiply(float* sums, uint4 high, uint4 low, uint4 line) {
    multiply_half<T>(sums, high.x, low.x, high.y, low.y, line.x, line.y);
    multiply_half<T>(sums + 4, high.z, low.z, high.w, low.w, line.z, line.w);
}

// Eight packed numbers, 4 or 8 bits each, as scale · number + bias, rounded to T.
template <typename T, int BITS>
__device__ inline uint4 unpack_eight(const unsigned* words, const T* scale, const T* bias) {
    const float factor = static_cast<float>(*scale), shift = static_cast<float>(*bias);
    alignas(16) T found[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const unsigned bits = words[i * BITS / 32] >> (i * BITS % 32) & ((1u << BITS) - 1);
        const float number = __uint_as_float(0x4b000000u | bits) - 8388608.0f;  // 2^23 + bits, less 2^23
        found[i] = static_cast<T>(__fmaf_rn(factor, number, shift));
    }
    return *reinterpret_cast<const uint4*>(found);
}

// The place of a piece of 16 bytes in a stage with PIECES for each row, of which a thread reads TOUCHED / 4 at a time: arranged so
// that the threads that read together meet no bank twice.
template <int PIECES, int TOUCHED>
__device__ inline int swizzled(int row, int piece) {
    constexpr int TOGETHER = PIECES < 8 ? 8 / PIECES : 1, MOST = PIECES < 8 ? PIECES : 8;
    return row * PIECES + (piece ^ (row / TOGETHER * TOUCHED & (MOST - 1)));
}

// Copy 16 bytes into shared memory without waiting for them.
__device__ inline void copy_later(void* to, const void* from) {
    const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from));
}

__device__ inline void close_copies() { asm volatile("cp.async.commit_group;"); }

template <int LEFT>
__device__ inline void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT));
}

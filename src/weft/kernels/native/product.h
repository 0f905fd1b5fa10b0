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

template <typename T>
__device__ inline unsigned twice(T number) {
    const unsigned bits = *reinterpret_cast<const unsigned short*>(&number);
    return bits << 16 | bits;
}

// The numbers of 4 bits at the lower ends of both halves of a word, as scale · number + bias, rounded once. 128 or 1,024 and a number
// is the same bits beside each other.
template <typename T>
__device__ inline unsigned unpack_pair(unsigned packed, unsigned scale, unsigned bias) {
    constexpr unsigned BASE = IS_HALF<T> ? 0x64006400u : 0x43004300u;
    unsigned number = (packed & 0x000f000fu) | BASE, found;
    if constexpr (IS_HALF<T>) {
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(number) : "r"(number), "r"(BASE));
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(number), "r"(scale), "r"(bias));
    } else {
        asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(number) : "r"(number), "r"(BASE));
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(number), "r"(scale), "r"(bias));
    }
    return found;
}

// Eight packed numbers as scale · number + bias in T: of 8 bits in their order, of 4 bits with numbers 0 and 4, 1 and 5 … side by side.
template <typename T, int BITS>
__device__ inline uint4 unpack_eight(const unsigned* words, const T* scale, const T* bias) {
    if constexpr (BITS == 4) {
        const unsigned factor = twice(*scale), shift = twice(*bias), packed = *words;
        return {unpack_pair<T>(packed, factor, shift), unpack_pair<T>(packed >> 4, factor, shift),
                unpack_pair<T>(packed >> 8, factor, shift), unpack_pair<T>(packed >> 12, factor, shift)};
    } else {
        const float factor = static_cast<float>(*scale), shift = static_cast<float>(*bias);
        alignas(16) T found[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const unsigned bits = words[i / 4] >> (i % 4 * 8) & 0xff;
            const float number = __uint_as_float(0x4b000000u | bits) - 8388608.0f;  // 2^23 + bits, less 2^23
            found[i] = static_cast<T>(__fmaf_rn(factor, number, shift));
        }
        return *reinterpret_cast<const uint4*>(found);
    }
}

// Eight numbers of a line in the order in which packed ones come.
template <int BITS>
__device__ inline uint4 in_order(uint4 line) {
    if constexpr (BITS == 4)
        return {__byte_perm(line.x, line.z, 0x5410), __byte_perm(line.x, line.z, 0x7632), __byte_perm(line.y, line.w, 0x5410),
                __byte_perm(line.y, line.w, 0x7632)};
    return line;
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

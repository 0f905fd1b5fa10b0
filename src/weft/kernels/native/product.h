// What the kernels of matrix products (product.cu, product_few.cu) are made of. Included as text in front of them.
//
// Both add in the same order, which depends on the width K alone: K is cut into SEGMENTS; within one, an instruction adds sixteen numbers to
// a sum at a time; the segments' sums are added in order. A thread holds 8 · TOGETHER neighbouring numbers of a row, 16 bytes where
// the width allows it, and brings eight of them to each instruction pair: which numbers of an instruction they are does not matter, as
// long as it is the same for rows and lines.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr int SEGMENTS = 8;

template <typename T>
constexpr bool IS_HALF = false;
template <>
constexpr bool IS_HALF<__half> = true;

// The first block of a segment, of so many blocks in all.
__device__ inline int segment_start(int segment, int blocks) { return segment * blocks / SEGMENTS; }

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

// Add the products of 32 numbers of 16 rows and 8 lines: a thread brings eight numbers of two rows and of a line.
template <typename T>
__device__ inline void multiply(float* sums, uint4 high, uint4 low, uint4 line) {
    multiply_half<T>(sums, high.x, low.x, high.y, low.y, line.x, line.y);
    multiply_half<T>(sums, high.z, low.z, high.w, low.w, line.z, line.w);
}

// Two 16-bit numbers at a time: factor · (packed − base) + shift, rounded once; `packed` is base + a small number.
template <typename T>
__device__ inline unsigned scale_pair(unsigned packed, unsigned factor, unsigned shift) {
    unsigned found;
    if constexpr (!IS_HALF<T>)
        asm("{.reg .b32 t; fma.rn.bf16x2 t, %1, %2, %3; fma.rn.bf16x2 %0, t, %4, %5;}"
            : "=r"(found) : "r"(packed), "r"(0x3f803f80u), "r"(0xc300c300u), "r"(factor), "r"(shift));
    else
        asm("{.reg .b32 t; fma.rn.f16x2 t, %1, %2, %3; fma.rn.f16x2 %0, t, %4, %5;}"
            : "=r"(found) : "r"(packed), "r"(0x3c003c00u), "r"(0xe400e400u), "r"(factor), "r"(shift));
    return found;
}

// A 16-bit number twice.
template <typename T>
__device__ inline unsigned twice(T number) {
    const unsigned bits = *reinterpret_cast<const unsigned short*>(&number);
    return bits | bits << 16;
}

// Eight packed numbers of 4 or 8 bits as scale · number + bias, rounded to T. Those of 4 bits come in the order 0 4 1 5 2 6 3 7.
template <typename T, int BITS>
__device__ inline uint4 unpack_eight(const unsigned* words, T scale, T bias) {
    if constexpr (BITS == 4) {
        const unsigned factor = twice(scale), shift = twice(bias), base = IS_HALF<T> ? 0x64006400u : 0x43004300u;
        uint4 found;
        found.x = scale_pair<T>((words[0] & 0x000f000fu) | base, factor, shift);
        found.y = scale_pair<T>((words[0] >> 4 & 0x000f000fu) | base, factor, shift);
        found.z = scale_pair<T>((words[0] >> 8 & 0x000f000fu) | base, factor, shift);
        found.w = scale_pair<T>((words[0] >> 12 & 0x000f000fu) | base, factor, shift);
        return found;
    } else {
        const float factor = static_cast<float>(scale), shift = static_cast<float>(bias);
        alignas(16) T found[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const unsigned bits = words[i * BITS / 32] >> (i * BITS % 32) & ((1u << BITS) - 1);
            const float number = __uint_as_float(0x4b000000u | bits) - 8388608.0f;  // 2^23 + bits, less 2^23
            found[i] = static_cast<T>(__fmaf_rn(factor, number, shift));
        }
        return *reinterpret_cast<const uint4*>(found);
    }
}

// Eight numbers of a line in the order of a row's.
template <int BITS>
__device__ inline uint4 in_order(uint4 line) {
    if constexpr (BITS != 4) return line;
    return {__byte_perm(line.x, line.z, 0x5410), __byte_perm(line.x, line.z, 0x7632), __byte_perm(line.y, line.w, 0x5410),
            __byte_perm(line.y, line.w, 0x7632)};
}

// Read words that are read once only: they take no place in the first cache.
template <int WORDS>
__device__ inline void read_once(unsigned* to, const unsigned* from) {
    if constexpr (WORDS == 4)
        asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
    else if constexpr (WORDS == 2)
        asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
    else
        asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
}

// The place of a piece of 16 bytes in a stage with PIECES for each row, of which a thread reads TOUCHED / 4 at a time: arranged so
// that the threads that read together meet no bank twice.
template <int PIECES, int TOUCHED>
__device__ inline int swizzled(int row, int piece) {
    constexpr int NEIGHBOURS = PIECES < 8 ? 8 / PIECES : 1, MOST = PIECES < 8 ? PIECES : 8;
    return row * PIECES + (piece ^ (row / NEIGHBOURS * TOUCHED & (MOST - 1)));
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

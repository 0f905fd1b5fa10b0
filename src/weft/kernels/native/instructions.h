// Instructions of a CUDA device that C++ has no words for, behind functions. Included as text in front of the kernels; the tests have the same
// functions for a CPU (tests/emulation/instructions.h), so nothing but this file may hold assembly.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define SHARED_POOL(type, name) extern __shared__ type name[]

template <typename T>
constexpr bool IS_HALF = false;
template <>
constexpr bool IS_HALF<__half> = true;

// Add the products of 16 numbers of 16 lines (a to d) and 8 rows (e, f); a thread has four of the sums.
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

// Copy 16 bytes into shared memory without waiting for them.
__device__ inline void copy_later(void* to, const void* from) {
    const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from));
}

__device__ inline void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until all but the last LEFT groups of copies have arrived.
template <int LEFT>
__device__ inline void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

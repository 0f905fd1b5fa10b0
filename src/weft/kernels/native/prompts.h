// Further instructions of the kernels of prompts (attend_prompt.cu, delta_prompt.cu, gate_lines.cu). Included as text in front of them, behind
// instructions.h.
// Add to 16 × 8 sums the products of 16 × 16 numbers on the left with 16 × 8 on the right, as `load_tiles` and `load_turned` give them.
template <typename T>
__device__ inline void multiply_tile(float* sums, const unsigned* left, const unsigned* right) {
    if constexpr (!IS_HALF<T>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

// Read four matrices of 8 × 8 numbers from shared memory: thread i says where row i % 8 of matrix i / 8 is, and has of each matrix two
// numbers beside each other, of row i / 4 and from column i % 4 · 2 on.
__device__ inline void load_tiles(unsigned* to, const void* from) {
    const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(from));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(place) : "memory");
}

// Read four matrices as `load_tiles` does, turned: two numbers below each other, of column i / 4 and from row i % 4 · 2 on.
__device__ inline void load_turned(unsigned* to, const void* from) {
    const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(from));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(place) : "memory");
}

// Two numbers as 16-bit ones, the first in the lower half.
template <typename T>
__device__ inline unsigned pair_of(float first, float second) {
    const T low = static_cast<T>(first), high = static_cast<T>(second);
    return *reinterpret_cast<const unsigned short*>(&low) | unsigned(*reinterpret_cast<const unsigned short*>(&high)) << 16;
}

// So many 16-bit numbers, side by side, as floats.
template <int COUNT, typename T>
__device__ inline void read_side(const T* from, float* to) {
    alignas(16) unsigned words[COUNT / 2];
    if constexpr (COUNT == 8)
        *reinterpret_cast<uint4*>(words) = *reinterpret_cast<const uint4*>(from);
    else
        *reinterpret_cast<uint2*>(words) = *reinterpret_cast<const uint2*>(from);
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
        if constexpr (IS_HALF<T>) {
            const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
            to[2 * i] = both.x, to[2 * i + 1] = both.y;
        } else {
            to[2 * i] = __uint_as_float(words[i] << 16), to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
}

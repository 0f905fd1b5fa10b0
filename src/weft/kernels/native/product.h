// What the kernels of matrix products (product.cu, product_few.cu) are made of. Included as text in front of them, behind instructions.h.
//
// Both add in the same order, which depends on the width K alone: K is cut into SEGMENTS; within one, an instruction adds sixteen numbers to
// a sum at a time; the segments' sums are added in order. A thread holds 8 · TOGETHER neighbouring numbers of a row, 16 bytes where
// the width allows it, and brings eight of them to each instruction pair: which numbers of an instruction they are does not matter, as
// long as it is the same for rows and lines. Lines are the instructions' first operand in both kernels, however few there are.
constexpr int SEGMENTS = 8;
constexpr int PLAIN = 0, GATED = 1, APART = 2;  // the ENDING of a product: its numbers, silu(first half of the rows) · second half, or segments

template <bool IS>
struct Flag {
    static constexpr bool value = IS;
};

// The first block of a segment, of so many blocks in all.
__device__ inline int segment_start(int segment, int blocks) { return segment * blocks / SEGMENTS; }

// The row of the weight that is row `row` of a block's tiles, of which the first is row `first` of all tiles. A tile of a gated product has eight
// rows of the gate and the eight rows that it gates, so that one thread has both sums.
template <int ENDING>
__device__ inline int weight_row(int first, int row, int num_rows) {
    if constexpr (ENDING != GATED) return min(first + row, num_rows - 1);
    const int pair = min((first + row) / 16 * 8 + row % 8, num_rows / 2 - 1);
    return row % 16 < 8 ? pair : num_rows / 2 + pair;
}

// What a gated MLP makes of a gate and of what it gates, both rounded to T already.
template <typename T>
__device__ inline T gated(float gate, float number) {
    gate = static_cast<float>(static_cast<T>(gate));
    number = static_cast<float>(static_cast<T>(number));
    return static_cast<T>(gate / (1.0f + expf(-gate)) * number);
}

// Add the products of 32 numbers of 16 lines and 8 rows: a thread brings eight numbers of two lines and of a row. Its sums are those of rows 2 · quad and
// 2 · quad + 1 with its first line, then with its second.
template <typename T>
__device__ inline void multiply(float* sums, uint4 first, uint4 second, uint4 row) {
    multiply_half<T>(sums, first.x, second.x, first.y, second.y, row.x, row.y);
    multiply_half<T>(sums, first.z, second.z, first.w, second.w, row.z, row.w);
}

// A 16-bit number twice.
__device__ inline unsigned twice(unsigned bits) { return bits | bits << 16; }

template <typename T>
__device__ inline unsigned bits_of(T number) {
    return *reinterpret_cast<const unsigned short*>(&number);
}

// A scale and a bias in one word.
template <typename T>
__device__ inline unsigned scale_and_bias(const T* scale, const T* bias) {
    return bits_of(*scale) | bits_of(*bias) << 16;
}

// Eight packed numbers of 4 or 8 bits as scale · number + bias, rounded to T. Those of 4 bits come in the order 0 4 1 5 2 6 3 7.
template <typename T, int BITS>
__device__ inline uint4 unpack_eight(const unsigned* words, unsigned scaling) {
    if constexpr (BITS == 4) {
        const unsigned factor = twice(scaling & 0xffffu), shift = twice(scaling >> 16), base = IS_HALF<T> ? 0x64006400u : 0x43004300u;
        uint4 found;
        found.x = scale_pair<T>((words[0] & 0x000f000fu) | base, factor, shift);
        found.y = scale_pair<T>((words[0] >> 4 & 0x000f000fu) | base, factor, shift);
        found.z = scale_pair<T>((words[0] >> 8 & 0x000f000fu) | base, factor, shift);
        found.w = scale_pair<T>((words[0] >> 12 & 0x000f000fu) | base, factor, shift);
        return found;
    } else {
        const unsigned short scale = scaling & 0xffffu, bias = scaling >> 16;
        const float factor = static_cast<float>(*reinterpret_cast<const T*>(&scale)), shift = static_cast<float>(*reinterpret_cast<const T*>(&bias));
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

// The place of a piece of 16 bytes among the PIECES that a stage has of each row: arranged so that neither the eight threads that read together
// (two rows, four pieces TOGETHER apart) nor those that write together (eight pieces of a row) meet a bank twice.
template <int PIECES, int TOGETHER>
__device__ inline int swizzled(int row, int piece) {
    if constexpr (PIECES == 4) return row * 4 + piece;
    const int turned = TOGETHER == 4 ? (piece >> 3 & 1) | (row & 1) << 1 : TOGETHER == 2 ? row & 1 : (row & 1) << 2;
    return row * PIECES + (piece ^ turned);
}

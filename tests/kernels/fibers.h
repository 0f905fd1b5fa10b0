// A CUDA block on a CPU: its threads are fibers that take turns at barriers and at what a warp does together. In place of prompts.h.
//
// Copies "for later" are made at once or as late as they may be, and a warp runs up to the next barrier before another moves, in either
// order, as the caller chooses: what is read too early, or overwritten too early, is then seen. Shared memory begins as NaNs.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

using std::max, std::min;

struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float4 { float x, y, z, w; };
struct Dim { int x, y, z; };
struct Shape {
    int sizes[10];
    int operator[](int i) const { return sizes[i]; }
};

inline float as_float(uint32_t bits) { float found; memcpy(&found, &bits, 4); return found; }
inline uint32_t as_bits(float number) { uint32_t found; memcpy(&found, &number, 4); return found; }

struct bfloat16 {
    uint16_t bits;
    bfloat16() = default;
    explicit bfloat16(float number) {
        const uint32_t whole = as_bits(number);
        bits = number != number ? 0x7fc0 : (whole + 0x7fff + (whole >> 16 & 1)) >> 16;
    }
    explicit operator float() const { return as_float(uint32_t(bits) << 16); }
};

constexpr int WARP = 32, MAX_THREADS = 1024, STACK = 128 << 10;

struct Collective {  // what a warp's threads bring to something they do together; two, for one may be ahead by one
    unsigned brought[2][WARP][6];
    const void* places[2][WARP];
    int arrived[2] = {0, 0};
};

struct Block {
    Dim size;
    bool is_late, is_reversed;
    ucontext_t main, contexts[MAX_THREADS];
    bool is_done[MAX_THREADS];
    std::vector<char> stacks;
    Collective warps[MAX_THREADS / WARP];
    int turns[MAX_THREADS];  // of each thread at its warp's collectives
    int num_waiting, barrier;
    int waits_at[MAX_THREADS];  // the barrier that a thread waits at; -1: none
    std::deque<std::vector<std::pair<void*, const void*>>> copies[MAX_THREADS];  // in groups; the last one is open
};
inline Block block;
inline Dim threadIdx, blockIdx, blockDim;
alignas(16) inline char shared_bytes[228 << 10];
inline std::function<void()> kernel_body;

inline void pass() { swapcontext(&block.contexts[threadIdx.x], &block.main); }

inline void __syncthreads() {
    const int mine = block.barrier;
    if (++block.num_waiting == block.size.x) block.num_waiting = 0, block.barrier++;
    block.waits_at[threadIdx.x] = mine;
    while (block.barrier == mine) pass();
    block.waits_at[threadIdx.x] = -1;
}

// Bring six words and a place to the warp; returns everybody's.
inline int meet(const unsigned* words, int count, const void* place = nullptr) {
    Collective& warp = block.warps[threadIdx.x / WARP];
    const int lane = threadIdx.x % WARP, at = block.turns[threadIdx.x]++ % 2;
    std::copy(words, words + count, warp.brought[at][lane]);
    warp.places[at][lane] = place;
    if (++warp.arrived[at] == WARP) warp.arrived[1 - at] = 0;
    while (warp.arrived[at] < WARP) pass();
    return at;
}

inline float __shfl_xor_sync(unsigned, float number, int step) {
    const unsigned bits = as_bits(number);
    const int at = meet(&bits, 1);
    return as_float(block.warps[threadIdx.x / WARP].brought[at][threadIdx.x % WARP ^ step][0]);
}

inline float __shfl_sync(unsigned, float number, int lane) {
    const unsigned bits = as_bits(number);
    const int at = meet(&bits, 1);
    return as_float(block.warps[threadIdx.x / WARP].brought[at][lane][0]);
}

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }

template <typename T>
inline T half_of(unsigned word, int half) { T found; found.bits = uint16_t(word >> 16 * half); return found; }

template <typename T>
inline void multiply_tile(float* sums, const unsigned* left, const unsigned* right) {
    const unsigned words[6] = {left[0], left[1], left[2], left[3], right[0], right[1]};
    const Collective& warp = block.warps[threadIdx.x / WARP];
    const int lane = threadIdx.x % WARP, at = meet(words, 6);
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            const unsigned* rows = warp.brought[at][row % 8 * 4 + k % 8 / 2];
            const unsigned* columns = warp.brought[at][column * 4 + k % 8 / 2];
            const float a = float(half_of<T>(rows[k / 8 * 2 + row / 8], k % 2)), b = float(half_of<T>(columns[4 + k / 8], k % 2));
            sums[i] += a * b;
        }
    }
}

inline void load_matrices(unsigned* to, const void* from, bool is_turned) {
    const Collective& warp = block.warps[threadIdx.x / WARP];
    const int lane = threadIdx.x % WARP, at = meet(nullptr, 0, from);
    for (int matrix = 0; matrix < 4; matrix++) {
        to[matrix] = 0;
        for (int half = 0; half < 2; half++) {
            const int row = is_turned ? lane % 4 * 2 + half : lane / 4, column = is_turned ? lane / 4 : lane % 4 * 2 + half;
            to[matrix] |= unsigned(static_cast<const uint16_t*>(warp.places[at][matrix * 8 + row])[column]) << 16 * half;
        }
    }
}
inline void load_tiles(unsigned* to, const void* from) { load_matrices(to, from, false); }
inline void load_turned(unsigned* to, const void* from) { load_matrices(to, from, true); }

template <typename T>
inline unsigned pair_of(float first, float second) { return T(first).bits | unsigned(T(second).bits) << 16; }

template <int COUNT, typename T>
inline void read_side(const T* from, float* to) { for (int i = 0; i < COUNT; i++) to[i] = float(from[i]); }

inline void copy_later(void* to, const void* from) {
    auto& groups = block.copies[threadIdx.x];
    if (block.is_late) groups.back().emplace_back(to, from);
    else memcpy(to, from, 16);
}
inline void close_copies() { block.copies[threadIdx.x].emplace_back(); }
template <int LEFT>
inline void await_copies() {
    auto& groups = block.copies[threadIdx.x];
    for (; groups.size() > LEFT + 1; groups.pop_front())
        for (auto [to, from] : groups.front()) memcpy(to, from, 16);
}

inline void run_thread() {
    kernel_body();
    block.is_done[threadIdx.x] = true;
    pass();
}

inline void run_block() {
    const int threads = block.size.x;
    block.num_waiting = block.barrier = 0;
    for (auto& warp : block.warps) warp.arrived[0] = warp.arrived[1] = 0;
    for (int i = 0; i < threads; i++) {
        block.is_done[i] = false, block.turns[i] = 0, block.waits_at[i] = -1;
        block.copies[i].assign(1, {});
        getcontext(&block.contexts[i]);
        block.contexts[i].uc_stack.ss_sp = block.stacks.data() + size_t(i) * STACK;
        block.contexts[i].uc_stack.ss_size = STACK;
        block.contexts[i].uc_link = &block.main;
        makecontext(&block.contexts[i], run_thread, 0);
    }
    auto can_run = [](int thread) { return !block.is_done[thread] && block.waits_at[thread] != block.barrier; };
    const int warps = threads / WARP;
    for (bool is_running = true; is_running;) {
        is_running = false;
        for (int turn = 0; turn < warps; turn++) {  // each as far as it comes before the next one moves
            const int first = (block.is_reversed ? warps - 1 - turn : turn) * WARP;
            for (bool moves = true; moves;) {
                moves = false;
                for (int lane = 0; lane < WARP; lane++)
                    if (can_run(first + lane)) {
                        threadIdx = {first + lane, 0, 0};
                        swapcontext(&block.main, &block.contexts[first + lane]);
                        moves = is_running = true;
                    }
            }
        }
    }
}

inline void run_grid(Dim grid, Dim size, bool is_late, bool is_reversed, std::function<void()> body) {
    block.size = blockDim = size, block.is_late = is_late, block.is_reversed = is_reversed;
    block.stacks.resize(size_t(size.x) * STACK);
    kernel_body = std::move(body);
    for (int z = 0; z < grid.z; z++)
        for (int y = 0; y < grid.y; y++)
            for (int x = 0; x < grid.x; x++) {
                blockIdx = {x, y, z};
                memset(shared_bytes, 0xff, sizeof shared_bytes);
                run_block();
            }
}

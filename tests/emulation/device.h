// A CUDA device of one multiprocessor on a CPU: the threads of a block are fibers that take turns at barriers, blocks run one after the other.
// What kernels of weft use of CUDA is here and in instructions.h; nothing more.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __restrict__
#define __launch_bounds__(...)

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 { int x, y, z; };

namespace emulated {

constexpr size_t STACK = 128 << 10;

struct Fiber {
    void* stack_pointer = nullptr;
    dim3 thread;
    int index = 0;
    bool is_done = false;
};

inline Fiber* current = nullptr;
inline Fiber scheduler;
inline std::vector<Fiber> fibers;
inline std::vector<char> stacks;
inline std::vector<Fiber*> ready;  // taken from the front
inline size_t next_ready = 0;
inline std::function<void()> body;
inline dim3 block_index, block_size, grid_size;
inline std::vector<char> pool;

extern "C" void emulated_switch(void** from, void* to);
asm(R"(
.text
.weak emulated_switch
emulated_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
inline void switch_to(Fiber& from, Fiber& to) { emulated_switch(&from.stack_pointer, to.stack_pointer); }

inline void leave() { switch_to(*current, scheduler); }

// A barrier of some of the block's threads: the last that arrives wakes the others.
struct Barrier {
    int expected = 0;
    std::vector<Fiber*> waiting;

    void release() {
        for (Fiber* fiber : waiting) ready.push_back(fiber);
        waiting.clear();
    }
    void wait() {
        if (int(waiting.size()) + 1 == expected) {
            release();
            return;
        }
        waiting.push_back(current);
        leave();
    }
    void drop_one() {
        expected--;
        if (expected > 0 && int(waiting.size()) == expected) release();
    }
};

struct Warp {
    Barrier barrier;
    unsigned words[2][32][8];  // what lanes show each other, by turns in two places
    int turns[32];
};
inline Barrier block_barrier;
inline std::vector<Warp> warps;

inline Warp& own_warp() { return warps[current->index / 32]; }
inline int own_lane() { return current->index % 32; }

// Show words to the other lanes of the warp; returns what all of them show.
inline unsigned (*show(const unsigned* words, int count))[8] {
    Warp& warp = own_warp();
    const int turn = warp.turns[own_lane()]++ % 2;
    std::memcpy(warp.words[turn][own_lane()], words, count * sizeof(unsigned));
    warp.barrier.wait();
    return warp.words[turn];
}

inline void run_fiber() {
    body();
    current->is_done = true;
    own_warp().barrier.drop_one();
    block_barrier.drop_one();
    leave();
    std::abort();
}

inline void prepare(Fiber& fiber, char* stack) {
    auto* top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + STACK) & ~uintptr_t(15));
    *--top = nullptr;  // as if it had been called
    *--top = reinterpret_cast<void*>(run_fiber);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber.stack_pointer = top;
}

inline bool run_block() {
    const int count = block_size.x * block_size.y * block_size.z;
    block_barrier = Barrier{count, {}};
    warps.assign((count + 31) / 32, Warp());
    for (size_t i = 0; i < warps.size(); i++) warps[i].barrier.expected = std::min(32, count - int(i) * 32);
    ready.clear();
    next_ready = 0;
    for (int i = 0; i < count; i++) {
        fibers[i] = Fiber();
        fibers[i].index = i;
        fibers[i].thread = {i % block_size.x, i / block_size.x % block_size.y, i / (block_size.x * block_size.y)};
        prepare(fibers[i], stacks.data() + i * STACK);
        ready.push_back(&fibers[i]);
    }
    while (next_ready < ready.size()) {
        current = ready[next_ready++];
        switch_to(scheduler, *current);
        if (next_ready > 4096) {
            ready.erase(ready.begin(), ready.begin() + next_ready);
            next_ready = 0;
        }
    }
    for (int i = 0; i < count; i++)
        if (!fibers[i].is_done) return false;  // some wait for others that never come
    return true;
}

// Run a kernel; blocks in falling order if asked for, since no result may depend on it. Returns false if threads wait for each other forever.
inline bool launch(dim3 grid, dim3 block, int shared_bytes, bool is_backward, std::function<void()> kernel) {
    body = kernel, grid_size = grid, block_size = block;
    const size_t count = block.x * block.y * block.z;
    fibers.resize(count);
    stacks.resize(count * STACK);
    const int blocks = grid.x * grid.y * grid.z;
    for (int i = 0; i < blocks; i++) {
        const int at = is_backward ? blocks - 1 - i : i;
        block_index = {at % grid.x, at / grid.x % grid.y, at / (grid.x * grid.y)};
        pool.assign(shared_bytes + 256, char(0xff));
        if (!run_block()) return false;
    }
    return true;
}

}  // namespace emulated

#define threadIdx (emulated::current->thread)
#define blockIdx (emulated::block_index)
#define blockDim (emulated::block_size)
#define gridDim (emulated::grid_size)

inline void __syncthreads() { emulated::block_barrier.wait(); }
inline void __syncwarp() { emulated::own_warp().barrier.wait(); }
inline void __threadfence() {}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    unsigned word;
    std::memcpy(&word, &value, 4);
    unsigned found = emulated::show(&word, 1)[emulated::own_lane() ^ mask][0];
    std::memcpy(&value, &found, 4);
    return value;
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
    unsigned word;
    std::memcpy(&word, &value, 4);
    unsigned found = emulated::show(&word, 1)[lane][0];
    std::memcpy(&value, &found, 4);
    return value;
}

inline int atomicAdd(int* at, int more) { int old = *at; *at += more; return old; }

template <typename T>
inline T __ldg(const T* at) { return *at; }
template <typename T>
inline T __ldcg(const T* at) { return *at; }
inline float __uint_as_float(unsigned bits) { float found; std::memcpy(&found, &bits, 4); return found; }
inline float __int_as_float(int bits) { float found; std::memcpy(&found, &bits, 4); return found; }
inline unsigned __float_as_uint(float number) { unsigned found; std::memcpy(&found, &number, 4); return found; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t both = uint64_t(y) << 32 | x;
    unsigned found = 0;
    for (int i = 0; i < 4; i++) found |= unsigned(both >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
    return found;
}
template <typename T>
inline T min(T a, T b) { return a < b ? a : b; }
template <typename T>
inline T max(T a, T b) { return a > b ? a : b; }

// Numbers of 16 bits, rounded to the nearest, halves to even.
struct __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float number) {
        const uint32_t word = __float_as_uint(number);
        bits = std::isnan(number) ? 0x7fff : uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
    }
    operator float() const { return __uint_as_float(uint32_t(bits) << 16); }
};
struct __half {
    _Float16 number;
    __half() = default;
    __half(float wide) : number(static_cast<_Float16>(wide)) {}
    operator float() const { return static_cast<float>(number); }
};

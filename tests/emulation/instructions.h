// The functions of instructions.h and prompts.h in src/weft/kernels/native for the device of device.h. An instruction of a whole warp is computed by each lane for itself,
// from what all lanes show.
#pragma once
#include "device.h"

#define SHARED_POOL(type, name) type* name = reinterpret_cast<type*>((reinterpret_cast<uintptr_t>(emulated::pool.data()) + 127) & ~uintptr_t(127))

template <typename T>
constexpr bool IS_HALF = false;
template <>
inline constexpr bool IS_HALF<__half> = true;

template <typename T>
inline float number_at(unsigned word, int place) {
    const uint16_t bits = word >> (16 * place);
    T number;
    std::memcpy(&number, &bits, 2);
    return static_cast<float>(number);
}
template <typename T>
inline unsigned pair_of(float low, float high) {
    const T numbers[2] = {static_cast<T>(low), static_cast<T>(high)};
    unsigned word;
    std::memcpy(&word, numbers, 4);
    return word;
}

template <typename T>
inline void multiply_half(float* sums, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f) {
    const unsigned own[6] = {a, b, c, d, e, f};
    const auto* shown = emulated::show(own, 6);
    const int lane = emulated::own_lane(), group = lane / 4, quad = lane % 4;
    for (int place = 0; place < 4; place++) {
        const int below = place / 2, column = quad * 2 + place % 2;
        float sum = sums[place];
        for (int k = 0; k < 16; k++) {
            const unsigned* row = shown[group * 4 + k % 8 / 2];
            const unsigned* line = shown[column * 4 + k % 8 / 2];
            sum += number_at<T>(row[k / 8 * 2 + below], k % 2) * number_at<T>(line[4 + k / 8], k % 2);
        }
        sums[place] = sum;
    }
}

template <typename T>
inline unsigned scale_pair(unsigned packed, unsigned factor, unsigned shift) {
    const float base = IS_HALF<T> ? 1024.0f : 128.0f;
    float found[2];
    for (int i = 0; i < 2; i++) {
        const float number = static_cast<float>(static_cast<T>(number_at<T>(packed, i) - base));
        found[i] = std::fma(number, number_at<T>(factor, i), number_at<T>(shift, i));
    }
    return pair_of<T>(found[0], found[1]);
}

template <int WORDS>
inline void read_once(unsigned* to, const unsigned* from) {
    if (reinterpret_cast<uintptr_t>(from) % (4 * WORDS)) std::abort();  // the device would stop here too
    std::memcpy(to, from, 4 * WORDS);
}

// Copies arrive as late as they may: when they are awaited.
struct Copy { void* to; const void* from; };
inline std::vector<std::vector<std::vector<Copy>>> copies_of;  // by thread: groups of copies under way

inline std::vector<std::vector<Copy>>& own_copies() {
    const size_t index = emulated::current->index;
    if (copies_of.size() <= index) copies_of.resize(index + 1);
    if (copies_of[index].empty()) copies_of[index].emplace_back();
    return copies_of[index];
}
inline void copy_later(void* to, const void* from) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16) std::abort();
    own_copies().back().push_back({to, from});
}
inline void close_copies() { own_copies().emplace_back(); }
template <int LEFT>
inline void await_copies() {
    auto& groups = own_copies();
    while (int(groups.size()) - 1 > LEFT) {
        for (const Copy& copy : groups.front()) std::memcpy(copy.to, copy.from, 16);
        groups.erase(groups.begin());
    }
}

template <typename T>
inline void multiply_tile(float* sums, const unsigned* left, const unsigned* right) {
    multiply_half<T>(sums, left[0], left[1], left[2], left[3], right[0], right[1]);
}

// Four matrices of 8 × 8 numbers; every lane shows the place of a row, whose two words of an address are what lanes exchange.
inline void load_matrices(unsigned* to, const void* from, bool is_turned) {
    unsigned own[2];
    std::memcpy(own, &from, sizeof own);
    const auto* shown = emulated::show(own, 2);
    const int lane = emulated::own_lane();
    for (int matrix = 0; matrix < 4; matrix++) {
        to[matrix] = 0;
        for (int half = 0; half < 2; half++) {
            const int row = is_turned ? lane % 4 * 2 + half : lane / 4, column = is_turned ? lane / 4 : lane % 4 * 2 + half;
            const uint16_t* place;
            std::memcpy(&place, shown[matrix * 8 + row], sizeof place);
            to[matrix] |= unsigned(place[column]) << 16 * half;
        }
    }
    emulated::own_warp().barrier.wait();
}
inline void load_tiles(unsigned* to, const void* from) { load_matrices(to, from, false); }
inline void load_turned(unsigned* to, const void* from) { load_matrices(to, from, true); }

template <int COUNT, typename T>
inline void read_side(const T* from, float* to) {
    for (int i = 0; i < COUNT; i++) to[i] = static_cast<float>(from[i]);
}

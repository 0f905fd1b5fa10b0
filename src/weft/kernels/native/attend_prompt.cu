// The body of the kernel; mlx writes its signature from the names in cuda_prompts.py.
// Causal attention of the lines of several prompts' chunks, each over its own prompt. A row of a chunk is (first line, lines, position of
// the first, place of what is held of earlier tokens, their capacity). Keys and values of the chunk's own tokens are lines (lines, HEADS, DIM);
// those of earlier ones are (HEADS, capacity, DIM) from place · HEADS · DIM on. A block: PAIRS pairs of a line and one of the GROUP query
// heads that share a key head; a warp: 16 of them. Keys pass KEYS at a time, from position 0 on: how a pair's numbers are added
// depends on its position alone, not on where its chunk begins or who is beside it. A pair that reads none of them adds zeros.
constexpr int PAIRS = 64, KEYS = 64, PIECES = DIM / 8;  // of 16 bytes
constexpr int TURNS = PIECES % 8 == 0 ? 7 : PIECES % 4 == 0 ? 3 : 0;
SHARED_POOL(uint4, memory);
uint4* const held_queries = memory;
uint4* const held_keys = held_queries + PAIRS * PIECES;
uint4* const held_values = held_keys + KEYS * PIECES;
const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4, head = blockIdx.y;
const int* const row = rows + 5 * tiles[2 * blockIdx.x];
const int first_pair = tiles[2 * blockIdx.x + 1], first = row[0], count = row[1], start = row[2];
const size_t earlier = (size_t(row[3]) * HEADS + size_t(head) * row[4]) * DIM;
const int last_pair = count * GROUP - 1, end = start + count;
auto place = [](int of, int piece) { return of * PIECES + (piece ^ (of & TURNS)); };  // eight rows that are read together meet no bank twice

#pragma unroll
for (int piece = threadIdx.x; piece < PAIRS * PIECES; piece += 128) {
    const int own = piece / PIECES, at = piece % PIECES, pair = min(first_pair + own, last_pair);
    const size_t from = (size_t(first + pair / GROUP) * HEADS * GROUP + head * GROUP + pair % GROUP) * DIM;
    copy_later(held_queries + place(own, at), queries + from + at * 8);
}
auto fetch = [&](const T* lines, const T* others, uint4* target, int block) {
#pragma unroll
    for (int piece = threadIdx.x; piece < KEYS * PIECES; piece += 128) {
        const int own = piece / PIECES, at = piece % PIECES, position = min(block * KEYS + own, end - 1);
        const T* from = position < start ? others + earlier + size_t(position) * DIM
                                         : lines + (size_t(first + position - start) * HEADS + head) * DIM;
        copy_later(target + place(own, at), from + at * 8);
    }
    close_copies();
};

const int first_position = start + first_pair / GROUP;
const int blocks = (start + min(first_pair + PAIRS - 1, last_pair) / GROUP) / KEYS + 1;
int limits[2];  // the last position that a pair reads
#pragma unroll
for (int half = 0; half < 2; half++) limits[half] = start + min(first_pair + warp * 16 + half * 8 + group, last_pair) / GROUP;
float outputs[DIM / 8][4] = {}, highest[2] = {-INFINITY, -INFINITY}, totals[2] = {};
fetch(keys, earlier_keys, held_keys, 0);
fetch(values, earlier_values, held_values, 0);
for (int block = 0; block < blocks; block++) {
    await_copies<1>();
    __syncthreads();
    float scores[KEYS / 8][4] = {};
#pragma unroll
    for (int part = 0; part < DIM / 32; part++) {
        unsigned asked[2][4];
        load_tiles(asked[0], held_queries + place(warp * 16 + lane % 16, part * 4 + lane / 16));
        load_tiles(asked[1], held_queries + place(warp * 16 + lane % 16, part * 4 + 2 + lane / 16));
#pragma unroll
        for (int tile = 0; tile < KEYS / 8; tile++) {
            unsigned some[4];
            load_tiles(some, held_keys + place(tile * 8 + lane % 8, part * 4 + lane / 8));
            multiply_tile<T>(scores[tile], asked[0], some);
            multiply_tile<T>(scores[tile], asked[1], some + 2);
        }
    }
    __syncthreads();
    if (block + 1 < blocks) fetch(keys, earlier_keys, held_keys, block + 1);
    else close_copies();

    const bool has_later = block * KEYS + KEYS - 1 > first_position;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = highest[half];
#pragma unroll
        for (int tile = 0; tile < KEYS / 8; tile++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                float& score = scores[tile][half * 2 + k];
                score = has_later && block * KEYS + tile * 8 + quad * 2 + k > limits[half] ? -INFINITY : score * SCALE;
                most = fmaxf(most, score);
            }
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
        const float fade = exp2f(highest[half] - most);
        highest[half] = most;
        totals[half] *= fade;
#pragma unroll
        for (int tile = 0; tile < KEYS / 8; tile++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                float& score = scores[tile][half * 2 + k];
                score = exp2f(score - most);
                totals[half] += score;
            }
#pragma unroll
        for (int tile = 0; tile < DIM / 8; tile++) outputs[tile][half * 2] *= fade, outputs[tile][half * 2 + 1] *= fade;
    }

    await_copies<1>();
    __syncthreads();
#pragma unroll
    for (int part = 0; part < KEYS / 16; part++) {
        const float *left = scores[part * 2], *right = scores[part * 2 + 1];
        const unsigned weights[4] = {pair_of<T>(left[0], left[1]), pair_of<T>(left[2], left[3]), pair_of<T>(right[0], right[1]),
                                     pair_of<T>(right[2], right[3])};
#pragma unroll
        for (int tile = 0; tile < DIM / 16; tile++) {
            unsigned some[4];
            load_turned(some, held_values + place(part * 16 + lane % 16, tile * 2 + lane / 16));
            multiply_tile<T>(outputs[tile * 2], weights, some);
            multiply_tile<T>(outputs[tile * 2 + 1], weights, some + 2);
        }
    }
    __syncthreads();
    if (block + 1 < blocks) fetch(values, earlier_values, held_values, block + 1);
    else close_copies();
}
#pragma unroll
for (int half = 0; half < 2; half++) {
    float total = totals[half] + __shfl_xor_sync(0xffffffff, totals[half], 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    const int pair = first_pair + warp * 16 + half * 8 + group;
    if (pair <= last_pair) {
        T* const to = out + (size_t(first + pair / GROUP) * HEADS * GROUP + head * GROUP + pair % GROUP) * DIM + quad * 2;
#pragma unroll
        for (int tile = 0; tile < DIM / 8; tile++)
            *reinterpret_cast<unsigned*>(to + tile * 8) =
                pair_of<T>(outputs[tile][half * 2] / total, outputs[tile][half * 2 + 1] / total);
    }
}

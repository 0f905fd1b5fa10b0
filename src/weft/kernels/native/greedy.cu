// The body of the kernel; mlx writes its signature from the names in cuda_paged.py.
// The likeliest token of each row of logits (B, V), the first of several, to `tokens`; the same and whether any logit is not finite to `report` (B, 2), which the
// host reads: it moves what it reads, so that must not be what the next step reads. A block: one row.
__shared__ float highest[THREADS / 32];
__shared__ int places[THREADS / 32], flags[THREADS / 32];
const int vocabulary = logits_shape[1], lane = threadIdx.x % 32, warp = threadIdx.x / 32;
const T* own = logits + size_t(blockIdx.x) * vocabulary;
float best = -INFINITY;
int place = vocabulary, is_bad = 0;
auto look = [&](float number, int at) {
    is_bad |= !(number < INFINITY);  // also where it is no number
    if (number > best || (number == best && at < place)) best = number, place = at;
};
const int vectors = vocabulary % COLUMNS == 0 ? vocabulary / COLUMNS : 0;
#pragma unroll 4
for (int vector = threadIdx.x; vector < vectors; vector += THREADS) {
    float numbers[COLUMNS];
    load_columns(own + vector * COLUMNS, numbers);
    for (int k = 0; k < COLUMNS; k++) look(numbers[k], vector * COLUMNS + k);
}
for (int at = vectors * COLUMNS + threadIdx.x; at < vocabulary; at += THREADS) look(static_cast<float>(own[at]), at);
for (int round = 0; round < 2; round++) {
    for (int step = 16; step; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffff, best, step);
        const int at = __shfl_xor_sync(0xffffffff, place, step);
        is_bad |= __shfl_xor_sync(0xffffffff, is_bad, step);
        if (other > best || (other == best && at < place)) best = other, place = at;
    }
    if (round == 1) break;
    if (lane == 0) highest[warp] = best, places[warp] = place, flags[warp] = is_bad;
    __syncthreads();
    if (warp > 0) return;
    best = lane < THREADS / 32 ? highest[lane] : -INFINITY;
    place = lane < THREADS / 32 ? places[lane] : vocabulary;
    is_bad = lane < THREADS / 32 ? flags[lane] : 0;
}
if (lane == 0) {
    if (best == -INFINITY) is_bad = 1, place = 0;
    tokens[blockIdx.x] = place;
    report[blockIdx.x * 2] = place;
    report[blockIdx.x * 2 + 1] = is_bad;
}

// The body of the kernel; mlx writes its signature from the names in cuda_paged.py.
// Attention of a step's queries (lines, HEADS · GROUP, KEY_DIM) over the keys and values of one page: partial sums of the values, the highest score and the
// sum of weights, to `partial` (W, T, HEADS · GROUP, VALUE_DIM + 2). A block: one page, one key head, one of the T tokens. A warp scores sixteen keys at a
// time by a matrix instruction; then each eight columns of the values have a thread in each of several teams, which take the keys in turn. With UNITES the
// last block of a line and key head puts together what all of them found, as unite_pages.cu does it, to `out`; `counters`, zeros before and after, count them.
constexpr int TEAM = VALUE_DIM / COLUMNS, TEAMS = THREADS / TEAM, WARPS = THREADS / 32, BLOCKS = (KEY_DIM + 31) / 32, EACH = (PAGE + TEAMS - 1) / TEAMS;
constexpr int AHEAD = EACH < 8 ? EACH : 8;
constexpr int SUMS = WARPS / 2 * GROUP * VALUE_DIM;
__shared__ float scores[GROUP][PAGE];
__shared__ float sums[SUMS];
const int entry = blockIdx.x, head = blockIdx.y, token = blockIdx.z, tokens = gridDim.z, row = pages[entry * 2], thread = threadIdx.x;
if (row < 0) return;
const int reach = rows[row * FIELDS + LENGTH] + token + 1 - (entry - rows[row * FIELDS + FIRST_PAGE]) * PAGE, count = min(reach, PAGE);
if (count <= 0) return;
const size_t base = (size_t(pages[entry * 2 + 1]) * HEADS + head) * PAGE;
const T* asked = queries + (size_t(row * tokens + token) * HEADS + head) * GROUP * KEY_DIM;
float* to = partial + ((size_t(entry) * tokens + token) * HEADS + head) * GROUP * (VALUE_DIM + 2);
const int lane = thread % 32, warp = thread / 32, group = lane / 4, quad = lane % 4;

for (int first = warp * 16; first < count; first += WARPS * 16) {
    uint4 above[BLOCKS], below[BLOCKS];
    float found[4] = {};
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
        const int column = block * 32 + quad * 8;
        const bool is_there = KEY_DIM % 32 == 0 || column < KEY_DIM;
        const uint4 none = {0, 0, 0, 0};
        above[block] = is_there && first + group < count ? *reinterpret_cast<const uint4*>(keys + (base + first + group) * KEY_DIM + column) : none;
        below[block] = is_there && first + group + 8 < count ? *reinterpret_cast<const uint4*>(keys + (base + first + group + 8) * KEY_DIM + column) : none;
    }
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
        const int column = block * 32 + quad * 8;
        uint4 query = {0, 0, 0, 0};
        if (group < GROUP && (KEY_DIM % 32 == 0 || column < KEY_DIM)) query = __ldg(reinterpret_cast<const uint4*>(asked + group * KEY_DIM + column));
        multiply_half<T>(found, above[block].x, below[block].x, above[block].y, below[block].y, query.x, query.y);
        multiply_half<T>(found, above[block].z, below[block].z, above[block].w, below[block].w, query.z, query.w);
    }
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (quad * 2 + k % 2 < GROUP) scores[quad * 2 + k % 2][first + group + k / 2 * 8] = found[k] * SCALE;
}
// The first values are on their way while the scores become weights.
const int column = thread % TEAM * COLUMNS, team = thread / TEAM;
uint4 held[AHEAD];
auto read_values = [&](int first) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (team + (first + i) * TEAMS < count)
            held[i] = *reinterpret_cast<const uint4*>(values + (base + team + (first + i) * TEAMS) * VALUE_DIM + column);
};
read_values(0);
__syncthreads();
for (int g = warp; g < GROUP; g += WARPS) {
    float highest = -INFINITY, total = 0.0f;
    for (int j = lane; j < count; j += 32) highest = fmaxf(highest, scores[g][j]);
    for (int step = 16; step; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, step));
    for (int j = lane; j < count; j += 32) {
        const float weight = __expf(scores[g][j] - highest);
        scores[g][j] = weight;
        total += weight;
    }
    total = sum_of_warp(total);
    if (lane == 0) to[g * (VALUE_DIM + 2) + VALUE_DIM] = highest, to[g * (VALUE_DIM + 2) + VALUE_DIM + 1] = total;
}
__syncthreads();
float sum[GROUP][COLUMNS] = {};
for (int first = 0; first < EACH; first += AHEAD) {
    if (first) read_values(first);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        const int at = team + (first + i) * TEAMS;
        if (at >= count) break;
        float numbers[COLUMNS];
        load_columns(reinterpret_cast<const T*>(&held[i]), numbers);
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            const float weight = scores[g][at];
#pragma unroll
            for (int k = 0; k < COLUMNS; k++) sum[g][k] += weight * numbers[k];
        }
    }
}
// Teams are added up in pairs, first those of one warp, then those of the warps.
#pragma unroll
for (int g = 0; g < GROUP; g++)
#pragma unroll
    for (int k = 0; k < COLUMNS; k++)
#pragma unroll
        for (int step = TEAM; step < 32; step *= 2) sum[g][k] += __shfl_xor_sync(0xffffffff, sum[g][k], step);
#pragma unroll
for (int half = WARPS / 2; half; half /= 2) {
    if (lane < TEAM && warp >= half && warp < 2 * half)
        for (int g = 0; g < GROUP; g++)
            for (int k = 0; k < COLUMNS; k++) sums[((warp - half) * GROUP + g) * VALUE_DIM + column + k] = sum[g][k];
    __syncthreads();
    if (lane < TEAM && warp < half)
        for (int g = 0; g < GROUP; g++)
            for (int k = 0; k < COLUMNS; k++) sum[g][k] += sums[(warp * GROUP + g) * VALUE_DIM + column + k];
    __syncthreads();
}
if (warp == 0 && lane < TEAM)
    for (int g = 0; g < GROUP; g++)
        for (int k = 0; k < COLUMNS; k++) to[g * (VALUE_DIM + 2) + column + k] = sum[g][k];
if constexpr (UNITES) {
    __shared__ int is_last;
    __shared__ Weighed weighed[GROUP];
    const int line = row * tokens + token, last = (rows[row * FIELDS + LENGTH] + token) / PAGE;
    __threadfence();
    __syncthreads();
    if (thread == 0) {
        int* counter = const_cast<int*>(counters) + line * HEADS + head;
        is_last = atomicAdd(counter, 1) == last;
        if (is_last) *counter = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    const size_t stride = size_t(tokens) * HEADS * GROUP * (VALUE_DIM + 2);
    const float* parts = partial + ((size_t(rows[row * FIELDS + FIRST_PAGE]) * tokens + token) * HEADS + head) * GROUP * (VALUE_DIM + 2);
    for (int g = warp; g < GROUP; g += WARPS) {
        const Weighed own = weigh_pages<VALUE_DIM>(parts + g * (VALUE_DIM + 2), stride, last);
        if (lane == 0) weighed[g] = own;
    }
    __syncthreads();
    for (int at = thread; at < GROUP * VALUE_DIM; at += THREADS) {
        const int g = at / VALUE_DIM, own_column = at % VALUE_DIM, own = head * GROUP + g;
        float united = rounded<T>(unite_column<VALUE_DIM>(parts + g * (VALUE_DIM + 2), stride, last, own_column, weighed[g]));
        if constexpr (IS_GATED)
            united /= 1.0f + expf(-static_cast<float>(projected[size_t(line) * projected_shape[1] + own * 2 * VALUE_DIM + VALUE_DIM + own_column]));
        out[(size_t(line) * HEADS * GROUP + own) * VALUE_DIM + own_column] = static_cast<T>(united);
    }
}

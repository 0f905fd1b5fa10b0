// The body of the kernel; mlx writes its signature from the names in cuda.py.
// A block: one span of one key head of one row. Thread t scores keys t, t + THREADS ...; then every eight columns of the
// values have a thread in each of TEAMS teams, which take the keys in turn and are summed at the end.
constexpr int TEAM = VALUE_DIM / COLUMNS;
constexpr int TEAMS = THREADS / TEAM;
constexpr int SCORES = GROUP * KEY_DIM;
constexpr int FIRST_USE = SCORES + GROUP * SPAN;
constexpr int SECOND_USE = TEAMS * GROUP * VALUE_DIM;
__shared__ float pool[FIRST_USE > SECOND_USE ? FIRST_USE : SECOND_USE];
float* query = pool;
float* score = pool + SCORES;

const int thread = threadIdx.x, head = blockIdx.y, row = blockIdx.z;
const int begin = max(bounds[2 * row], int(blockIdx.x) * SPAN);
const int end = min(bounds[2 * row + 1], (int(blockIdx.x) + 1) * SPAN);
if (begin >= end) return;
const int count = end - begin;
const size_t base = (size_t(slots[row]) * HEADS + head) * keys_shape[2];
const T* key = keys + (base + begin) * KEY_DIM;
const T* value = values + (base + begin) * VALUE_DIM;
float* out = partial + ((size_t(row) * HEADS + head) * gridDim.x + blockIdx.x) * GROUP * (VALUE_DIM + 2);

const T* asked = queries + (size_t(row) * HEADS + head) * GROUP * KEY_DIM;
for (int i = thread; i < GROUP * KEY_DIM; i += THREADS) query[i] = static_cast<float>(asked[i]) * SCALE;
__syncthreads();

for (int j = thread; j < count; j += THREADS) {
    float sum[GROUP];
    for (int g = 0; g < GROUP; g++) sum[g] = 0.0f;
#pragma unroll 8
    for (int d = 0; d < KEY_DIM; d += COLUMNS) {
        float k[COLUMNS];
        load_columns(key + size_t(j) * KEY_DIM + d, k);
        for (int g = 0; g < GROUP; g++)
            for (int i = 0; i < COLUMNS; i++) sum[g] += query[g * KEY_DIM + d + i] * k[i];
    }
    for (int g = 0; g < GROUP; g++) score[g * SPAN + j] = sum[g];
}
__syncthreads();

const int lane = thread % 32;
for (int g = thread / 32; g < GROUP; g += THREADS / 32) {
    float highest = -INFINITY;
    for (int j = lane; j < count; j += 32) highest = fmaxf(highest, score[g * SPAN + j]);
    for (int step = 16; step; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, step));
    float total = 0.0f;
    for (int j = lane; j < count; j += 32) {
        const float weight = __expf(score[g * SPAN + j] - highest);
        score[g * SPAN + j] = weight;
        total += weight;
    }
    for (int step = 16; step; step /= 2) total += __shfl_xor_sync(0xffffffff, total, step);
    if (lane == 0) {
        out[g * (VALUE_DIM + 2) + VALUE_DIM] = highest;
        out[g * (VALUE_DIM + 2) + VALUE_DIM + 1] = total;
    }
}
__syncthreads();

const int column = (thread % TEAM) * COLUMNS, team = thread / TEAM;
float sum[GROUP][COLUMNS];
for (int g = 0; g < GROUP; g++)
    for (int i = 0; i < COLUMNS; i++) sum[g][i] = 0.0f;
#pragma unroll 8
for (int j = team; j < count; j += TEAMS) {
    float v[COLUMNS];
    load_columns(value + size_t(j) * VALUE_DIM + column, v);
    for (int g = 0; g < GROUP; g++)
        for (int i = 0; i < COLUMNS; i++) sum[g][i] += score[g * SPAN + j] * v[i];
}
__syncthreads();
for (int g = 0; g < GROUP; g++)
    for (int i = 0; i < COLUMNS; i++) pool[(team * GROUP + g) * VALUE_DIM + column + i] = sum[g][i];
__syncthreads();
for (int i = thread; i < GROUP * VALUE_DIM; i += THREADS) {
    float total = 0.0f;
    for (int t = 0; t < TEAMS; t++) total += pool[t * GROUP * VALUE_DIM + i];
    out[(i / VALUE_DIM) * (VALUE_DIM + 2) + i % VALUE_DIM] = total;
}

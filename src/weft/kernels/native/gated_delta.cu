// The body of the kernel; mlx writes its signature from the names in cuda.py.
// Queries, keys and values, gates and betas may be parts of wider lines: each has the width of a line and the place of its first number.
// Row r has the lines from starts[r] to starts[r + 1]. Eight threads: one line of one head's state, KEY_DIM numbers, through all tokens
// of a row, one after the other, so that no bit depends on how many there are. They take the numbers in turn, four at a time.
constexpr int FOURS = KEY_DIM / 32;
const int part = threadIdx.x % 8, head = blockIdx.y, row = blockIdx.z, first = starts[row], end = starts[row + 1];
const int line = blockIdx.x * (THREADS / 8) + threadIdx.x / 8;
const size_t of_line = ((size_t(row) * HEADS + head) * VALUE_DIM + line) * KEY_DIM + part * 4;
float numbers[FOURS][4];
for (int i = 0; i < FOURS; i++) copy_numbers<4>(state + of_line + i * 32, numbers[i]);
const float rate = expf(static_cast<float>(log_rate[head])), shift = static_cast<float>(bias[head]);

alignas(16) T keys[FOURS][4], queries[FOURS][4];  // of the next token, read while the one before is computed
float fade, write, wanted;
auto read = [&](int place) {
    const size_t at = size_t(place) * KEY_WIDTH + head / GROUP * KEY_DIM + part * 4;
    for (int i = 0; i < FOURS; i++) {
        copy_numbers<4>(key + at + KEY_AT + i * 32, keys[i]);
        copy_numbers<4>(query + at + i * 32, queries[i]);
    }
    fade = static_cast<float>(fading[size_t(place) * GATE_WIDTH + FADING_AT + head]);
    write = static_cast<float>(writing[size_t(place) * GATE_WIDTH + WRITING_AT + head]);
    wanted = static_cast<float>(value[size_t(place) * VALUE_WIDTH + VALUE_AT + head * VALUE_DIM + line]);
};
if (first < end) read(first);
for (int place = first; place < end; place++) {
    float direction[FOURS][4], asked[FOURS][4];
    for (int i = 0; i < FOURS; i++)
        for (int k = 0; k < 4; k++) direction[i][k] = static_cast<float>(keys[i][k]), asked[i][k] = static_cast<float>(queries[i][k]);
    const float x = fade + shift, beta = 1.0f / (1.0f + expf(-write)), target = wanted;
    const float gate = expf(-rate * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)))));
    if (place + 1 < end) read(place + 1);
    float found = 0.0f, output = 0.0f;
    for (int i = 0; i < FOURS; i++)
        for (int k = 0; k < 4; k++) {
            numbers[i][k] *= gate;
            found += numbers[i][k] * direction[i][k];
        }
    for (int step = 4; step; step /= 2) found += __shfl_xor_sync(0xffffffff, found, step);
    const float change = beta * (target - found);
    for (int i = 0; i < FOURS; i++)
        for (int k = 0; k < 4; k++) {
            numbers[i][k] += change * direction[i][k];
            output += numbers[i][k] * asked[i][k];
        }
    for (int step = 4; step; step /= 2) output += __shfl_xor_sync(0xffffffff, output, step);
    if (part == 0) out[(size_t(place) * HEADS + head) * VALUE_DIM + line] = static_cast<T>(output);
    if (KEEPS_STATES)
        for (int i = 0; i < FOURS; i++)
            copy_numbers<4>(numbers[i], states + ((size_t(place) * HEADS + head) * VALUE_DIM + line) * KEY_DIM + part * 4 + i * 32);
}
for (int i = 0; i < FOURS; i++) copy_numbers<4>(numbers[i], last + of_line + i * 32);

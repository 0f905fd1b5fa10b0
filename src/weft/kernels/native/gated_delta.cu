// The body of the kernel; mlx writes its signature from the names in cuda.py.
// Queries, keys and values, gates and betas may be parts of wider lines: each has the width of a line and the place of its first number.
// Row r has the lines from starts[r] to starts[r + 1]. Eight threads: one line of one head's state, KEY_DIM numbers, through all tokens
// of a row, one after the other, so that no bit depends on how many there are; each has OWN neighbouring numbers.
constexpr int OWN = KEY_DIM / 8;
const int part = threadIdx.x % 8, head = blockIdx.y, row = blockIdx.z, end = starts[row + 1];
const int line = blockIdx.x * (THREADS / 8) + threadIdx.x / 8;
const size_t of_line = ((size_t(row) * HEADS + head) * VALUE_DIM + line) * KEY_DIM + part * OWN;
float numbers[OWN];
for (int i = 0; i < OWN; i++) numbers[i] = state[of_line + i];
const float rate = expf(static_cast<float>(log_rate[head])), shift = static_cast<float>(bias[head]);

alignas(16) T keys[OWN], queries[OWN];  // of the next token, read while the one before is computed
float fade, write, wanted;
auto read = [&](int place) {
    const size_t at = size_t(place) * KEY_WIDTH + head / GROUP * KEY_DIM + part * OWN;
    copy_numbers<OWN>(key + at + KEY_AT, keys);
    copy_numbers<OWN>(query + at, queries);
    fade = static_cast<float>(fading[size_t(place) * GATE_WIDTH + FADING_AT + head]);
    write = static_cast<float>(writing[size_t(place) * GATE_WIDTH + WRITING_AT + head]);
    wanted = static_cast<float>(value[size_t(place) * VALUE_WIDTH + VALUE_AT + head * VALUE_DIM + line]);
};
if (starts[row] < end) read(starts[row]);
for (int place = starts[row]; place < end; place++) {
    float direction[OWN], asked[OWN];
    for (int i = 0; i < OWN; i++) direction[i] = static_cast<float>(keys[i]), asked[i] = static_cast<float>(queries[i]);
    const float x = fade + shift, beta = 1.0f / (1.0f + expf(-write)), target = wanted;
    const float gate = expf(-rate * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)))));
    if (place + 1 < end) read(place + 1);
    float found = 0.0f, output = 0.0f;
    for (int i = 0; i < OWN; i++) {
        numbers[i] *= gate;
        found += numbers[i] * direction[i];
    }
    for (int step = 4; step; step /= 2) found += __shfl_xor_sync(0xffffffff, found, step);
    const float change = beta * (target - found);
    for (int i = 0; i < OWN; i++) {
        numbers[i] += change * direction[i];
        output += numbers[i] * asked[i];
    }
    for (int step = 4; step; step /= 2) output += __shfl_xor_sync(0xffffffff, output, step);
    if (part == 0) out[(size_t(place) * HEADS + head) * VALUE_DIM + line] = static_cast<T>(output);
    if (KEEPS_STATES)
        for (int i = 0; i < OWN; i++)
            states[((size_t(place) * HEADS + head) * VALUE_DIM + line) * KEY_DIM + part * OWN + i] = numbers[i];
}
for (int i = 0; i < OWN; i++) last[of_line + i] = numbers[i];

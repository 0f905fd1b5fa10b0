// The body of the kernel; mlx writes its signature from the names in cuda.py.
// A warp: one line of one head's state, KEY_DIM numbers, through all tokens of a row; a lane has every 32nd of them.
constexpr int OWN = KEY_DIM / 32;
const int lane = threadIdx.x % 32, head = blockIdx.y, row = blockIdx.z, count = tokens[0];
const int line = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
const size_t of_head = size_t(row) * HEADS + head;
float numbers[OWN];
for (int i = 0; i < OWN; i++) numbers[i] = state[(of_head * VALUE_DIM + line) * KEY_DIM + i * 32 + lane];
const float rate = expf(static_cast<float>(log_rate[head])), shift = static_cast<float>(bias[head]);

for (int token = 0; token < count; token++) {
    const size_t place = size_t(row) * count + token;
    const float x = static_cast<float>(fading[place * HEADS + head]) + shift;
    const float gate = expf(-rate * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)))));
    const float beta = 1.0f / (1.0f + expf(-static_cast<float>(writing[place * HEADS + head])));
    const size_t first = (place * (HEADS / GROUP) + head / GROUP) * KEY_DIM + lane;
    float direction[OWN], found = 0.0f, output = 0.0f;
    for (int i = 0; i < OWN; i++) {
        direction[i] = static_cast<float>(key[first + i * 32]);
        numbers[i] *= gate;
        found += numbers[i] * direction[i];
    }
    for (int step = 16; step; step /= 2) found += __shfl_xor_sync(0xffffffff, found, step);
    const float change = beta * (static_cast<float>(value[(place * HEADS + head) * VALUE_DIM + line]) - found);
    for (int i = 0; i < OWN; i++) {
        numbers[i] += change * direction[i];
        output += numbers[i] * static_cast<float>(query[first + i * 32]);
    }
    for (int step = 16; step; step /= 2) output += __shfl_xor_sync(0xffffffff, output, step);
    if (lane == 0) out[(place * HEADS + head) * VALUE_DIM + line] = static_cast<T>(output);
    if (KEEPS_STATES)
        for (int i = 0; i < OWN; i++)
            states[((place * HEADS + head) * VALUE_DIM + line) * KEY_DIM + i * 32 + lane] = numbers[i];
}
for (int i = 0; i < OWN; i++) last[(of_head * VALUE_DIM + line) * KEY_DIM + i * 32 + lane] = numbers[i];

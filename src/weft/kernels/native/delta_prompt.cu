// The body of the kernel; mlx writes its signature from the names in ragged.py.
// The gated delta rule over the lines of several prompts' chunks. Row r has the lines from starts[r] to starts[r + 1]. Queries, keys and
// values, gates and betas may be parts of wider lines: each has the width of a line and the place of its first number. Eight threads: OWN lines
// of one head's state, KEY_DIM numbers each, through all tokens of a row, one after the other, so that no bit depends on how many there are
// or where a prompt is cut, nor on OWN. A block: LINES lines of a head. Tokens pass through shared memory BATCH at a time, the next
// ones on their way while these are computed; their keys and queries become floats once for all lines of a block.
//
// With a state S, gate g, key k, query q, value v and beta b the next state is g S + c k, where c = b (v - g S k), and the output is its product
// with q, g S q + c (k q). So both products with S are of the state before, and a token waits for one sum over threads, not two.
constexpr int BATCH = KEY_DIM > 128 ? 8 : 16, LINES = 16 * OWN, PIECES = KEY_DIM / 8, TIMES = KEY_DIM / 32;
__shared__ uint4 raw_keys[BATCH * PIECES], raw_queries[BATCH * PIECES], all_values[2][BATCH * LINES / 8];
__shared__ float4 all_keys[BATCH * TIMES * 8], all_queries[BATCH * TIMES * 8], factors[BATCH];  // gate, beta, product of key and query
const int lane = threadIdx.x % 32, part = threadIdx.x % 8, group = threadIdx.x / 8, first_line = group * OWN, head = blockIdx.y, row = blockIdx.z;
const int first = starts[row], end = starts[row + 1], line = blockIdx.x * LINES + first_line;
const size_t of_line = ((size_t(row) * HEADS + head) * VALUE_DIM + line) * KEY_DIM + part * 4;
const float rate = expf(static_cast<float>(log_rate[head])), shift = static_cast<float>(bias[head]);
float4 numbers[OWN][TIMES];
float fade = 0.0f, write = 0.0f;  // of token `group` of a batch
#pragma unroll
for (int j = 0; j < OWN; j++)
#pragma unroll
    for (int i = 0; i < TIMES; i++) numbers[j][i] = *reinterpret_cast<const float4*>(state + of_line + j * KEY_DIM + i * 32);

auto fetch = [&](int from) {  // the tokens from this line on
    const int tokens = min(BATCH, end - from), at = (from - first) / BATCH % 2;
    for (int piece = threadIdx.x; piece < tokens * PIECES; piece += 128) {
        const size_t where = size_t(from + piece / PIECES) * KEY_WIDTH + head / GROUP * KEY_DIM + piece % PIECES * 8;
        copy_later(&raw_keys[piece], key + where + KEY_AT);
        copy_later(&raw_queries[piece], query + where);
    }
    for (int piece = threadIdx.x; piece < tokens * (LINES / 8); piece += 128) {
        const size_t where = size_t(from + piece / (LINES / 8)) * VALUE_WIDTH + VALUE_AT + head * VALUE_DIM + blockIdx.x * LINES;
        copy_later(&all_values[at][piece], value + where + piece % (LINES / 8) * 8);
    }
    close_copies();
    if (group < tokens && part == 0) {
        fade = static_cast<float>(fading[size_t(from + group) * GATE_WIDTH + FADING_AT + head]);
        write = static_cast<float>(writing[size_t(from + group) * GATE_WIDTH + WRITING_AT + head]);
    }
};

if (first < end) fetch(first);
for (int from = first; from < end; from += BATCH) {
    const int tokens = min(BATCH, end - from), at = (from - first) / BATCH % 2;
    await_copies<0>();
    __syncthreads();
    if (group < BATCH) {  // eight threads: a token
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < TIMES; i++) {
            float here[4], asked[4];
            read_side<4>(reinterpret_cast<const T*>(raw_keys) + group * KEY_DIM + i * 32 + part * 4, here);
            read_side<4>(reinterpret_cast<const T*>(raw_queries) + group * KEY_DIM + i * 32 + part * 4, asked);
#pragma unroll
            for (int k = 0; k < 4; k++) dot = __fmaf_rn(here[k], asked[k], dot);
            all_keys[(group * TIMES + i) * 8 + part] = {here[0], here[1], here[2], here[3]};
            all_queries[(group * TIMES + i) * 8 + part] = {asked[0], asked[1], asked[2], asked[3]};
        }
        for (int step = 4; step; step /= 2) dot += __shfl_xor_sync(0xffffffff, dot, step);
        const float x = fade + shift;
        if (part == 0) factors[group] = {expf(-rate * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))))), 1.0f / (1.0f + expf(-write)), dot, 0.0f};
    }
    __syncthreads();
    if (from + BATCH < end) fetch(from + BATCH);
    const T* const some_values = reinterpret_cast<const T*>(all_values[at]) + first_line;
    T* const to = out + (size_t(from) * HEADS + head) * VALUE_DIM + line;
    float4 next_keys[TIMES], next_queries[TIMES], next_factor;  // of the token behind, where there are registers for them
    auto read_token = [&](int token) {
#pragma unroll
        for (int i = 0; i < TIMES; i++) {
            next_keys[i] = all_keys[(token * TIMES + i) * 8 + part];
            next_queries[i] = all_queries[(token * TIMES + i) * 8 + part];
        }
        next_factor = factors[token];
    };
    if constexpr (OWN < 4) read_token(0);
#pragma unroll 2
    for (int token = 0; token < tokens; token++) {
        if constexpr (OWN == 4) next_factor = factors[token];
        const float4 factor = next_factor;
        const float gate = factor.x, beta = factor.y;
        float4 direction[TIMES], queries[TIMES];
        float found[OWN], output[OWN], changes[OWN];
#pragma unroll
        for (int i = 0; i < TIMES; i++) {
            direction[i] = OWN == 4 ? all_keys[(token * TIMES + i) * 8 + part] : next_keys[i];
            if constexpr (OWN < 4) queries[i] = next_queries[i];
        }
        if constexpr (OWN < 4) read_token(min(token + 1, BATCH - 1));
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            float even = 0.0f, odd = 0.0f;
#pragma unroll
            for (int i = 0; i < TIMES; i++) {
                even = __fmaf_rn(numbers[j][i].x, direction[i].x, even), odd = __fmaf_rn(numbers[j][i].y, direction[i].y, odd);
                even = __fmaf_rn(numbers[j][i].z, direction[i].z, even), odd = __fmaf_rn(numbers[j][i].w, direction[i].w, odd);
            }
            found[j] = even + odd;
        }
        {
            float even[OWN] = {}, odd[OWN] = {};
#pragma unroll
            for (int i = 0; i < TIMES; i++) {
                const float4 asked = OWN == 4 ? all_queries[(token * TIMES + i) * 8 + part] : queries[i];
#pragma unroll
                for (int j = 0; j < OWN; j++) {
                    even[j] = __fmaf_rn(numbers[j][i].x, asked.x, even[j]), odd[j] = __fmaf_rn(numbers[j][i].y, asked.y, odd[j]);
                    even[j] = __fmaf_rn(numbers[j][i].z, asked.z, even[j]), odd[j] = __fmaf_rn(numbers[j][i].w, asked.w, odd[j]);
                }
            }
#pragma unroll
            for (int j = 0; j < OWN; j++) output[j] = even[j] + odd[j];
        }
        if constexpr (OWN == 4) {  // each thread ends with one of the eight sums: fewer shuffles, the same additions
            const bool is_output = part & 4, is_second = part & 2, is_odd = part & 1;
            float four[4], two[2];
#pragma unroll
            for (int j = 0; j < 4; j++)
                four[j] = (is_output ? output[j] : found[j]) + __shfl_xor_sync(0xffffffff, is_output ? found[j] : output[j], 4);
#pragma unroll
            for (int j = 0; j < 2; j++)
                two[j] = (is_second ? four[j + 2] : four[j]) + __shfl_xor_sync(0xffffffff, is_second ? four[j] : four[j + 2], 2);
            const float sum = (is_odd ? two[1] : two[0]) + __shfl_xor_sync(0xffffffff, is_odd ? two[0] : two[1], 1);
            const float number = static_cast<float>(some_values[token * LINES + part % 4]);
            const float change = __fmul_rn(beta, __fmaf_rn(-gate, sum, number));  // of threads that have no output
#pragma unroll
            for (int j = 0; j < 4; j++) changes[j] = __shfl_sync(0xffffffff, change, lane / 8 * 8 + j);
            const float own = is_second ? (is_odd ? changes[3] : changes[2]) : (is_odd ? changes[1] : changes[0]);
            if (is_output) to[size_t(token) * HEADS * VALUE_DIM + part % 4] = static_cast<T>(__fmaf_rn(gate, sum, __fmul_rn(own, factor.z)));
        } else {
#pragma unroll
            for (int step = 4; step; step /= 2)
#pragma unroll
                for (int j = 0; j < OWN; j++) {
                    found[j] += __shfl_xor_sync(0xffffffff, found[j], step);
                    output[j] += __shfl_xor_sync(0xffffffff, output[j], step);
                }
#pragma unroll
            for (int j = 0; j < OWN; j++) {
                const float number = static_cast<float>(some_values[token * LINES + j]);
                changes[j] = __fmul_rn(beta, __fmaf_rn(-gate, found[j], number));
                if (part == 0)
                    to[size_t(token) * HEADS * VALUE_DIM + j] = static_cast<T>(__fmaf_rn(gate, output[j], __fmul_rn(changes[j], factor.z)));
            }
        }
#pragma unroll
        for (int j = 0; j < OWN; j++)
#pragma unroll
            for (int i = 0; i < TIMES; i++) {
                numbers[j][i].x = __fmaf_rn(changes[j], direction[i].x, __fmul_rn(gate, numbers[j][i].x));
                numbers[j][i].y = __fmaf_rn(changes[j], direction[i].y, __fmul_rn(gate, numbers[j][i].y));
                numbers[j][i].z = __fmaf_rn(changes[j], direction[i].z, __fmul_rn(gate, numbers[j][i].z));
                numbers[j][i].w = __fmaf_rn(changes[j], direction[i].w, __fmul_rn(gate, numbers[j][i].w));
            }
    }
}
#pragma unroll
for (int j = 0; j < OWN; j++)
#pragma unroll
    for (int i = 0; i < TIMES; i++) *reinterpret_cast<float4*>(last + of_line + j * KEY_DIM + i * 32) = numbers[j][i];

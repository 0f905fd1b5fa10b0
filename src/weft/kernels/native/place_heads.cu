// The body of the kernel; mlx writes its signature from the names in cuda_paged.py.
// What attention needs of a step's projections (lines, queries + keys + values): queries and keys normalised and turned by their positions; queries to
// `queries` (lines, HEADS, DIM), keys and values in place to their pages. A warp: one head of one line. Of gated layers each query is followed by its gate.
__shared__ float shared[THREADS / 32][DIM];
const int lane = threadIdx.x % 32, own = threadIdx.x / 32, unit = blockIdx.x * (THREADS / 32) + own, line = blockIdx.y;
const int tokens = projected_shape[0] / rows_shape[0], row = line / tokens, token = line % tokens;
if (unit < HEADS + 2 * KEY_HEADS) {
    constexpr int WIDE = IS_GATED ? 2 * DIM : DIM;
    const bool is_query = unit < HEADS, is_value = unit >= HEADS + KEY_HEADS;
    const int head = is_query ? unit : is_value ? unit - HEADS - KEY_HEADS : unit - HEADS;
    const T* from = projected + size_t(line) * projected_shape[1] + (is_query ? unit * WIDE : HEADS * WIDE + (unit - HEADS) * DIM);
    float* numbers = shared[own];
    float squares = 0.0f;
    for (int at = lane; at < DIM; at += 32) {
        numbers[at] = static_cast<float>(from[at]);
        squares += numbers[at] * numbers[at];
    }
    if (HAS_NORMS && !is_value) {
        const float factor = rsqrtf(sum_of_warp(squares) / DIM + (is_query ? QUERY_EPS : KEY_EPS));
        const auto* weight = is_query ? query_norm : key_norm;
        for (int at = lane; at < DIM; at += 32) numbers[at] = rounded<T>(rounded<T>(numbers[at] * factor) * static_cast<float>(weight[at]));
    }
    __syncwarp();
    T* to = is_query ? queries + (size_t(line) * HEADS + head) * DIM
                     : const_cast<T*>(is_value ? values : keys) + place_of<KEY_HEADS, DIM>(rows, pages, row, token, head);
    const float position = ROPE_SCALE * static_cast<float>(rows[row * FIELDS + POSITION] + token);
    for (int at = lane; at < DIM; at += 32) {
        float found = numbers[at];
        if (!is_value && at < ROTATED) {
            const int pair = IS_TRADITIONAL ? at / 2 : at % (ROTATED / 2), first = IS_TRADITIONAL ? pair * 2 : pair;
            const int second = IS_TRADITIONAL ? first + 1 : first + ROTATED / 2;
            const float share = static_cast<float>(pair) / static_cast<float>(ROTATED / 2);
            const float speed = HAS_FREQUENCIES ? static_cast<float>(1.0 / static_cast<float>(frequencies[pair])) : exp2f(-share * ROPE_BASE);
            const float angle = position * speed, cosine = cosf(angle), sine = sinf(angle);
            found = at == first ? numbers[first] * cosine - numbers[second] * sine : numbers[first] * sine + numbers[second] * cosine;
        }
        to[at] = static_cast<T>(found);
    }
}

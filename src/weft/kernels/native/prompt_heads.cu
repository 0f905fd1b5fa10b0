// The body of the kernel; mlx writes its signature from the names in ragged.py.
// Of projections (lines, queries + keys + values): queries and keys normalised and turned by their positions, and values as they are, each lines of their
// own (lines, heads, DIM). Of gated layers each query is followed by its gate. `cosines` and `sines` (lines, ROTATED / 2) are those of each line's position.
// A warp: one head of one line; a thread: eight neighbouring numbers at a time.
__shared__ float shared[THREADS / 32][DIM];
const int lane = threadIdx.x % 32, own = threadIdx.x / 32, unit = blockIdx.x * (THREADS / 32) + own, line = blockIdx.y;
if (unit < HEADS + 2 * KEY_HEADS) {
    constexpr int WIDE = IS_GATED ? 2 * DIM : DIM, HALF = ROTATED / 2;
    const bool is_query = unit < HEADS, is_value = unit >= HEADS + KEY_HEADS;
    const int head = is_query ? unit : is_value ? unit - HEADS - KEY_HEADS : unit - HEADS;
    const T* from = projected + size_t(line) * projected_shape[1] + (is_query ? unit * WIDE : HEADS * WIDE + (unit - HEADS) * DIM);
    T* to = is_query ? queries + (size_t(line) * HEADS + head) * DIM : (is_value ? values : keys) + (size_t(line) * KEY_HEADS + head) * DIM;
    float* numbers = shared[own];
    float squares = 0.0f;
    for (int at = lane * COLUMNS; at < DIM; at += 32 * COLUMNS) {
        load_columns(from + at, numbers + at);
        for (int k = 0; k < COLUMNS; k++) squares = __fmaf_rn(numbers[at + k], numbers[at + k], squares);
    }
    if (HAS_NORMS && !is_value) {
        const float factor = rsqrtf(sum_of_warp(squares) / DIM + (is_query ? QUERY_EPS : KEY_EPS));
        const auto* weight = is_query ? query_norm : key_norm;
        for (int at = lane * COLUMNS; at < DIM; at += 32 * COLUMNS)
            for (int k = 0; k < COLUMNS; k++)
                numbers[at + k] = rounded<T>(rounded<T>(numbers[at + k] * factor) * static_cast<float>(weight[at + k]));
    }
    __syncwarp();
    for (int at = lane * COLUMNS; at < DIM; at += 32 * COLUMNS) {
        float found[COLUMNS];
        for (int k = 0; k < COLUMNS; k++) {
            const int place = at + k;
            found[k] = numbers[place];
            if (!is_value && place < ROTATED) {
                const int pair = IS_TRADITIONAL ? place / 2 : place % HALF, first = IS_TRADITIONAL ? pair * 2 : pair;
                const int second = IS_TRADITIONAL ? first + 1 : first + HALF;
                const float cosine = cosines[size_t(line) * HALF + pair], sine = sines[size_t(line) * HALF + pair];
                found[k] = place == first ? __fmaf_rn(numbers[first], cosine, -__fmul_rn(numbers[second], sine))
                                          : __fmaf_rn(numbers[first], sine, __fmul_rn(numbers[second], cosine));
            }
        }
        store_columns(found, to + at);
    }
}

// The body of the kernel; mlx writes its signature from the names in cuda_paged.py.
// What attention over a row's pages found, put together, to `out` (lines, HEADS, VALUE_DIM); of gated layers times the sigmoid of the head's gate, which
// follows its query in `projected`. A block: one query head of one line; a thread per column.
const int column = threadIdx.x, head = blockIdx.y, line = blockIdx.z, tokens = gridDim.z / rows_shape[0], row = line / tokens, token = line % tokens;
const int last = (rows[row * FIELDS + LENGTH] + token) / PAGE;
const float* part = partial + ((size_t(rows[row * FIELDS + FIRST_PAGE]) * tokens + token) * HEADS + head) * (VALUE_DIM + 2);
const size_t stride = size_t(tokens) * HEADS * (VALUE_DIM + 2);
float found = rounded<T>(unite_column<VALUE_DIM>(part, stride, last, column, weigh_pages<VALUE_DIM>(part, stride, last)));
if constexpr (IS_GATED) found /= 1.0f + expf(-static_cast<float>(projected[size_t(line) * projected_shape[1] + head * 2 * VALUE_DIM + VALUE_DIM + column]));
out[(size_t(line) * HEADS + head) * VALUE_DIM + column] = static_cast<T>(found);

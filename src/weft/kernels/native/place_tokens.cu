// The body of the kernel; mlx writes its signature from the names in cuda_paged.py.
// Copy keys and values of a step's new tokens, (B, HEADS, T, dim) each, in place to their pages. A block: one head of one line.
const int head = blockIdx.x, tokens = new_keys_shape[2], row = blockIdx.y / tokens, token = blockIdx.y % tokens;
const size_t from = (size_t(row) * HEADS + head) * tokens + token;
T* key = const_cast<T*>(keys) + place_of<HEADS, KEY_DIM>(rows, pages, row, token, head);
T* value = const_cast<T*>(values) + place_of<HEADS, VALUE_DIM>(rows, pages, row, token, head);
for (int at = threadIdx.x; at < KEY_DIM; at += blockDim.x) key[at] = new_keys[from * KEY_DIM + at];
for (int at = threadIdx.x; at < VALUE_DIM; at += blockDim.x) value[at] = new_values[from * VALUE_DIM + at];
if (blockIdx.x + blockIdx.y + threadIdx.x == 0) done[0] = 0;

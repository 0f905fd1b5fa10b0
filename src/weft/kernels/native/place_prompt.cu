// The body of the kernel; mlx writes its signature from the names in cuda_paged.py.
// Copy keys and values of a row's tokens, (1, HEADS, tokens, dim) each, in place to its pages, whose numbers are in `own`. A thread: eight numbers.
const int tokens = new_keys_shape[2], vectors = (KEY_DIM + VALUE_DIM) / COLUMNS;
const int at = blockIdx.x * blockDim.x + threadIdx.x, vector = at % vectors, token = at / vectors % tokens, head = at / vectors / tokens;
if (head < HEADS) {
    const size_t from = size_t(head) * tokens + token, to = (size_t(own[token / PAGE]) * HEADS + head) * PAGE + token % PAGE;
    const int column = vector * COLUMNS;
    if (column < KEY_DIM)
        copy_numbers<COLUMNS>(new_keys + from * KEY_DIM + column, const_cast<T*>(keys) + to * KEY_DIM + column);
    else
        copy_numbers<COLUMNS>(new_values + from * VALUE_DIM + column - KEY_DIM, const_cast<T*>(values) + to * VALUE_DIM + column - KEY_DIM);
}
if (at == 0) done[0] = 0;

// The body of the kernel; mlx writes its signature from the names in cuda_paged.py.
// Copy keys and values of the tokens of ROWS rows, each in arrays of its own (1, HEADS, capacity, dim), in place to their pages. `own` has of each row: its slot,
// its tokens, the capacities of its keys and values, and where its page numbers begin in `numbers`. A thread: eight numbers.
constexpr int VECTORS = (KEY_DIM + VALUE_DIM) / COLUMNS;
const T* const all_keys[] = {NEW_KEYS};
const T* const all_values[] = {NEW_VALUES};
const int* const row = own + ROW_NUMBERS * blockIdx.y;
const int tokens = row[1], at = blockIdx.x * blockDim.x + threadIdx.x, vector = at % VECTORS, token = at / VECTORS % max(tokens, 1), head = at / VECTORS / max(tokens, 1);
if (tokens > 0 && head < HEADS) {
    const T *new_keys = all_keys[0], *new_values = all_values[0];
#pragma unroll
    for (int i = 1; i < ROWS; i++)
        if (blockIdx.y == i) new_keys = all_keys[i], new_values = all_values[i];
    const size_t to = (size_t(numbers[row[4] + token / PAGE]) * HEADS + head) * PAGE + token % PAGE;
    const int column = vector * COLUMNS;
    if (column < KEY_DIM)
        copy_numbers<COLUMNS>(new_keys + (size_t(head) * row[2] + token) * KEY_DIM + column, const_cast<T*>(keys) + to * KEY_DIM + column);
    else
        copy_numbers<COLUMNS>(new_values + (size_t(head) * row[3] + token) * VALUE_DIM + column - KEY_DIM,
                              const_cast<T*>(values) + to * VALUE_DIM + column - KEY_DIM);
}
if (at == 0 && blockIdx.y == 0) done[0] = 0;

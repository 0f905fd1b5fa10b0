// The body of the kernel; mlx writes its signature from the names in cuda_paged.py.
// Copy the states of ROWS rows, each in arrays of its own, the convolution's last columns (1, KEPT, CHANNELS) and (1, NUMBERS …) of the rule, in place to their
// slots. `own` as in place_prompts.cu; a column's place is by its token. A thread: four numbers of a state, or a column's number.
const T* const all_columns[] = {NEW_COLUMNS};
const float* const all_states[] = {NEW_STATES};
const T* new_columns = all_columns[0];
const float* new_state = all_states[0];
#pragma unroll
for (int i = 1; i < ROWS; i++)
    if (blockIdx.y == i) new_columns = all_columns[i], new_state = all_states[i];
const int* const row = own + ROW_NUMBERS * blockIdx.y;
const int slot = row[0], length = row[1], at = blockIdx.x * blockDim.x + threadIdx.x, fours = NUMBERS / 4;
if (at < fours)
    copy_numbers<4>(new_state + size_t(at) * 4, const_cast<float*>(state) + size_t(slot) * NUMBERS + at * 4);
else if (at - fours < KEPT * CHANNELS) {
    const int column = (at - fours) / CHANNELS, channel = (at - fours) % CHANNELS, place = (length - KEPT + column + RING) % RING;
    const_cast<T*>(columns)[(size_t(slot) * RING + place) * CHANNELS + channel] = new_columns[at - fours];
}
if (at == 0 && blockIdx.y == 0) done[0] = 0;

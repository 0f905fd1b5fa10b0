// The body of the kernel; mlx writes its signature from the names in cuda_paged.py.
// Copy the states of one row, the convolution's last columns (1, KEPT, CHANNELS) and (1, NUMBERS …) of the rule, in place to its slot. `own`: its slot, and
// how many tokens it holds, by which columns have their places. A thread: four numbers of the state, or a column's number.
const int slot = own[0], length = own[1], at = blockIdx.x * blockDim.x + threadIdx.x, fours = NUMBERS / 4;
if (at < fours)
    copy_numbers<4>(new_state + size_t(at) * 4, const_cast<float*>(state) + size_t(slot) * NUMBERS + at * 4);
else if (at - fours < KEPT * CHANNELS) {
    const int column = (at - fours) / CHANNELS, channel = (at - fours) % CHANNELS, place = (length - KEPT + column + RING) % RING;
    const_cast<T*>(columns)[(size_t(slot) * RING + place) * CHANNELS + channel] = new_columns[at - fours];
}
if (at == 0) done[0] = 0;

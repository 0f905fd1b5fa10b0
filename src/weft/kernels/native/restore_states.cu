// The body of the kernel; mlx writes its signature from the names in cuda_paged.py.
// Give rows that keep fewer than all of a step's tokens the state after the last one they keep, of those `kept` after each line, in place.
const int row = blockIdx.y, tokens = kept_shape[0] / rows_shape[0], count = counts[row], at = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
if (at < NUMBERS && count < tokens)
    copy_numbers<4>(kept + (size_t(row) * tokens + count - 1) * NUMBERS + at, const_cast<float*>(state) + size_t(rows[row * FIELDS + SLOT]) * NUMBERS + at);
if (blockIdx.x + blockIdx.y + threadIdx.x == 0) done[0] = 0;

// The body of the kernel; mlx writes its signature from the names in cuda_paged.py.
// The rows of the next step: each holds one token more.
const int at = blockIdx.x * blockDim.x + threadIdx.x, field = at % FIELDS;
if (at < rows_shape[0] * FIELDS) next[at] = rows[at] + (field == LENGTH || field == POSITION ? 1 : 0);

// The body of the kernel; mlx writes its signature from the names in cuda_paged.py.
// The next input token of each row: one of those that were sampled last, by its place there, or one that is given.
const int at = blockIdx.x * blockDim.x + threadIdx.x;
if (at < places_shape[0]) tokens[at] = places[at] < 0 ? given[at] : sampled[places[at]];

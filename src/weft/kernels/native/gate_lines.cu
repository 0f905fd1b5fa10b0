// The body of the kernel; mlx writes its signature from the names in ragged.py.
// Of lines x (lines, WIDTH) SiLU of the first half times the second. A thread: eight numbers.
constexpr int HALF = WIDTH / 2, PIECES = HALF / 8;
const int piece = blockIdx.x * blockDim.x + threadIdx.x, line = piece / PIECES, at = piece % PIECES * 8;
const T* const from = x + size_t(line) * WIDTH + at;
float gate[8], up[8];
read_side<8>(from, gate);
read_side<8>(from + HALF, up);
#pragma unroll
for (int i = 0; i < 8; i++) up[i] *= gate[i] / (1.0f + expf(-gate[i]));
const uint4 found = {pair_of<T>(up[0], up[1]), pair_of<T>(up[2], up[3]), pair_of<T>(up[4], up[5]), pair_of<T>(up[6], up[7])};
*reinterpret_cast<uint4*>(out + size_t(line) * HALF + at) = found;

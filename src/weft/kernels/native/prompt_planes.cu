// The body of the kernel; mlx writes its signature from the names in cuda_prompts.py.
// A row's keys and values, lines (lines, HEADS, DIM), laid out as its cache keeps them, (HEADS, capacity, DIM), with zeros behind the last
// token. `row` as in attend_prompt.cu. A thread: 16 bytes of both.
constexpr int PIECES = DIM / 8;
const int first = row[0], count = row[1], capacity = row[4];
const int piece = blockIdx.x * blockDim.x + threadIdx.x, at = piece % PIECES, token = piece / PIECES % capacity, head = piece / PIECES / capacity;
if (head < HEADS) {
    const size_t from = (size_t(first + min(token, count - 1)) * HEADS + head) * PIECES + at;
    const uint4 none = {0, 0, 0, 0};
    reinterpret_cast<uint4*>(key_plane)[piece] = token < count ? reinterpret_cast<const uint4*>(keys)[from] : none;
    reinterpret_cast<uint4*>(value_plane)[piece] = token < count ? reinterpret_cast<const uint4*>(values)[from] : none;
}

// The body of the kernel; mlx writes its signature from the names in cuda.py.
// A block: one query head of one row; a thread per column.
const int column = threadIdx.x, head = blockIdx.y, row = blockIdx.z;
const int spans = partial_shape[2], first = bounds[2 * row] / SPAN, last = (bounds[2 * row + 1] - 1) / SPAN;
const int stride = GROUP * (VALUE_DIM + 2);
const float* part = partial + (size_t(row) * HEADS + head / GROUP) * spans * stride + (head % GROUP) * (VALUE_DIM + 2);
float highest = HAS_SINKS ? sinks[head] : -INFINITY;
for (int s = first; s <= last; s++) highest = fmaxf(highest, part[s * stride + VALUE_DIM]);
float total = HAS_SINKS ? __expf(sinks[head] - highest) : 0.0f, sum = 0.0f;
for (int s = first; s <= last; s++) {
    const float share = __expf(part[s * stride + VALUE_DIM] - highest);
    total += share * part[s * stride + VALUE_DIM + 1];
    sum += share * part[s * stride + column];
}
out[(size_t(row) * HEADS * GROUP + head) * VALUE_DIM + column] = static_cast<T>(sum / total);

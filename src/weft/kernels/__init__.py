"""How weft computes: CPU, CUDA and attention kernels, and the matrix product under MLX on Linux."""

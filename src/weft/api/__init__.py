"""HTTP only: JSON in, events out. No token ids, no mlx."""

"""The front's side of the seam: who waits for what, and the engine's process. Never imports mlx."""

"""The front at run time: models, requests in flight, engine processes, and the server around them. Never imports mlx."""

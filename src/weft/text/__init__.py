"""What a conversation means: text ⇄ ids, templates. Pure Python, no mlx, no I/O beyond reading a model's own files."""

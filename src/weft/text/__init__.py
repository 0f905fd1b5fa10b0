"""The text layer: chat templates, tokenizing, output parsing and grammars. Pure Python: no mlx, reads only the model's files."""

"""The text layer: chat templates, tokenizing, output parsing and grammars. Imports no mlx; reads only the model's files."""

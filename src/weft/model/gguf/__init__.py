"""A GGUF file of architecture llama or qwen2 becomes a folder that mlx-lm loads: weights, config and tokenizer.

`file` reads, `config` and `tokenizer` say what the metadata means, `folder` writes. `resolve` calls `convert` and puts
`FORMAT` into the names of cached folders.
"""

from weft.model.gguf.file import read
from weft.model.gguf.folder import FORMAT, convert

__all__ = ["FORMAT", "convert", "read"]

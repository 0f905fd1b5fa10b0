"""The model room: a name becomes a folder (`resolve`), a folder becomes a loaded model (`loader`).

The only room that imports mlx_lm. This file imports nothing, so naming the room costs nothing.
"""

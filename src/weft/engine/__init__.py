"""The token world: ids in, ids out. `engine.py` is the loop; read it first."""

"""Python runs this at start when this folder is on PYTHONPATH: a rival's MLX then finds weft's BLAS loaded already.

The rival's own environment has no weft, so the one file is loaded from its place. `bench.compare.rivals` uses it.
"""

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

source = Path(__file__).parents[3] / "src" / "weft" / "kernels" / "blas.py"
loader = SourceFileLoader("weft_blas", str(source))
spec = spec_from_loader(loader.name, loader)
assert spec is not None
blas = sys.modules[loader.name] = module_from_spec(spec)  # a dataclass looks itself up there
loader.exec_module(blas)
blas.bind()

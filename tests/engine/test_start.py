"""An engine starts without the package that mlx-lm imports for tokenizers, unless its mlx-lm can not do without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

START = """
import sys
from weft.engine.process import import_mlx_lm
from weft.kernels import blas

blas.bind()
import_mlx_lm()
import mlx_lm.utils

print(*(name for name in ("mlx_lm.utils", "transformers") if name in sys.modules), callable(mlx_lm.utils.load_model))
"""


def started(**environment: str) -> str:
    settings = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", START], env=settings, capture_output=True, text=True, check=True).stdout.strip()


def test_mlx_lm_comes_without_transformers() -> None:
    assert started() == "mlx_lm.utils True"


def test_a_transformers_that_is_there_already_stays_as_it_is() -> None:
    import transformers

    from weft.engine.process import import_mlx_lm

    import_mlx_lm()
    assert sys.modules["transformers"] is transformers


def test_an_mlx_lm_that_needs_more_of_transformers_gets_it(tmp_path: Path) -> None:
    (tmp_path / "mlx_lm").mkdir()
    (tmp_path / "mlx_lm" / "__init__.py").write_text("from . import utils")
    (tmp_path / "mlx_lm" / "utils.py").write_text("import transformers\nload_model = transformers.Loader().load")
    (tmp_path / "transformers.py").write_text("class Loader:\n    def load(self): ...")
    assert started(PYTHONPATH=str(tmp_path)) == "mlx_lm.utils transformers True"

"""Tests that need Ray (`make test-ray`); where it is not installed they are left out."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

collect_ignore_glob = [] if (Path(sys.executable).parent / "ray").exists() else ["test_*.py"]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short name: Ray's sockets lie below it, and their names have a limit."""
    folder = Path(tempfile.mkdtemp(prefix="w", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)

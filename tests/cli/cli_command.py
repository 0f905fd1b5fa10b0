"""The command as a user runs it, in a process of its own: no network, nothing of the user's own files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WEFT = [sys.executable, "-m", "weft"]


def environment(home: Path, **more: str) -> dict[str, str]:
    """An environment with a home of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WEFT_", "HF_", "XDG_"))}
    own = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "HF_HOME": str(home / "hf")}
    return {**kept, **own, "HF_HUB_OFFLINE": "1", **more}


def weft(home: Path, *arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run weft in `home` to its end."""
    return subprocess.run(
        [*WEFT, *arguments], cwd=home, env=environment(home, **variables), input=stdin,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

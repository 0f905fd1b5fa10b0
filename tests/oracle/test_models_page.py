"""docs/models.md says how each architecture is held; the page is written by this file and checked against the adapters.

Run `python tests/oracle/test_models_page.py` to write it anew.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"
MARK = "<!-- the table below is written by tests/oracle/test_models_page.py -->\n"
WORDS = {
    "seam": "all rows in one forward; attention reads each row's slab",
    "plain": "one forward per slab, under a length mask",
    "alone": "row by row, each on its own caches",
}


def table(folder_of: Callable[[str], Path]) -> str:
    from driver import adapter_for
    from zoo import ABSENT, ARCHITECTURES

    lines = ["| architecture | way | why not a better one |", "|---|---|---|"]
    for name in sorted(ARCHITECTURES):
        adapter = adapter_for(folder_of(name))
        reason = adapter.refused.get("plain") or adapter.refused.get("seam") or ""
        lines.append(f"| {name} | {adapter.way} | {_short(reason)} |")
    lines += ["", "Not in the test suite, so checked only at load:", "", "| architecture | reason |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in sorted(ABSENT.items())]
    return "\n".join(lines) + "\n"


def _short(reason: str) -> str:
    """The first clause, without figures: those move in their last digit."""
    return reason.split("\n")[0].split(" by ")[0].split(". The following")[0].replace("|", "/")[:110]


def test_the_page_says_how_each_architecture_is_held(checkpoint: Callable[[str], Path]) -> None:
    written = PAGE.read_text(encoding="utf-8").split(MARK)[1]

    assert written == table(checkpoint)


if __name__ == "__main__":
    from weft.kernels import blas

    blas.bind()
    from zoo import make_checkpoint

    root = Path(tempfile.mkdtemp())
    head = PAGE.read_text(encoding="utf-8").split(MARK)[0]
    PAGE.write_text(head + MARK + table(lambda name: make_checkpoint(name, root / name)), encoding="utf-8")

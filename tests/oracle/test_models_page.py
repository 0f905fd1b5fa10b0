"""docs/models.md says how each architecture is held; the page is written by this file and checked against the adapters.

Run `python tests/oracle/test_models_page.py` to write it anew.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weft.kernels import blas

if __name__ == "__main__":
    blas.bind()  # before mlx is imported

from zoo import ABSENT, ARCHITECTURES, make_checkpoint

if TYPE_CHECKING:
    from weft.model.adapter import Adapter

PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"
# Lines that other versions of mlx-lm in the range have in place of the page's: the mask of 0.32.0's phixtral looks at no cache.
OTHER_VERSIONS = {"| phixtral | alone | logits differ |"}
MARK = "<!-- the table below is written by tests/oracle/test_models_page.py -->\n"


def line_of(name: str, adapter: Adapter) -> str:
    reason = adapter.refused.get("plain") or adapter.refused.get("seam") or ""
    return f"| {name} | {adapter.way} | {_short(reason)} |"


def _short(reason: str) -> str:
    """The first clause, without figures: those move in their last digit."""
    return reason.split("\n")[0].split(" by ")[0].split(". The following")[0].replace("|", "/")[:110]


def table(lines: list[str]) -> str:
    """The page below its mark."""
    absent = [f"| {name} | {reason} |" for name, reason in sorted(ABSENT.items())]
    head = ["| architecture | way | why not a better one |", "|---|---|---|"]
    middle = ["", "Not in the test suite, so checked only at load:", "", "| architecture | reason |", "|---|---|"]
    return "\n".join([*head, *lines, *middle, *absent]) + "\n"


def written() -> str:
    return PAGE.read_text(encoding="utf-8").split(MARK)[1]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_page_says_how_the_architecture_is_held(build: Callable[[str], Adapter], name: str) -> None:
    assert line_of(name, build(name)) in {*written().splitlines(), *OTHER_VERSIONS}


def test_the_page_has_a_line_for_each_architecture_and_no_other() -> None:
    lines = [line for line in written().splitlines() if line.startswith("| ") and line.split(" | ")[0][2:] in ARCHITECTURES]

    assert [line.split(" | ")[0][2:] for line in lines] == sorted(ARCHITECTURES)
    assert written() == table(lines)


if __name__ == "__main__":
    from driver import adapter_for

    root = Path(tempfile.mkdtemp())
    rows = [line_of(name, adapter_for(make_checkpoint(name, root / name))) for name in sorted(ARCHITECTURES)]
    head = PAGE.read_text(encoding="utf-8").split(MARK)[0]
    PAGE.write_text(head + MARK + table(rows), encoding="utf-8")

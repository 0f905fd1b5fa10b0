"""The command line: parameters that commands share, and how commands print tables, JSON and files.

Commands live in the modules of this package, one function each; `main` lists them. Importing any of these modules is cheap:
mlx, tokenizers and the server are imported by the functions that need them.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from weft.errors import WeftError

Switch = Annotated[bool, Parameter(negative="", show_default=False)]
Show = Annotated[Switch, Parameter(name="--print")]
AsJson = Annotated[Switch, Parameter(name="--json", help="Print what the server says as JSON.")]
Url = Annotated[str | None, Parameter(help="The server's address. Default: WEFT_URL, else http://127.0.0.1:8400.")]
ApiKey = Annotated[str | None, Parameter(help="The server's key. Default: WEFT_API_KEY.")]
ChosenModel = Annotated[str | None, Parameter(help="The model, where the server has several.")]


def write_columns(rows: list[tuple[str, ...]]) -> None:
    """Print a table to stdout; the first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")


def write_json(value: Any) -> None:
    """Print a value to stdout as indented JSON, its paths as strings."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a WeftError which says that `path` can not be written."""
    try:
        yield
    except OSError as error:
        raise WeftError(f"{path} can not be written: {error.strerror}") from error


def spelling_hint(name: str, known: Iterable[str], otherwise: str) -> str:
    """The question whether the known name nearest to `name` was meant; `otherwise` where none is near."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {close[0]!r}?" if close else otherwise

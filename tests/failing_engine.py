"""The engine's real process, with a model of which a layer fails in earnest when it reads certain tokens.

Its first argument says how, by token: {"3001": "abort"}. Its second one does the same for tokens that fail once and never again,
in this process or another: the third one is a folder that remembers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from weft.engine import process
from weft.kernels import blas

blas.bind()
process.import_mlx_lm()

from failing_layers import FAILURES, Fail, break_fused_steps, break_layer  # noqa: E402 - after the binding
from weft.model import loader  # noqa: E402


def main() -> None:
    always, once, folder, address = json.loads(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    load_model = loader.load

    def load(*arguments: Any, **options: Any) -> loader.LoadedModel:
        loaded = load_model(*arguments, **options)
        failures = {token: FAILURES[name] for token, name in always.items()}
        failures |= {token: unless_there_is(folder / token, FAILURES[name]) for token, name in once.items()}
        for token, fail in failures.items():
            break_layer(loaded.model, int(token), fail)
            break_fused_steps(int(token), fail)
        return loaded

    loader.load = load
    sys.argv = [sys.argv[0], address]
    process.main()


def unless_there_is(mark: Path, fail: Fail) -> Fail:
    """Fail while there is no such file; the first time the token is read makes it."""

    def fail_once(output: Any, tokens: Any, token: int) -> Any:
        if mark.exists() or not (tokens == token).any().item():
            return output
        mark.touch()
        return fail(output, tokens, token)

    return fail_once


if __name__ == "__main__":
    main()

"""weft, an LLM inference server: many requests share one running batch, each gets the answer it would have had alone.

`from weft import LLM, Sampling` is the in-process way in. Nothing heavy is imported until `LLM` is asked for.
"""

from typing import TYPE_CHECKING, Any

from weft.ipc.limits import Sampling

if TYPE_CHECKING:
    from weft.llm import LLM, Result

__version__ = "0.1.0"
__all__ = ["LLM", "Result", "Sampling", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "Result"):
        from weft import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")

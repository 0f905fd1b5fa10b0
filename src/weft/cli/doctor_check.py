"""`weft doctor --check MODEL`: a report on one model and this machine, to paste into an issue.

It loads the model into this process as `weft serve` would, computes answers in several ways and compares them, token by token
and bit by bit, and measures what batching, caching and drafts are worth.
"""

import os
import platform
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal

from weft.cli.doctor import Finding, check_versions, print_finding
from weft.errors import WeftError

if TYPE_CHECKING:
    from weft.engine.self_check import Comparison
    from weft.llm import LLM

LENGTHS = (180, 160, 7, 24, 41, 96, 58, 131)  # of the prompts: the first is the longest, the second shares most of it
SHARED = 120
TEXTS = (
    "The harbour was quiet that morning. Two boats came in with the tide, and the men on the quay counted the crates of fish. ",
    "A list of animals with their legs: dog 4, hen 2, ant 6, spider 8, snake 0, cat 4, duck 2, bee 6. A list of colours: ",
    "def add(first, second):\n    return first + second\n\n\ndef multiply(first, second):\n    return first * second\n\n\n",
    "Question: how long does light take from the sun to the earth? Answer: about eight minutes and twenty seconds. Question: ",
)
REPORT_IT = "please report it with all lines of this report"


def check_model(console: Console, model: str, *, exact: bool = False) -> int:
    """Print the report on a model line by line as it is made; returns 1 if something that is promised does not hold."""
    findings = []
    console.print(f"weft doctor --check {model}{' --exact' if exact else ''}")
    for finding in examine_model(console, model, exact=exact):
        print_finding(console, finding)
        findings.append(finding)
    is_wrong = any(finding.grade == "wrong" for finding in findings)
    console.print("something that weft promises does not hold here" if is_wrong else "everything promised here holds")
    return 1 if is_wrong else 0


def examine_model(console: Console, model: str, *, exact: bool) -> Iterator[Finding]:
    """Load a model and yield what was found; a terminal shows which check runs."""
    yield check_versions()
    try:
        from weft.llm import LLM  # binds the BLAS, so it comes before whoever else imports mlx

        llm = LLM(model, exact=exact, progress=True)
    except (ImportError, OSError, RuntimeError, WeftError) as error:
        yield Finding("wrong", "model", f"{model} can not be loaded: {error}")
        return
    yield from _describe(llm)
    with console.status("") as status:
        yield from examine_loaded(llm, on_start=status.update)


def examine_loaded(llm: "LLM", on_start: Callable[[str], object]) -> Iterator[Finding]:
    """Yield the findings on a model that is loaded: the comparisons, then the speeds. `on_start` gets the name of each."""
    from weft.engine.self_check import SelfCheck, Speeds

    adapter, prompts = llm.engine.adapter, make_prompts(llm)
    for what, check in SelfCheck(adapter, llm.config, prompts, SHARED).checks.items():
        on_start(what)
        yield _run(what, check)
    speeds = Speeds(adapter, llm.config, prompts[0])
    for what, measure in (("batch", speeds.measure_batch), ("cache", speeds.measure_cache), ("drafts", speeds.measure_drafts)):
        on_start(what)
        try:
            yield Finding("ok", what, measure())
        except (RuntimeError, WeftError) as error:
            yield Finding("wrong", what, f"{type(error).__name__}: {error}", REPORT_IT)


def make_prompts(llm: "LLM") -> list[list[int]]:
    """Return prompts of LENGTHS, shorter ones where the model's context asks for it; the second begins as the first does."""
    most = llm.engine.limits.context_length // 4
    texts = [list(islice(cycle(llm.encode(text)), size)) for text, size in zip(cycle(TEXTS), LENGTHS, strict=False)]
    first, second, *others = texts
    return [prompt[:most] for prompt in (first, [*first[:SHARED], *second[: LENGTHS[1] - SHARED]], *others)]


def judge(what: str, found: "Comparison") -> Finding:
    """Grade a comparison: equal is ok; unequal is wrong where equality is promised, and only worth knowing elsewhere."""
    if found.is_equal:
        return Finding("ok", what, str(found))
    if found.is_promised:
        return Finding("wrong", what, str(found), REPORT_IT)
    return Finding("differs", what, str(found), "not promised with these settings")


def _run(what: str, check: "Callable[[], Comparison]") -> Finding:
    from weft.engine.self_check import NotChecked

    try:
        return judge(what, check())
    except NotChecked as reason:
        return Finding("ok", what, f"not checked: {reason}")
    except (RuntimeError, WeftError) as error:
        return Finding("wrong", what, f"{type(error).__name__}: {error}", REPORT_IT)


def _describe(llm: "LLM") -> Iterator[Finding]:
    """Yield what the model, the machine and its numerics are."""
    from weft.llm import BLAS

    adapter, config = llm.engine.adapter, llm.config
    kinds = f"{len(adapter.specs)} layers, weights {decimal(adapter.weights_bytes)}, vocabulary {adapter.vocab_size:,}"
    yield Finding("ok", "model", f"{adapter.name}: {kinds}, context {adapter.context_length:,}")
    yield Finding("ok", "machine", f"{platform.platform()} {platform.machine()}, {os.cpu_count()} cores, MLX on {llm.device}")
    sources = ", ".join(llm.engine.speculation.names) or "none"
    products = "MLX's" if BLAS.name == "none" else BLAS.name
    facts = {
        "products": "weft's own for CUDA" if llm.device == "cuda" and adapter.is_row_invariant else products,
        "rows": adapter.way,
        "row-invariant": "yes" if adapter.is_row_invariant else "no",
        "cuts": "free" if adapter.cuts_freely else "own",
        "width": str(config.width or "as many rows as there are"),
        "prompts together": f"{adapter.grouping}, {'of any' if adapter.ragged else 'of equal'} lengths",
        "drafts": sources,
    }
    exact = "exact" if config.exact else "not exact: answers may depend on the crowd by rounding; --exact promises otherwise"
    yield Finding("ok", "numerics", f"{exact}; {', '.join(f'{name} {value}' for name, value in facts.items())}")

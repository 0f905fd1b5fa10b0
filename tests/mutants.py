"""Breaks the guards of `guards.py` one at a time, each in a copy of src/, and runs the test that must then fail: `make mutants`.

A mutant is red when its test fails, as it should. One that stays green is a guard without a test, and one that breaks imports,
collection or fixtures shows nothing: both make the exit status 1. Each test is first run without a mutant and must pass.
For a mutant of the CPU kernels (kernels/native/, C) the copy's kernels are compiled anew.
"""

from __future__ import annotations

import ast
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from guards import GUARDS, Guard

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
AT_ONCE = 2  # tests at the same time
MAX_CPU_SECONDS = 60  # of a test that turns for ever; those of the list need less than ten
HANG_SECONDS = "40"  # of a test that waits for what does not come any more
MAX_SECONDS = 900.0  # of one that waits for ever; a busy machine is slow
COMPILER = ["cc", "-shared", "-fPIC", "-O2", "-std=gnu11", "-ffp-contract=off", "-fvisibility=hidden", "-o"]  # as in setup.py
# A test that fails like this has met a mutant that is no program, not a promise that is broken.
NO_PROGRAM = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError")

Verdict = Literal["red", "green", "broken", "hung"]


@dataclass(frozen=True)
class Outcome:
    """How a test ended, the first line of what it said, and after how many seconds."""

    verdict: Verdict
    words: str
    seconds: float


def main(names: list[str]) -> int:
    """Run the mutants of these names, or all of them, and print how each test ended; return the exit status."""
    chosen = [guard for guard in GUARDS if guard.name in names] if names else GUARDS
    unknown = sorted(set(names) - {guard.name for guard in chosen})
    if faults := [*(f"{name}: there is no such guard" for name in unknown), *find_faults(chosen)]:
        print(*faults, sep="\n")
        return 1
    started, num_red = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="weft-mutants-") as base, ThreadPoolExecutor(AT_ONCE) as pool:
        tests = list(dict.fromkeys(guard.test for guard in chosen))
        folders = [Path(base, str(number)) for number in range(len(tests) + len(chosen))]
        without = dict(zip(tests, pool.map(run_test, tests, [SOURCE] * len(tests), folders), strict=True))
        for guard, outcome in zip(chosen, pool.map(run_mutant, chosen, folders[len(tests) :]), strict=True):
            is_red = outcome.verdict == "red" and without[guard.test].verdict == "green"
            num_red += is_red
            print(
                f"{outcome.verdict:6} {outcome.seconds:6.1f} s  {guard.name:25} {guard.test}\n  {outcome.words[:120]}", flush=True
            )
            if not is_red:
                print(f"  FAILED: {guard.why} ({without[guard.test].verdict} without the mutant)", flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = f"{time.monotonic() - started:.0f} seconds, {used.ru_utime + used.ru_stime:.0f} of processor time"
    print(f"{num_red} of {len(chosen)} mutants are red ({seconds})")
    return int(num_red < len(chosen))


def find_faults(guards: Iterable[Guard]) -> Iterator[str]:
    """Yield what is wrong with guards: a text that is not there exactly once, a mutant that is no Python, a test that is lost."""
    seen: set[str] = set()
    for guard in guards:
        if guard.name in seen:
            yield f"{guard.name}: there are two guards of this name"
        seen.add(guard.name)
        if (count := guard.path(SOURCE).read_text().count(guard.text)) != 1:
            yield f"{guard.name}: its text is {count} times in {guard.file}, not once"
            continue
        try:
            ast.parse(mutated(guard, SOURCE) if guard.file.endswith(".py") else "")
        except SyntaxError as error:
            yield f"{guard.name}: its mutant is no Python: {error}"
        file, *names = guard.test.partition("[")[0].split("::")
        if not names or not (ROOT / file).is_file() or not _has(ast.parse((ROOT / file).read_text()), names):
            yield f"{guard.name}: there is no test {guard.test}"


def _has(scope: ast.Module | ast.ClassDef, names: list[str]) -> bool:
    """Whether a file, or a class in it, has this test: a function, a class, or a method of a class."""
    found = [one for one in scope.body if isinstance(one, ast.FunctionDef | ast.ClassDef) and one.name == names[0]]
    return bool(found) and (len(names) == 1 or (isinstance(found[0], ast.ClassDef) and _has(found[0], names[1:])))


def mutated(guard: Guard, source: Path) -> str:
    return guard.path(source).read_text().replace(guard.text, guard.mutant)


def run_mutant(guard: Guard, folder: Path) -> Outcome:
    """Run a guard's test on a copy of the source, made in `folder`, that has the mutant in the guard's place."""
    source = Path(shutil.copytree(SOURCE, folder / "src"))  # with the compiled library
    path = guard.path(source)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()
    path.write_text(mutated(guard, source))
    try:
        refusal = None if path.suffix == ".py" else compile_kernels(source)
        return Outcome("broken", refusal, 0.0) if refusal else run_test(guard.test, source, folder)
    finally:
        shutil.rmtree(source)


def compile_kernels(source: Path) -> str | None:
    """Compile the CPU kernels of this source where its library is; return why that failed, or None."""
    kernels = source / "weft" / "kernels"
    library = next(kernels.glob("_blas.*.so"), None)
    if library is None:
        return "weft was installed without its CPU kernels"
    command = [*COMPILER, library, kernels / "native" / "sgemm.c", "-ldl", "-lm", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.partition("\n")[0] or "the compiler failed" if done.returncode else None


def run_test(test: str, source: Path, folder: Path) -> Outcome:
    """Run one test on this source; what it leaves behind is put into `folder`."""
    folder.mkdir(exist_ok=True)
    report, limit = folder / "report.xml", ["sh", "-c", f'ulimit -t {MAX_CPU_SECONDS}; exec "$@"', "sh"]
    options = ["-x", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0", f"--basetemp={folder / 'tests'}"]
    paths = {
        "PYTHONPATH": os.pathsep.join([str(source), str(ROOT / "tests")]),
        "WEFT_TEST_HANG_SECONDS": HANG_SECONDS,
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),  # a mutant's examples are not remembered
    }
    command, started = [*limit, sys.executable, "-m", "pytest", *options, f"--junitxml={report}", test], time.monotonic()
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | paths, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status: int | None = process.wait(MAX_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):  # nothing that the test started is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Outcome(*_verdict(status, report, (folder / "output").read_text()), time.monotonic() - started)


def _verdict(status: int | None, report: Path, output: str) -> tuple[Verdict, str]:
    """Return the verdict and the first line of the failure, from pytest's exit status and its report."""
    if status == 0:
        return "green", ""
    if status is None or status < 0:
        return "hung", "it did not end in time"
    cases = list(ElementTree.parse(report).iter("testcase")) if report.is_file() else []
    failures, errors = (
        [found.get("message", "") for case in cases for found in case.iter(kind)] for kind in ("failure", "error")
    )
    words = next(iter([*failures, *errors, *output.strip().splitlines()[-1:]]), "").partition("\n")[0]
    return "red" if status == 1 and failures and not words.startswith(NO_PROGRAM) else "broken", words


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

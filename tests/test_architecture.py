"""The house is built as drawn: imports are read from the source and compared with the picture."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "weft"

# The picture of docs/architecture.md: eleven rooms (page/ has no Python), each with the rooms below it that it may use, and
# the modules at the top. Nothing imports upward.
COMMON = {"errors", "config", "log", "metrics", "fair_pool"}
MAY_USE: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "log": set(),
    "metrics": {"log"},
    "fair_pool": set(),
    "vocabulary": {"errors"},
    "ipc": COMMON,
    "text": COMMON | {"ipc", "vocabulary"},
    "memory": COMMON | {"ipc"},
    "kernels": COMMON | {"memory"},
    "grammar": COMMON | {"ipc", "vocabulary"},
    "model": COMMON | {"ipc", "kernels", "memory"},
    "engine": COMMON | {"grammar", "ipc", "kernels", "memory", "model"},
    "serving": COMMON | {"ipc", "kernels", "memory", "model", "text"},
    "api": COMMON | {"__init__", "ipc", "serving", "text"},
    "llm": COMMON | {"engine", "ipc", "kernels", "model", "serving", "text"},
    "cli": COMMON | {"__init__", "api", "engine", "llm", "model", "serving", "text"},
    "page": set(),
    "__init__": {"ipc", "llm"},
    "__main__": {"cli"},
}
# Whoever is imported by the front, or must be testable without a device.
WITHOUT_MLX = [
    "weft",
    "weft.kernels.blas",
    "weft.memory.disk",
    "weft.memory.prefix_tree",
    "weft.cli",
    "weft.cli.client",
    "weft.cli.launch",
    "weft.cli.models",
    "weft.cli.run",
    "weft.cli.serve",
    "weft.engine.draft_policy",
    "weft.engine.lookup",
    "weft.engine.process",
    "weft.engine.scheduler",
    "weft.engine.sequence",
    "weft.grammar.compiler",
    "weft.model.resolve",
    "weft.serving.registry",
    "weft.serving.server",
    "weft.api.app",  # the whole front
]


def _room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def _imports(path: Path) -> set[str]:
    """Dotted names of everything a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(_tree(path)):
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom(level=0, module=str(module)):
                names.add(module)
                names |= {f"{module}.{alias.name}" for alias in node.names if module == "weft"}
            case ast.ImportFrom():
                raise AssertionError(f"{path}: imports are written in full, not relative")
    return names


def _rooms_used(path: Path) -> set[str]:
    used = set()
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] != "weft":
            continue
        room = parts[1] if len(parts) > 1 else None
        if room is None:
            continue  # `from weft import x` is listed as weft.x as well
        used.add(room if (SOURCE / room).exists() or (SOURCE / f"{room}.py").exists() else "__init__")
    return used


FILES = sorted(SOURCE.rglob("*.py"))


def test_a_room_uses_only_the_rooms_below_it() -> None:
    upward = {str(path): _rooms_used(path) - {_room(path)} - MAY_USE[_room(path)] for path in FILES}

    assert {path: rooms for path, rooms in upward.items() if rooms} == {}


def test_only_the_model_and_its_kernels_import_mlx_lm() -> None:
    users = {_room(path) for path in FILES if any(name.split(".")[0] == "mlx_lm" for name in _imports(path))}

    assert users == {"kernels", "model"}


def test_one_file_alone_imports_ray() -> None:
    assert [path.name for path in FILES if any(name.split(".")[0] == "ray" for name in _imports(path))] == ["ray_driver.py"]


def test_nothing_that_is_received_can_be_a_program() -> None:
    unsafe = {"pickle", "marshal", "shelve", "cloudpickle", "dill"}
    called = {ast.unparse(node.func) for _, node in _nodes(ast.Call) if isinstance(node, ast.Call)}

    assert {name for path in FILES for name in _imports(path)} & unsafe == set()
    assert {name for name in called if name in ("eval", "exec") or name.endswith("_pyobj")} == set()


def test_there_are_the_rooms_of_the_picture_and_no_others() -> None:
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}

    assert rooms == {*["api", "cli", "engine", "grammar", "ipc", "kernels", "memory", "model", "page", "serving", "text"]}


def test_importing_it_does_not_load_mlx() -> None:
    code = f"""
import importlib, sys
for module in {WITHOUT_MLX}:
    importlib.import_module(module)
    if "mlx" in sys.modules:
        sys.exit(f"{{module}} imports mlx")
"""

    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True).stderr == ""


def test_the_front_starts_without_what_only_engines_need() -> None:
    heavy = ("mlx", "mlx_lm", "numpy", "transformers", "huggingface_hub", "llguidance")
    code = f"import sys, weft.serving.server, weft.api.app; print(*{{name.split('.')[0] for name in sys.modules}} & {{*{heavy}}})"

    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == []


def test_nothing_weft_needs_needs_torch() -> None:
    seen, waiting = set(), ["weft"]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        waiting += [re.split(r"[\s<>=!~;\[(]", need)[0].lower() for need in needs if "extra ==" not in need]

    assert "mlx-lm" in seen
    assert "torch" not in seen


def _nodes(*kinds: type[ast.AST]) -> list[tuple[Path, ast.AST]]:
    trees = ((path, _tree(path)) for path in FILES)
    return [(path, node) for path, tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]


def _repeated(names: Iterable[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def test_no_name_stands_for_two_classes() -> None:
    assert _repeated(node.name.lstrip("_") for _, node in _nodes(ast.ClassDef)) == set()  # type: ignore[attr-defined]


def test_no_name_stands_for_two_modules() -> None:
    modules = [path.stem for path in FILES if not path.stem.startswith("__")]

    assert _repeated(modules) <= {"request", "reply"}  # of the dialects


def test_no_function_takes_more_than_six_parameters() -> None:
    theirs = {
        "gated_delta_update",
        "scaled_dot_product_attention",
        "ssm_update",
        "recurrent_gla",
    }  # called by mlx-lm's models, with its own parameters
    long = set()
    for path, node in _nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        arguments = node.args  # type: ignore[attr-defined]
        names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        if len(set(names) - {"self", "cls"}) > 6 and node.name not in theirs:  # type: ignore[attr-defined]
            long.add(f"{path.relative_to(SOURCE)}: {node.name}")  # type: ignore[attr-defined]

    assert long == set()


def test_a_sequence_is_written_by_its_own_module_and_two_others() -> None:
    (tree,) = (node for path, node in _nodes(ast.ClassDef) if node.name == "Sequence" and path.name == "sequence.py")  # type: ignore[attr-defined]
    own = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self"
    }
    writers = {
        path.name
        for path, node in _nodes(ast.Attribute)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in own
        if re.fullmatch(r"(\w+\.)?(sequence|row|fork|first)", ast.unparse(node.value))
    }

    assert 10 < len(own) <= 22
    assert writers <= {"runner.py", "prefix.py"}


def test_the_reader_of_imports_sees_an_upward_import(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text("def later():\n    from weft.engine import engine\n    from weft import llm\n")

    assert _rooms_used(file) == {"engine", "llm"}

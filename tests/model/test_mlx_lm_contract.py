"""What mlx-lm's model files ask of a cache, read from their source and compared with a committed list.

Weft hands its own caches to mlx-lm's models, so a new mlx-lm that touches another name, or attends past the one
function weft replaces, must fail here, by module and name, before it fails in a batch. The list is that of one version;
other versions may touch less, and of what is more only the names in OTHER_VERSIONS. Running this file as a program
rewrites the list.
"""

import ast
import importlib.metadata
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

EXPECTED = Path(__file__).with_name("mlx_lm_cache_names.json")
LISTED = json.loads(EXPECTED.read_text(encoding="utf-8"))
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
CACHE_NAME = re.compile(r"^(c|c_\w+|\w+_cache|cache|cache_slot)$")
DIRECT_ATTENTION = "mx.fast.scaled_dot_product_attention"  # models are to call the function of base.py instead
Names = dict[str, list[str]]

# Names that other versions in the range touch beyond the list, by module: 0.32.1 has muse_spark under another name.
OTHER_VERSIONS: Names = {"muse_spark_open": LISTED["modules"]["muse_spark"]}


@pytest.mark.parametrize("version", [importlib.metadata.version("mlx-lm"), LISTED["version"]], ids=["installed", "listed"])
def test_mlx_lm_lies_in_the_range(version: str) -> None:
    dependencies = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]

    (need,) = [need for need in map(Requirement, dependencies) if need.name == "mlx-lm"]

    assert version in need.specifier


def test_no_model_file_touches_a_cache_name_we_do_not_know() -> None:
    found = additions(merged(LISTED["modules"], OTHER_VERSIONS), installed_names())

    assert not found, "\n".join(found)


def test_the_list_is_exactly_that_of_its_version() -> None:
    found = additions(LISTED["modules"], installed_names()) + removals(LISTED["modules"], installed_names())

    if (installed := importlib.metadata.version("mlx-lm")) != LISTED["version"]:
        pytest.skip("\n".join([f"the list is that of mlx-lm {LISTED['version']}; in {installed}:", *found]))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("cache.offset", [".offset"]),
        ("cache.keys = x", [".keys ="]),
        ("k, v = cache.update_and_fetch(k, v)", [".update_and_fetch(2)"]),
        ("cache.make_mask(n, window_size=8, return_array=True)", [".make_mask(1, return_array, window_size)"]),
        ("state = cache[1]", ["[1]"]),
        ("cache[0] = state", ["[0] ="]),
        ("x, cache[1] = f(x, cache[1])", ["[1]", "[1] ="]),
        ("cache[-1].lengths", [".lengths", "[-1]"]),
        ("cache[self.fa_idx][1].offset", [".offset", "[1]", "[…]"]),
        ("rest = cache[1:]", ["[…:…]"]),
        ("a, b, c_state = cache", ["unpack 3"]),
        ("hasattr(cache, 'bits')", ["hasattr bits"]),
        ("getattr(cache, 'step', 0)", ["getattr step"]),
        ("isinstance(cache, ArraysCache)", ["isinstance ArraysCache"]),
        ("y = cache[1] if cache else None", ["[1]", "bool"]),
        ("if cache and ready: pass", ["bool"]),
        ("if not cache: pass", ["bool"]),
        ("cache + [None]", ["+"]),
        ("len(cache)", ["len"]),
        ("from .cache import KVCache, ArraysCache", ["import ArraysCache", "import KVCache"]),
        ("for layer, memory in zip(layers, cache): memory.trim(3)", [".trim(1)"]),
        ("for i, (layer, memory) in enumerate(zip(layers, cache[1:])): memory.trim(3)", [".trim(1)", "[…:…]"]),
        ("[memory.offset for memory in cache]", [".offset"]),
        ("kv_cache = cache[0]\nkv_cache.offset", [".offset", "[0]"]),
        ("mx.fast.scaled_dot_product_attention(q, k, v)", ["mx.fast.scaled_dot_product_attention"]),
        ("mask is None or cache is None", []),
        ("layer(x, cache=cache)", []),
        ("x.shape[0] + offset", []),
    ],
)
def test_the_collector_sees_each_way_to_touch_a_cache(source: str, names: list[str]) -> None:
    assert cache_names(source) == names


def test_a_difference_names_the_module_and_the_name() -> None:
    expected = {"llama": [".offset", ".trim(1)"], "gone": [".offset"]}
    found = {"llama": [".offset", ".rewind(1)"], "fresh": ["[0]"]}

    assert additions(expected, found) == [
        "mlx_lm.models.fresh is new and touches '[0]' of a cache",
        "mlx_lm.models.llama now touches '.rewind(1)' of a cache",
    ]
    assert removals(expected, found) == [
        "mlx_lm.models.gone is no longer there, or touches no cache",
        "mlx_lm.models.llama no longer touches '.trim(1)' of a cache",
    ]


def test_names_of_other_versions_are_known_in_their_module_only() -> None:
    known = merged({"llama": [".offset"]}, {"llama": ["[0]"], "older": [".keys"]})

    assert additions(known, {"llama": [".offset", "[0]"], "older": [".keys"]}) == []
    assert additions(known, {"llama": [".keys"]}) == ["mlx_lm.models.llama now touches '.keys' of a cache"]


def additions(expected: Names, found: Names) -> list[str]:
    """One sentence for each name that a module touches and that the expected table does not have for it."""
    sentences = []
    for module in sorted(found):
        verb = "now touches" if module in expected else "is new and touches"
        new = sorted(set(found[module]) - set(expected.get(module, [])))
        sentences += [f"mlx_lm.models.{module} {verb} {name!r} of a cache" for name in new]
    return sentences


def removals(expected: Names, found: Names) -> list[str]:
    """One sentence for each module or name of the expected table that is not touched any more."""
    sentences = []
    for module in sorted(expected):
        if module not in found:
            sentences.append(f"mlx_lm.models.{module} is no longer there, or touches no cache")
            continue
        gone = sorted(set(expected[module]) - set(found[module]))
        sentences += [f"mlx_lm.models.{module} no longer touches {name!r} of a cache" for name in gone]
    return sentences


def merged(first: Names, second: Names) -> Names:
    return {module: [*first.get(module, []), *second.get(module, [])] for module in first.keys() | second.keys()}


def installed_names() -> Names:
    """The names each installed model file touches; files that touch none and the caches themselves are left out."""
    distribution = importlib.metadata.distribution("mlx-lm")
    folder = Path(str(distribution.locate_file("mlx_lm/models")))
    names = {path.stem: cache_names(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.py"))}
    return {module: found for module, found in names.items() if found and module != "cache"}


def cache_names(source: str) -> list[str]:
    """Every way in which a piece of source touches something that it calls a cache, sorted."""
    collector = CacheNames(ast.parse(source))
    return sorted(collector.found)


class CacheNames(ast.NodeVisitor):
    """Collects what is done to caches: variables that are named like one, their items, and loop variables over them."""

    def __init__(self, tree: ast.AST) -> None:
        self.found: set[str] = set()
        self.loop_names = {name for node in ast.walk(tree) for name in self._names_over_caches(node)}
        self.visit(tree)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self._is_cache(node.value):
            self.found.add(f".{node.attr}" + (" =" if isinstance(node.ctx, ast.Store) else ""))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if self._is_cache(node.value):
            self.found.add(_index(node.slice) + (" =" if isinstance(node.ctx, ast.Store) else ""))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func) == DIRECT_ATTENTION:
            self.found.add(DIRECT_ATTENTION)
        match node.func, node.args:
            case ast.Attribute(value=value, attr=method), _ if self._is_cache(value):
                self.found.add(f".{method}({_arguments(node)})")
                self._visit_all([value, *node.args, *node.keywords])
                return
            case ast.Name(id="hasattr" | "getattr" as asking), [value, ast.Constant(value=name), *_]:
                if self._is_cache(value):
                    self.found.add(f"{asking} {name}")
            case ast.Name(id="isinstance"), [value, kind] if self._is_cache(value):
                self.found.add(f"isinstance {ast.unparse(kind)}")
            case ast.Name(id="len"), [value] if self._is_cache(value):
                self.found.add("len")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if isinstance(target, ast.Tuple) and self._is_cache(node.value):
            self.found.add(f"unpack {len(target.elts)}")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self._note_truth(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._note_truth(node.test)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for value in node.values:
            self._note_truth(value)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._note_truth(node.operand)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        # Only a whole cache list is added to; the items of a recurrent cache are arrays, on which anything may be done.
        if isinstance(node.op, ast.Add) and isinstance(node.left, ast.Name) and self._is_cache(node.left):
            self.found.add("+")
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").rpartition(".")[2] == "cache":
            self.found |= {f"import {alias.name}" for alias in node.names}

    def _note_truth(self, test: ast.expr) -> None:
        if self._is_cache(test):
            self.found.add("bool")

    def _visit_all(self, nodes: list[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _is_cache(self, node: ast.AST) -> bool:
        match node:
            case ast.Name(id=name):
                return bool(CACHE_NAME.match(name)) or name in self.loop_names
            case ast.Subscript(value=value):
                return self._is_cache(value)
        return False

    def _names_over_caches(self, node: ast.AST) -> Iterator[str]:
        """The loop variables that stand for an item of a cache list."""
        if isinstance(node, ast.For | ast.comprehension):
            yield from self._bound_to_caches(node.target, node.iter)

    def _bound_to_caches(self, target: ast.expr, iterable: ast.expr) -> Iterator[str]:
        match iterable, target:
            case ast.Call(func=ast.Name(id="zip"), args=parts), ast.Tuple(elts=targets):
                for part, name in zip(parts, targets, strict=False):
                    yield from self._bound_to_caches(name, part)
            case ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]), ast.Tuple(elts=[_, name]):
                yield from self._bound_to_caches(name, inner)
            case ((ast.Name(id=source) | ast.Subscript(value=ast.Name(id=source))), ast.Name(id=name)):
                if CACHE_NAME.match(source):
                    yield name


def _index(node: ast.expr) -> str:
    match node:
        case ast.Slice():
            return "[…:…]"
        case ast.Constant(value=int(number)):
            return f"[{number}]"
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=number)):
            return f"[-{number}]"
    return "[…]"


def _arguments(call: ast.Call) -> str:
    """How many positional arguments, and the names of the others: `1, return_array, window_size`."""
    names = sorted(keyword.arg or "**" for keyword in call.keywords)
    return ", ".join([str(len(call.args)), *names])


def write_expected() -> None:
    """Accept what is installed: write its version and names, one line a module."""
    version = importlib.metadata.version("mlx-lm")
    lines = [f"    {json.dumps(module)}: {json.dumps(names, ensure_ascii=False)}" for module, names in installed_names().items()]
    text = ",\n".join(lines)
    EXPECTED.write_text(f'{{\n  "version": {json.dumps(version)},\n  "modules": {{\n{text}\n  }}\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    write_expected()

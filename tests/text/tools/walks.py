"""Walks through a family's grammar: any token the mask has, so that only the grammar can make them right.

Now and then they hurry to an end.
"""

from __future__ import annotations

import json
import re
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from written import FAMILY

from weft.grammar.compiler import Compiler
from weft.grammar.constraint import Matcher
from weft.ipc.messages import GrammarSpec
from weft.model.resolve import TINY_HYBRID
from weft.text.tools import CallFormat, ToolSelection

END = 4082
MARKERS = re.compile(r'\]<\]minimax\[>\[|<\|"\|>|<\|tool_call>|<tool_call\|>|</?[|｜]?[^<>"= ⟨]+>|\[[A-Z_]+\]')


@cache
def vocabulary(kind: str) -> Compiler:
    """The tiny model's vocabulary, as it is ("spelt") or with a token for every marker of every family ("tokens")."""
    if kind == "spelt":
        return Compiler(TINY_HYBRID / "tokenizer.json", 4096, (END,))
    settings = json.loads((TINY_HYBRID / "tokenizer.json").read_text(encoding="utf-8"))
    added = settings["added_tokens"]
    known = {token["content"] for token in added}
    wanted = sorted({mark for family in FAMILY.values() for mark in MARKERS.findall(family.literals)} - known)
    for token, mark in enumerate(wanted, 4096):
        added.append({**added[0], "id": token, "content": mark, "special": True})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(json.dumps(settings), encoding="utf-8")
        compiler = Compiler(path, 4096 + len(wanted), (END,))
        assert compiler.tokenizer  # read while the file is there
    return compiler


@cache
def form(name: str, compiler: Compiler) -> CallFormat:
    """A family's format over a vocabulary."""
    known = added(compiler)
    return CallFormat(
        FAMILY[name], frozenset((mark, known[mark]) for mark in MARKERS.findall(FAMILY[name].literals) if mark in known)
    )


@cache
def added(compiler: Compiler) -> dict[str, int]:
    """A vocabulary's markers, of which llguidance itself finds only those in angles or brackets in a text."""
    return {compiler.tokenizer.decode_bytes([token]).decode(): token for token in range(END, compiler.vocab_size)}


def ids(compiler: Compiler, text: str) -> list[int]:
    known = added(compiler)
    parts = re.split(f"({'|'.join(map(re.escape, sorted(known, key=len, reverse=True)))})", text)
    tokens = ([known[part]] if part in known else compiler.tokenizer.tokenize_str(part) for part in parts if part)
    return [token for part in tokens for token in part]


def ways_out(compiler: Compiler, name: str) -> list[list[int]]:
    """What ends a text, a number, a list …"""
    literals = re.split("[ \n\0]|⟨[a-z]+⟩", FAMILY[name].literals)
    return [ids(compiler, text) for text in ['"', "'", "}", "]", ")", ",", "\n", *literals] if text]


def walk(compiler: Compiler, matcher: Matcher, rng: np.random.Generator, out: list[list[int]], steps: int = 2500) -> str | None:
    """The text of random tokens that the mask allows, up to an end; None when none was reached in time."""
    taken: list[int] = []
    while len(taken) < steps:
        mask = matcher.mask()
        if matcher.is_finished or (mask[END] and (len(taken) > 30 or rng.random() < 0.5)):
            return compiler.tokenizer.decode_bytes(taken).decode()
        mask[END] = False
        way = [int(rng.choice(np.flatnonzero(mask)))]
        if mask.sum() > 50 and rng.random() < 0.5:
            ways = [way for way in out if matcher.inner.validate_tokens(way) == len(way)]
            way = ways[rng.integers(len(ways))] if ways else way
        for token in way:
            matcher.accept(token)
        taken += way
    return None


def walks(compiler: Compiler, name: str, choice: ToolSelection, count: int, begin: str = "") -> list[str]:
    """Texts that a family's grammar lets through behind a beginning."""
    rng, out = np.random.default_rng(0), ways_out(compiler, name)
    spec = form(name, compiler).grammar(choice)
    found = []
    for _ in range(count):
        matcher = compiler.compile(spec)
        for token in ids(compiler, begin):
            matcher.accept(token)
        text = walk(compiler, matcher, rng, out)
        found += [] if text is None else [begin + text]
    assert len(found) > count // 2  # most of them come to an end
    return found


def accepts(compiler: Compiler, spec: GrammarSpec, text: str) -> bool:
    """Whether a text is a whole answer."""
    matcher = compiler.compile(spec)
    tokens = ids(compiler, text)
    return matcher.inner.try_consume_tokens(tokens) == len(tokens) and bool(matcher.mask()[END])

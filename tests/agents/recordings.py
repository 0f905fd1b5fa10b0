"""What agents really send: the first turn of each, and the second, as recorded between the agent and a weft server.

The files in `recorded/` have the shape of what was sent and none of its prose: texts of more than a line are marks that say
how long a filler is to stand in their place, chosen so that tiny-hybrid's tokenizer makes as many tokens of it. Machine
paths, ids and the model's name are not those of the recording.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "recorded"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
MARK = re.compile(r"⟦(\d+) characters, text (\w+)⟧")
MODEL = "⟦model⟧"
WORDS = """
thread loom cloth weave warp shuttle pattern colour wool silk linen cotton spin dye knot row edge fold press cut sew mend
the a of to and in is it with for on as by at from or not when each must may only where what which before after between
read write file folder name line number text list value result change keep find open close begin end first last next same
""".split()  # noqa: SIM905 - a list literal would fill a page


@dataclass(frozen=True)
class Recording:
    """Two turns of one agent."""

    agent: str  # and its version
    path: str
    headers: dict[str, str]
    first: dict[str, Any]
    second: dict[str, Any]


def load(name: str, model: str) -> Recording:
    """The recording of this name, as sent to a server of `model`."""
    told = expanded(json.loads((FOLDER / f"{name}.json").read_text()), model)
    return Recording(told["agent"], told["path"], told["headers"], told["body"], told["body"] | told["next"])


def expanded(value: Any, model: str) -> Any:
    """The same with fillers and the model's name in their places."""
    match value:
        case dict():
            return {key: expanded(item, model) for key, item in value.items()}
        case list():
            return [expanded(item, model) for item in value]
        case str() if found := MARK.fullmatch(value):
            return filler(int(found[1]), found[2])
        case str():
            return value.replace(MODEL, model)
    return value


def filler(length: int, key: str) -> str:
    """A text of so many characters; the same for the same key."""
    chosen, words, size = random.Random(key), [], 0
    while size <= length:
        words.append(chosen.choice(WORDS) + ("." if chosen.random() < 0.1 else ""))
        size += len(words[-1]) + 1
    return " ".join(words)[:length]

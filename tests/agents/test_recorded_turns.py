"""Agents' own first and second turns against a real server: a hybrid model with a context that they fit into.

The model is random and very small, so what it says means nothing; that it is asked, answers on every wire and computes no
prompt twice is what is tested.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from recordings import NAMES, Recording, load

import weft.model
import zoo
from servers import Server, running

TINY_HYBRID = Path(weft.model.__file__).parent / "tiny-hybrid"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
SMALL = {
    "vocab_size": 4096, "hidden_size": 32, "num_hidden_layers": 2, "full_attention_interval": 2, "num_attention_heads": 1,
    "num_key_value_heads": 1, "linear_num_value_heads": 1, "linear_num_key_heads": 1, "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
}  # fmt: skip
# What can not be honoured and is told: tools that OpenAI would run, and what Anthropic would forget of the thinking.
IGNORED = {"codex": "tools.web_search", "claude": "context_management"}
LIMITS = {"/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_tokens", "/v1/messages?beta=true": "max_tokens"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with attention and recurrent layers, tiny-hybrid's way with text and 65,536 positions."""
    folder = tmp_path_factory.mktemp("agents") / "model"
    config = copy.deepcopy(zoo.ARCHITECTURES["qwen3_5"])
    config["text_config"] |= SMALL
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(zoo.ARCHITECTURES, "long", config)
        zoo.make_checkpoint("long", folder)
    for name in TEXT_FILES:
        shutil.copy(TINY_HYBRID / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("server") / "log", str(model)) as server:
        yield server


def events(server: Server, recording: Recording, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What the server streams, of an answer of a few tokens."""
    short = {**body, LIMITS[recording.path]: 4}
    short.pop("max_completion_tokens", None)
    reply = server.post(recording.path, short, headers=recording.headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers.get("x-ignored-params") == IGNORED.get(recording.agent.split()[0])
    return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]


def prompt_tokens(events: list[dict[str, Any]]) -> tuple[int, int]:
    """How many tokens the prompt had, and how many of them were known."""
    usages = [(event.get("response") or event.get("message") or event).get("usage") for event in events]
    usage = next(usage for usage in (usages if "message" in events[0] else reversed(usages)) if usage)
    if "cache_read_input_tokens" in usage:
        known = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + usage["cache_creation_input_tokens"] + known, known
    total = usage.get("input_tokens", usage.get("prompt_tokens"))
    details = usage.get("input_tokens_details", usage.get("prompt_tokens_details"))
    return total, details["cached_tokens"]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "opencode-title"])
def test_the_second_turn_stands_on_the_first(server: Server, model: Path, name: str) -> None:
    recording = load(name, str(model))
    total, _ = prompt_tokens(events(server, recording, recording.first))
    after, known = prompt_tokens(events(server, recording, recording.second))

    assert total > 7000
    assert after > total
    assert known >= 0.95 * total


def test_a_title_is_made_beside_the_first_turn(server: Server, model: Path) -> None:
    turn, title = (load(name, str(model)) for name in ("opencode", "opencode-title"))
    with ThreadPoolExecutor() as pool:
        told = list(pool.map(lambda one: events(server, one, one.first), [turn, title] * 2))

    sizes = [prompt_tokens(events)[0] for events in told]
    assert sizes[0] == sizes[2] > 10 * sizes[1] == 10 * sizes[3]

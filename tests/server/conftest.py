"""A real server on loopback, in processes of its own, on the shipped model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from servers import Server, running
from weft.engine.faults import VARIABLE

# With this word in its prompt an answer takes minutes: a row that is free soon was freed, it did not end by itself.
ENDLESS_WORD, ENDLESS_TOKEN = " crocodile", 2999
RULES = json.dumps([{"point": "turn", "token": ENDLESS_TOKEN, "do": "slow"}])


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """tiny-hybrid, served."""
    folder = tmp_path_factory.mktemp("server")
    with running(folder / "log", "tiny-hybrid", environment={"WEFT_CACHE": str(folder), VARIABLE: RULES}) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    return server.client()

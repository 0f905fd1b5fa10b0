"""A real server on loopback, in processes of its own, on the shipped model."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from servers import ENDLESS_RULES, Server, running
from weft.engine.faults import VARIABLE


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """tiny-hybrid, served."""
    folder = tmp_path_factory.mktemp("server")
    with running(folder / "log", "tiny-hybrid", environment={"WEFT_CACHE": str(folder), VARIABLE: ENDLESS_RULES}) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    return server.client()

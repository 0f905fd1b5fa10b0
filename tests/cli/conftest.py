"""One real server on the shipped model for the commands that ask one; tests that want it are of the group "served"."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weft.cli.client import ServerClient
from weft.cli.doctor import own_server


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerClient]:
    """tiny-hybrid, served as `weft doctor` does it."""
    with own_server(tmp_path_factory.mktemp("served") / "log") as (client, _):
        yield client

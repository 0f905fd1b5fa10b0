"""One server and one browser for each file of tests, and a function that opens the page in a window of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from browsing import CHROMIUM, PATIENCE, PICTURES
from servers import ENDLESS_RULES, Server, running
from weft.engine.faults import VARIABLE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("page") / "log", "tiny-hybrid", environment={VARIABLE: ENDLESS_RULES}) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any, server: Server, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Opens the page in a window of its own; whatever the console complains of fails the test."""
    complaints: list[str] = []
    opened: list[Any] = []

    def open_it(width: int = 1280, height: int = 860, url: str = server.url, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        opened.append(page)
        return page

    yield open_it
    PICTURES.mkdir(parents=True, exist_ok=True)
    for number, page in enumerate(opened):
        page.screenshot(path=PICTURES / f"{request.node.name}-{number}.png")
        page.context.close()
    assert [one for one in complaints if "401" not in one] == []

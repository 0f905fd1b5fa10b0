"""The page in a real browser: where Chromium is, and what tests do on the page. The fixtures are in page/conftest.py."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from waiting import HANG_SECONDS

NAMES = ("chromium", "chromium-browser", "google-chrome", "/Applications/Chromium.app/Contents/MacOS/Chromium")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
PICTURES = Path(__file__).parent.parent / "build" / "screenshots"
PATIENCE = 1e3 * HANG_SECONDS  # milliseconds

_HAS_PLAYWRIGHT = importlib.util.find_spec("playwright") is not None
IN_A_BROWSER = [
    pytest.mark.xdist_group("page"),  # two browsers at a time would take the cores from each other
    pytest.mark.skipif(not _HAS_PLAYWRIGHT, reason="playwright is not installed: pip install playwright"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium, or brew install --cask chromium"),
]


def say(page: Any, text: str, **settings: str) -> None:
    """Send a message, with these settings."""
    page.wait_for_selector("#model option", state="attached")
    page.click("#settings")
    for name, value in settings.items():
        page.fill(f"#option-{name}", value)
    page.click("#close")
    page.fill("#draft", text)
    page.press("#draft", "Enter")


def until(page: Any, condition: str) -> None:
    """Wait until this is true in the page. Playwright's own way evaluates texts there, which the page's policy forbids."""
    for _ in range(int(PATIENCE / 50)):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(condition)


def text_of(page: Any) -> str:
    text: str = page.inner_text("li.assistant:last-child .prose")
    return text

"""The page's files: served without a key, under a strict policy, and with nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

import weft
from fronts import front
from weft.api.http import PAGE_TYPES, Page

FOLDER = Path(weft.__file__).parent / "page"
FILES = sorted(FOLDER.iterdir())
KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def guarded() -> Iterator[httpx2.Client]:
    with front({"m": []}, api_keys=("secret",)) as server, httpx2.Client(base_url=server.url, verify=False) as client:
        yield client


def test_the_page_needs_no_key_but_what_it_asks_for_does(guarded: httpx2.Client) -> None:
    page = guarded.get("/")

    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "<title>weft</title>" in page.text
    assert guarded.get("/v1/events").status_code == 401
    assert guarded.get("/v1/status").status_code == 401
    assert guarded.get("/v1/status", headers=KEY).status_code == 200


def test_every_file_is_served_with_its_type_and_a_policy(guarded: httpx2.Client) -> None:
    for file in FILES:
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        answer = guarded.get(path)

        assert answer.content == file.read_bytes()
        assert answer.headers["content-type"].startswith(PAGE_TYPES[file.suffix])
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_what_is_no_file_of_the_page_is_not_served(guarded: httpx2.Client) -> None:
    for path in ("/page/index.html", "/page/none.js", "/page/../errors.py", "/page/%2e%2e/errors.py"):
        assert guarded.get(path, headers=KEY).status_code == 404


def test_somebody_who_only_asks_whether_we_are_here_gets_no_body(guarded: httpx2.Client) -> None:
    answer = guarded.head("/")

    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_refers_to_nothing_elsewhere(file: Path) -> None:
    addresses = set(re.findall(r"\w+://[\w.-]+", file.read_text()))

    assert addresses <= {"http://www.w3.org"}  # a name of SVG, which nobody fetches


def test_the_page_has_no_script_or_style_inside_it() -> None:
    text = (FOLDER / "index.html").read_text()

    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text)


def test_no_script_makes_markup_from_text() -> None:
    scripts = "".join(file.read_text() for file in FILES if file.suffix == ".js")

    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", scripts)


def test_every_path_that_a_file_names_is_there() -> None:
    named = {path for file in FILES for path in re.findall(r"/page/[\w.-]+", file.read_text())}

    assert named <= Page().files.keys()
    assert Page().files.keys() - {"/"} <= named

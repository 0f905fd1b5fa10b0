"""`weft cache ls`, `weft cache clear`, `weft cache why`."""

from __future__ import annotations

import json
from pathlib import Path

from cli_command import weft
from cli_server import CACHE, REPORT, running


def test_ls_shows_a_line_for_each_conversation_the_latest_first(tmp_path: Path) -> None:
    with running() as server:
        told = weft(tmp_path, "cache", "ls", "--url", server.url).stdout
        exact = weft(tmp_path, "cache", "ls", "--url", server.url, "--json").stdout
    head, names, *lines, other = told.splitlines()

    assert head == "tiny-hybrid: 4 chunks, 3.5 kB of 1.0 MB in memory, 2.0 kB on disk"
    assert names.split() == ["TOKENS", "SIZE", "HITS", "IN", "USE", "IDLE", "ENDS", "IN"]
    assert [line.split("  ")[0] for line in lines] == ["130", "120", "7"]
    assert "2.0 kB (on disk)" in lines[0]
    assert lines[0].endswith("0:00:05  Be brief. Once upon a time there was a cat.")
    assert lines[1].split()[1:5] == ["2.0", "kB", "3", "yes"]
    assert lines[1].endswith(" a dog.\\n\\x1b[2J")
    assert lines[2].endswith("0:01:40  (salted)")
    assert other == "other: 0 chunks, 0 bytes of 0 bytes in memory"
    assert json.loads(exact) == CACHE


def test_clear_says_how_much_was_forgotten(tmp_path: Path) -> None:
    with running() as server:
        told = weft(tmp_path, "cache", "clear", "--url", server.url).stdout
        weft(tmp_path, "cache", "clear", "tiny-hybrid", "--url", server.url)

    assert told == "tiny-hybrid: 4 chunks forgotten\n"
    assert server.asked == [("/v1/cache/clear", {}), ("/v1/cache/clear", {"model": "tiny-hybrid"})]


def test_why_shows_the_sentence_the_two_texts_and_where_the_time_went(tmp_path: Path) -> None:
    with running() as server:
        told = weft(tmp_path, "cache", "why", "a/b", "--url", server.url, TZ="UTC").stdout
        exact = weft(tmp_path, "cache", "why", "a/b", "--url", server.url, "--json").stdout

    assert told.splitlines() == [
        "mine: tiny-hybrid, 1970-01-01 00:00:00",
        "Because.",
        "  this prompt    …there was a⟨ dog⟩",
        "  nearest known  …there was a⟨ cat\\n⟩",
        "queue       0.002 s",
        "prefill     0.301 s  304 of 1200 prompt tokens computed",
        "decode      1.200 s  40 tokens",
    ]
    assert json.loads(exact) == REPORT


def test_why_can_do_without_the_engine_s_words_and_names_an_unknown_request(tmp_path: Path) -> None:
    with running() as server:
        silent = weft(tmp_path, "cache", "why", "silent", "--url", server.url).stdout
        unknown = weft(tmp_path, "cache", "why", "nobody", "--url", server.url)

    assert silent.splitlines()[1] == "the engine did not say how much of the prompt was known"
    assert (unknown.returncode, unknown.stderr) == (1, "weft: not found\n")


def test_a_wrong_key_is_told(tmp_path: Path) -> None:
    with running() as server:
        server.key = "right"
        without = weft(tmp_path, "cache", "clear", "--url", server.url)
        right = weft(tmp_path, "cache", "clear", "--url", server.url, WEFT_API_KEY="right")

    assert (without.returncode, without.stderr) == (1, "weft: the API key is missing or wrong\n")
    assert right.returncode == 0

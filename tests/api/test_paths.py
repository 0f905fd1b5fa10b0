"""Paths that are not here: the client is told which one it means, or that weft does not do this."""

from __future__ import annotations

import pytest

from weft.api.paths import ABSENT, hint_for

SERVED = ("/v1/chat/completions", "/v1/models", "/v1/messages", "/api/chat", "/health")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/chat/completions", "/v1/chat/completions is meant; end the client's base URL with /v1"),
        ("/models", "/v1/models is meant; end"),
        ("/v1/v1/chat/completions", "/v1/chat/completions is meant; the client's base URL has /v1 twice"),
        ("/v1/v1/v1/models", "/v1/models is meant; the client's base URL has /v1 twice"),
        ("/v1/v1/messages", "/v1/messages is meant; the client's base URL has /v1 twice"),
        ("/v1/models/", "/v1/models is meant; write it without the slash"),
        ("/embeddings", "no embeddings"),
        ("/v1/embeddings", "no embeddings"),
        ("/v2/rerank", "ranks nothing"),
        ("/v1/images/generations", "no images"),
        ("/v1/fine-tuning/jobs", "trains nothing"),
    ],
)
def test_a_path_that_is_not_here_is_answered_with_the_one_that_is_meant(path: str, words: str) -> None:
    assert words in hint_for(path, SERVED)


@pytest.mark.parametrize("path", ["/", "/nowhere", "/v1", "/v1/zebra", "//", "/v1/v1", "/v1//chat"])
def test_of_a_path_that_means_nothing_nothing_is_said(path: str) -> None:
    assert hint_for(path, SERVED) == ""


@pytest.mark.parametrize("word", ABSENT)
def test_what_other_servers_do_is_named(word: str) -> None:
    assert hint_for(f"/v1/{word}", SERVED) == hint_for(f"/v1/{word}/more", SERVED) == ABSENT[word]

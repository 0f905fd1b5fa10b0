"""Which models are divided over ranks, and what is said of those that are not."""

from __future__ import annotations

from typing import Any

import pytest

from weft.errors import UnsupportedModel
from weft.model.sharding import shard_model

CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 2}


class Ranks:
    def __init__(self, count: int) -> None:
        self.count = count

    def size(self) -> int:
        return self.count


class Divisible:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.group: Any = None

    def shard(self, group: Any) -> None:
        if self.error is not None:
            raise self.error
        self.group = group


def test_an_architecture_that_mlx_lm_can_not_divide_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="mlx-lm can not divide a mamba over several processes: leave out --shard"):
        shard_model(object(), CONFIG, "mamba", Ranks(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (3, "shard 3 does not divide the num_attention_heads 8 of this llama"),
        (4, "shard 4 does not divide the num_key_value_heads 2 of this llama"),
        (16, "shard 16 does not divide the num_attention_heads 8 of this llama"),
    ],
)
def test_ranks_that_do_not_divide_the_heads_are_refused(count: int, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        shard_model(Divisible(), CONFIG, "llama", Ranks(count))  # type: ignore[arg-type]


def test_what_the_architecture_itself_refuses_is_said() -> None:
    model = Divisible(AssertionError("group size must divide the vocabulary"))
    with pytest.raises(UnsupportedModel, match=r"can not be divided into 2 .group size must divide the vocabulary"):
        shard_model(model, CONFIG, "qwen3_5", Ranks(2))  # type: ignore[arg-type]


def test_a_model_is_divided_over_its_group() -> None:
    model, group = Divisible(), Ranks(2)
    shard_model(model, CONFIG, "llama", group)  # type: ignore[arg-type]

    assert model.group is group

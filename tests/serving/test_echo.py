"""What `echo` gives back is what the client sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers

from weft.ipc.messages import TokenEvent
from weft.serving.active_request import ChoiceStream, PromptState
from weft.text.codec import Codec
from weft.text.types import GenerationRequest, Text


@pytest.mark.parametrize("prompt", ["▁Hello", "Hello", " Hello", "Hello  Hello", "<s>Hello", "Yes", ""])
def test_an_echo_is_the_clients_own_string_without_bos_and_invented_blank(tmp_path: Path, prompt: str) -> None:
    inner: Any = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={"▁Hello": 0, "▁": 1, "▁Yes": 2, "a": 3}, merges=[], unk_token="a")
    )
    inner.add_special_tokens(["<s>"])
    steps = tokenizers.decoders
    inner.decoder = steps.Sequence([steps.Replace("▁", " "), steps.Fuse(), steps.Strip(" ", 1, 0)])
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 4)])
    inner.save(str(tmp_path / "tokenizer.json"))
    codec = Codec(tmp_path)
    asked = GenerationRequest(model=None, prompts=(prompt,), sampling={}, echo=True, split_thinking=False)
    (encoded,) = codec.encode_request(asked)
    choice = ChoiceStream(codec, PromptState(encoded), asked)

    deltas = choice.take(TokenEvent(0, 2), 0.0)

    answer = " Yes" if prompt else "Yes"
    assert "".join(delta.text for delta in deltas if isinstance(delta, Text)) == prompt + answer

"""Why a prompt had to be computed, in words, and the reports that are kept of it."""

from __future__ import annotations

import pytest

from weft.ipc.messages import PrefixReuse
from weft.model.resolve import TINY_HYBRID
from weft.serving.active_request import MAX_REPORTS, Reports, RequestReport
from weft.text.codec import explain_reuse
from weft.text.tokenizer import Tokenizer
from weft.text.types import Usage

TOKENIZER = Tokenizer(TINY_HYBRID)
TEXT = "Once upon a time there was a little dog who lived near a big tree"
IDS = TOKENIZER.encode(TEXT, add_special_tokens=False)
PLACE = IDS.index(TOKENIZER.encode(" dog", add_special_tokens=False)[0])
CAT = TOKENIZER.encode(" cat", add_special_tokens=False)[0]


def why(reuse: PrefixReuse, is_hidden: bool = False) -> str:
    return explain_reuse(reuse, IDS, TOKENIZER, is_hidden=is_hidden).why


def test_the_two_tokens_and_the_text_before_them_are_told() -> None:
    told = explain_reuse(PrefixReuse("differs", 4, PLACE, IDS[PLACE], CAT), IDS, TOKENIZER, is_hidden=False)

    assert (told.cause, told.matched, told.position, told.token, told.instead) == ("differs", 4, PLACE, " dog", " cat")
    assert told.before == "Once upon a time there was a little"
    end = f'at token {PLACE + 1} this prompt has " dog", the nearest known one " cat"'
    assert told.why == f"the first 4 of {len(IDS)} tokens were there; {end}"


def test_only_the_last_characters_before_are_told() -> None:
    told = explain_reuse(PrefixReuse("differs", 0, len(IDS) - 1, IDS[-1], CAT), IDS, TOKENIZER, is_hidden=False)

    assert told.before == TEXT.removesuffix(" tree")[-40:]


def test_under_a_salt_no_text_is_told() -> None:
    told = explain_reuse(PrefixReuse("differs", 4, PLACE, IDS[PLACE], CAT), IDS, TOKENIZER, is_hidden=True)

    assert (told.before, told.token, told.instead) == ("", None, None)
    assert told.why.endswith(f"at token {PLACE + 1} this prompt differs from the nearest known one")


@pytest.mark.parametrize(
    ("reuse", "words"),
    [
        (PrefixReuse("whole", len(IDS) - 1), f"the first {len(IDS) - 1} of {len(IDS)} tokens were there; that is all"),
        (PrefixReuse("differs", 0, 0, IDS[0]), f"none of the {len(IDS)} tokens were there; from token 1 on nothing like it"),
        (PrefixReuse("cut", 4), "pieces that end at other places"),
        (PrefixReuse("checkpoint", 4), "not the state of every layer"),
        (PrefixReuse("evicted", 4), "had to make room; more --cache-megabytes"),
        (PrefixReuse("salt"), "nothing was asked under this cache_salt before"),
        (PrefixReuse("logprobs", 0, 5, IDS[5], CAT), "the prompt's log-probabilities were asked for"),
        (PrefixReuse("off"), "--cache-megabytes is 0"),
    ],
)
def test_every_cause_has_its_sentence(reuse: PrefixReuse, words: str) -> None:
    assert words in why(reuse)
    assert words in why(reuse, is_hidden=True)


def test_half_a_character_is_shown_as_its_bytes_and_a_line_end_as_an_escape() -> None:
    half, newline = TOKENIZER.encode("漢", add_special_tokens=False)[0], TOKENIZER.encode("\n", add_special_tokens=False)[0]
    told = explain_reuse(PrefixReuse("differs", 0, 0, half, newline), [half], TOKENIZER, is_hidden=False)

    assert told.token is not None
    assert told.token.startswith("\\xe6")
    assert told.instead == "\n"
    assert '"\\xe6' in told.why
    assert told.why.endswith('"\\n"')


def test_the_oldest_report_goes_first_and_an_id_used_again_is_young() -> None:
    reports = Reports()
    for number in range(MAX_REPORTS):
        reports.add(RequestReport(str(number), "m", 0, Usage(1, 1)))
    reports.add(RequestReport("0", "again", 0, Usage(1, 1)))
    reports.add(RequestReport("new", "m", 0, Usage(1, 1)))
    again = reports.find("0")

    assert again is not None
    assert again.model == "again"
    assert reports.find("1") is None
    assert reports.find("2") is not None
    assert reports.find("new") is not None

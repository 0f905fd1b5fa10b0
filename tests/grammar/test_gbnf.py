"""GBNF grammars are read as llama.cpp reads them."""

from __future__ import annotations

import pytest
from gbnf_grammars import GRAMMARS
from test_corpus import COMPILER, VOCABULARY, takes

from weft.errors import GrammarRejected
from weft.grammar.constraint import Constraint, Matcher
from weft.grammar.gbnf import to_lark
from weft.text.schema import lark_grammar

TEXTS = [COMPILER.tokenizer.decode_bytes([token]) for token in range(VOCABULARY)]
BYTE_TOKENS = {text[0]: token for token, text in enumerate(TEXTS) if len(text) == 1}


def compiled(grammar: str) -> Matcher:
    return COMPILER.compile(lark_grammar(grammar, "grammar"))


def takes_bytes(matcher: Matcher, text: str) -> bool:
    """Whether the grammar has this text when each byte is a token."""
    tokens = [BYTE_TOKENS[byte] for byte in text.encode()]
    matcher = matcher.fork()
    return matcher.inner.try_consume_tokens(tokens) == len(tokens) and matcher.may_end


CASES: list[tuple[str, list[str], list[str]]] = [
    ('root ::= "a" . "b"', ["axb", "a\nb", "a\rb", "aéb", 'a"b'], ["ab", "axxb"]),
    ('root ::= "a" .* "b"', ["ab", "a\n\nb", "axxb"], ["a"]),
    (r'root ::= "\u00e9\x41\U0001f600\n"', ["éA\U0001f600\n"], ["é"]),
    (r"root ::= [\u0041]+", ["A", "AA"], ["B", "u"]),
    (r"root ::= [\u00e0-\u00ff\x41-\x43]", ["é", "B"], ["D", "e"]),
    (r"root ::= [\U0001f600-\U0001f64f]", ["\U0001f601"], ["a"]),
    (r'root ::= [^\n"/\]]', ["a", "é", "\\", "[", "^", "-", "\r"], ["\n", '"', "/", "]"]),
    (r"root ::= [\[\]\\/^.-]", [*"[]\\/^.-"], ["a", "Z"]),
    (r"root ::= [a^-]", [*"a^-"], ["b"]),
    (r'root ::= "say \"hi\" \\ \t/"', ['say "hi" \\ \t/'], []),
    ('root ::= "a"{2}', ["aa"], ["a", "aaa"]),
    ('root ::= "x" "a"{0} ("b" | "c"){,0} "y"', ["xy"], ["xay", "xby"]),
    ('root ::= "a"{2,}', ["aa", "aaaa"], ["a"]),
    ('root ::= "x" "a"{,2}', ["x", "xa", "xaa"], ["xaaa"]),
    ('root ::= "a"{ 1 , 2 }', ["a", "aa"], ["aaa"]),
    ('root ::= "x" ("a" | "b"){0,1}', ["x", "xa", "xb"], ["xab"]),
    ('root ::= "x" "ab"+?', ["x", "xab", "xabab"], ["xa"]),
    (
        'root ::= my-rule my_rule myRule MY-RULE\nmy-rule ::= "a"\nmy_rule ::= "b"\nmyRule ::= "c"\nMY-RULE ::= "d"',
        ["abcd"],
        ["aaaa"],
    ),
    ('root ::= start | 1st\nstart ::= "s" 1st?\n1st ::= "1"', ["s", "1", "s1"], ["1s"]),
    ('root ::= list # the root\nlist ::= item ("," item)* # a list\nitem ::= [0-9]+ |\n  "x"', ["1,x,23", "x"], [",", "1,"]),
    ('root ::= ("a" |\n "b")\n\n', ["a", "b"], ["ab"]),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), CASES)
def test_a_grammar_has_the_texts_it_has_for_llama_cpp(grammar: str, good: list[str], bad: list[str]) -> None:
    matcher = compiled(grammar)

    assert [text for text in good if not takes(matcher, text)] == []
    assert [text for text in bad if takes(matcher, text)] == []


@pytest.mark.parametrize("code", [*range(1, 0xA1), 0xE9, 0x2028, 0x1F600])
def test_every_letter_is_itself_in_every_spelling(code: int) -> None:
    letter = chr(code)
    plain = "" if letter in '"\\[]^-' or code < 0x20 or code == 0x7F else letter
    for spelt in filter(
        None, (plain, f"\\U{code:08x}", f"\\u{code:04x}" if code < 0x10000 else "", f"\\x{code:02x}" if code < 256 else "")
    ):
        for grammar in (f'root ::= "<{spelt}>"', f'root ::= "<" [{spelt}] ">"', f'root ::= "<" [{spelt}-{spelt}] ">"'):
            matcher = compiled(grammar)
            assert takes(matcher, f"<{letter}>"), grammar
            assert not takes(matcher, f"<{chr(code + 1)}>"), grammar


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('root ::= "a"{}', "Expected"),
        ('root ::= "a"{,}', "Expected"),
        ('root ::= "a"{1 2}', "Expected"),
        ('root ::= "a', "Unexpected end"),
        ("root ::= [a", "Unexpected end"),
        (r'root ::= "\q"', "Invalid escape"),
        (r'root ::= "\u12"', "Invalid escape"),
        (r'root ::= "\U00110000"', "Invalid escape"),
        ("root ::= missing", "missing"),
        ('rule ::= "a"', "root"),
    ],
)
def test_what_can_not_be_read_is_refused_with_a_reason(grammar: str, words: str) -> None:
    with pytest.raises(GrammarRejected, match=words):
        compiled(grammar)


@pytest.mark.parametrize("name", GRAMMARS)
def test_no_longest_match_takes_letters_that_the_next_part_needs(name: str) -> None:
    grammar, good, bad = GRAMMARS[name]
    matcher = compiled(grammar)

    assert [text for text in good if not takes(matcher, text) or not takes_bytes(matcher, text)] == []
    assert [text for text in bad if takes(matcher, text) or takes_bytes(matcher, text)] == []


@pytest.mark.parametrize(
    "begin", ["start:", "?start:", "!start:", "?!start :", "start[max_tokens=9]:", "\n  start [max_tokens=9] :"]
)
def test_a_grammar_in_lark_is_known_by_its_first_rule_however_that_is_marked(begin: str) -> None:
    lark = f'{begin} sum\nsum: NUM ("+" NUM)*\nNUM: /[0-9]+/'

    assert to_lark(lark) == lark


@pytest.mark.parametrize("begin", ["?start:", "!start:"])
def test_a_grammar_in_lark_whose_first_rule_is_marked_is_enforced(begin: str) -> None:
    matcher = compiled(f'{begin} sum\nsum: NUM ("+" NUM)*\nNUM: /[0-9]+/')

    assert takes(matcher, "1+2")
    assert not takes(matcher, "1+")


def test_a_rule_of_gbnf_may_be_called_start_and_named_at_the_beginning_of_a_line() -> None:
    matcher = compiled('root ::= (\nstart [0-9]\n)\nstart ::= "a"')

    assert takes(matcher, "a1")
    assert not takes(matcher, "a")


def test_tokens_that_a_gbnf_leaves_no_choice_about_are_found() -> None:
    matcher = compiled('root ::= "The color is " ("red" | "green") "."')
    forced = COMPILER.tokenizer.decode_bytes(Constraint(matcher, None).forced())

    assert b"The color is".startswith(forced)
    assert len(forced) >= len(b"The color")


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ("root ::= [0-9] root?", "7" * 300, ["", "7a"]),
        ("root ::= item end\nitem ::= [a-z] item?\nend ::= [0-9]", "ab" * 150 + "1", ["1", "ab"]),
        ('root ::= [a-z] root | [0-9] root? | "."', "a1" * 150 + ".", ["a", "1a", "..", ""]),
        ('root ::= "a" root | [b] root | ', "ab" * 150, ["c", "ac"]),
        ('root ::= "(" root ")" root | "x" root?', "x(x)" * 40 + "x", ["x(", "(x)", "()x", ""]),
        ('root ::= ("a" | "ab") root | "c"', "aab" * 100 + "c", ["", "a", "bc"]),
    ],
)
def test_a_rule_that_ends_in_itself_is_taken_however_often_it_comes(grammar: str, good: str, bad: list[str]) -> None:
    matcher = compiled(grammar)

    assert takes(matcher, good)
    assert takes_bytes(matcher, good)
    assert [text for text in bad if takes(matcher, text) or takes_bytes(matcher, text)] == []

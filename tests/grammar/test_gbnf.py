"""GBNF grammars are read as llama.cpp reads them."""

from __future__ import annotations

import pytest
from test_corpus import COMPILER, takes

from weft.errors import GrammarRejected
from weft.grammar.constraint import Matcher
from weft.text.schema import lark_grammar


def compiled(grammar: str) -> Matcher:
    return COMPILER.compile(lark_grammar(grammar, "grammar"))


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

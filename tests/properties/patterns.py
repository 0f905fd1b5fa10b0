"""Random patterns as trees, each written as a regex or as GBNF, with a matcher of their own that knows neither notation."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

META = frozenset("\\.+*?()|[]{}^$")
IN_CLASS = frozenset("\\[]^-&~")
SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


@dataclasses.dataclass
class Text:
    """The text that a pattern is matched against; `runs_out` becomes true where the pattern wants more than is there."""

    text: str
    runs_out: bool = False


class Node:
    """A part of a pattern."""

    def ends(self, subject: Text, start: int) -> Iterator[int]:
        """Yield where a match that begins at `start` may end."""
        raise NotImplementedError

    def sample(self, rng: random.Random) -> str:
        """Return a text that it matches."""
        raise NotImplementedError

    def regex(self) -> str:
        raise NotImplementedError

    def gbnf(self, rules: list[str]) -> str:
        raise NotImplementedError


@dataclasses.dataclass
class Literal(Node):
    text: str

    def ends(self, subject: Text, start: int) -> Iterator[int]:
        rest = subject.text[start : start + len(self.text)]
        if rest == self.text:
            yield start + len(self.text)
        elif self.text.startswith(rest):
            subject.runs_out = True

    def sample(self, rng: random.Random) -> str:  # noqa: ARG002 – as the others
        return self.text

    def regex(self) -> str:
        return "".join(_escaped(letter, META) for letter in self.text)

    def gbnf(self, rules: list[str]) -> str:  # noqa: ARG002 – as the others
        return '"' + "".join(_quoted(letter, '"\\') for letter in self.text) + '"'


@dataclasses.dataclass
class OneOf(Node):
    """One letter of a class: of these letters and ranges, or of no such."""

    letters: tuple[str, ...]
    ranges: tuple[tuple[str, str], ...] = ()
    is_negated: bool = False

    def has(self, letter: str) -> bool:
        is_in = letter in self.letters or any(first <= letter <= last for first, last in self.ranges)
        return is_in != self.is_negated

    def ends(self, subject: Text, start: int) -> Iterator[int]:
        if start == len(subject.text):
            subject.runs_out = True
        elif self.has(subject.text[start]):
            yield start + 1

    def sample(self, rng: random.Random) -> str:
        named = [*self.letters, *(chr(code) for first, last in self.ranges for code in range(ord(first), ord(last) + 1))]
        return rng.choice([letter for letter in ("aZ5 é<\n~" if self.is_negated else named) if self.has(letter)])

    def regex(self) -> str:
        return self._written(lambda letter: _escaped(letter, IN_CLASS))

    def gbnf(self, rules: list[str]) -> str:  # noqa: ARG002 – as the others
        return self._written(lambda letter: f"\\x{ord(letter):02x}" if letter in "^-" else _quoted(letter, "]\\["))

    def _written(self, write: Callable[[str], str]) -> str:
        ranges = "".join(f"{first}-{last}" for first, last in self.ranges)
        return f"[{'^' * self.is_negated}{ranges}{''.join(map(write, self.letters))}]"


@dataclasses.dataclass
class Any(Node):
    """Any letter: in a regex but a line break, in GBNF also that."""

    takes_line_breaks: bool

    def ends(self, subject: Text, start: int) -> Iterator[int]:
        if start == len(subject.text):
            subject.runs_out = True
        elif self.takes_line_breaks or subject.text[start] != "\n":
            yield start + 1

    def sample(self, rng: random.Random) -> str:
        return rng.choice("a5 <é\n" if self.takes_line_breaks else "a5 <é")

    def regex(self) -> str:
        return "."

    def gbnf(self, rules: list[str]) -> str:  # noqa: ARG002 – as the others
        return "."


@dataclasses.dataclass
class Row(Node):
    """One part after the other."""

    parts: list[Node]

    def ends(self, subject: Text, start: int) -> Iterator[int]:
        places = {start}
        for part in self.parts:
            places = {end for place in places for end in part.ends(subject, place)}
        yield from places

    def sample(self, rng: random.Random) -> str:
        return "".join(part.sample(rng) for part in self.parts)

    def regex(self) -> str:
        return "".join(part.regex() for part in self.parts)

    def gbnf(self, rules: list[str]) -> str:
        return " ".join(part.gbnf(rules) for part in self.parts)


@dataclasses.dataclass
class Either(Node):
    parts: list[Node]

    def ends(self, subject: Text, start: int) -> Iterator[int]:
        yield from {end for part in self.parts for end in part.ends(subject, start)}

    def sample(self, rng: random.Random) -> str:
        return rng.choice(self.parts).sample(rng)

    def regex(self) -> str:
        return f"(?:{'|'.join(part.regex() for part in self.parts)})"

    def gbnf(self, rules: list[str]) -> str:
        return f"({' | '.join(part.gbnf(rules) for part in self.parts)})"


@dataclasses.dataclass
class Times(Node):
    """A part again and again, so many times."""

    part: Node
    least: int
    most: int
    written: str  # {2,3} or ?

    def ends(self, subject: Text, start: int) -> Iterator[int]:
        places, found = {start}, {start} if self.least == 0 else set()
        for count in range(1, self.most + 1):
            places = {end for place in places for end in self.part.ends(subject, place)}
            found |= places if count >= self.least else set()
        yield from found

    def sample(self, rng: random.Random) -> str:
        return "".join(self.part.sample(rng) for _ in range(rng.randint(self.least, min(self.most, self.least + 3))))

    def regex(self) -> str:
        return f"(?:{self.part.regex()}){self.written}"

    def gbnf(self, rules: list[str]) -> str:
        return f"({self.part.gbnf(rules)}){self.written}"


@dataclasses.dataclass
class Rule(Node):
    """A part that GBNF writes as a rule of its own name."""

    part: Node
    name: str

    def ends(self, subject: Text, start: int) -> Iterator[int]:
        yield from self.part.ends(subject, start)

    def sample(self, rng: random.Random) -> str:
        return self.part.sample(rng)

    def regex(self) -> str:
        return self.part.regex()

    def gbnf(self, rules: list[str]) -> str:
        rules.append(f"{self.name} ::= {self.part.gbnf(rules)}")
        return self.name


@dataclasses.dataclass
class Nest(Node):
    """A rule of GBNF that names itself: a part within any number of brackets, or a list of parts."""

    part: Node
    left: str
    right: str  # "" of a list, in which `left` separates
    name: str

    def ends(self, subject: Text, start: int) -> Iterator[int]:
        left, right = Literal(self.left), Literal(self.right)
        if self.right:
            yield from self.part.ends(subject, start)
            for inner in left.ends(subject, start):
                for end in self.ends(subject, inner):
                    yield from right.ends(subject, end)
            return
        places, found = {start}, set[int]()
        while new := {end for place in places for end in self.part.ends(subject, place)} - found:
            found |= new
            places = {end for place in new for end in left.ends(subject, place)}
        yield from found

    def sample(self, rng: random.Random) -> str:
        depth = rng.randint(0, 3)
        if self.right:
            return self.left * depth + self.part.sample(rng) + self.right * depth
        return self.left.join(self.part.sample(rng) for _ in range(depth + 1))

    def gbnf(self, rules: list[str]) -> str:
        part, left, right = self.part.gbnf(rules), Literal(self.left).gbnf(rules), Literal(self.right).gbnf(rules)
        rules.append(
            f"{self.name} ::= " + (f"{left} {self.name} {right} | {part}" if self.right else f"({part}) ({left} {self.name})?")
        )
        return self.name


def matches(pattern: Node, text: str) -> bool:
    """Whether the whole text is one match."""
    return len(text) in pattern.ends(Text(text), 0)


def may_become_match(pattern: Node, text: str) -> bool:
    """Whether the text is the beginning of a match."""
    subject = Text(text)
    return len(text) in pattern.ends(subject, 0) or subject.runs_out


def grammar_of(pattern: Node) -> str:
    rules: list[str] = []
    root = pattern.gbnf(rules)
    return "\n".join([f"root ::= {root}", *rules]) + "\n"


def random_pattern(rng: random.Random, literal: Callable[[], str], *, is_gbnf: bool, letters: str) -> Node:
    """A pattern of few parts whose matches are short. `letters`: of which classes are made."""
    names = iter(rng.sample(["word", "my-rule", "my_rule", "x2", "the-end", "rule-a-b", "Any"], 7))

    def one_of() -> OneOf:
        chosen = tuple(rng.sample(letters, rng.randint(1, 4)))
        ranges = rng.choice(((), (), (("a", "c"),), (("0", "9"),), (("b", "d"), ("A", "C"))))
        outside = tuple(letter for letter in chosen if not any(first <= letter <= last for first, last in ranges))
        return OneOf(outside, ranges, is_negated=rng.random() < 0.3) if outside or ranges else OneOf(chosen)

    def leaf() -> Node:
        draw = rng.random()
        return Literal(literal()) if draw < 0.6 else one_of() if draw < 0.9 else Any(is_gbnf)

    def times(part: Node) -> Times:
        least, most = rng.choice(((0, 1), (2, 2), (1, 3), (0, 2)))
        written = "?" if most == 1 else f"{{{least}}}" if least == most else f"{{{least},{most}}}"
        return Times(part, least, most, f"{{,{most}}}" if is_gbnf and least == 0 and rng.random() < 0.3 else written)

    def part(depth: int) -> Node:
        draw = rng.random()
        if depth == 0 or draw < 0.4:
            return leaf()
        if draw < 0.6:
            return Either([part(depth - 1) for _ in range(rng.randint(2, 3))])
        if draw < 0.8:
            return times(part(depth - 1))
        found = Row([part(depth - 1) for _ in range(rng.randint(2, 3))])
        return Rule(found, next(names)) if is_gbnf and rng.random() < 0.5 else found

    return Row([part(2) for _ in range(rng.randint(1, 3))])


def _escaped(letter: str, special: frozenset[str]) -> str:
    """A letter in a regex; what can not be seen as its number."""
    if letter in SHORT:
        return SHORT[letter]
    if letter < " " or letter in "\x7f\x85":
        return f"\\x{ord(letter):02x}"
    return "\\" + letter if letter in special else letter


def _quoted(letter: str, special: str) -> str:
    """A letter in GBNF, some of them as \\u."""
    if letter in SHORT:
        return SHORT[letter]
    if letter < " " or letter in "\x7f\x85":
        return f"\\x{ord(letter):02x}"
    if letter in "é\u0301":
        return f"\\u{ord(letter):04x}"
    return "\\" + letter if letter in special else letter

"""Images in rendered prompts: each family's template writes a placeholder, for which the image's tokens and marks are put."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import InvalidRequest
from weft.ipc.messages import Image
from weft.text.image_parts import images_of
from weft.text.image_sizing import (
    BudgetSizing,
    EdgeSizing,
    GridSizing,
    ImageSizing,
    Sizing,
    SquareSizing,
    TileSizing,
)
from weft.text.images import DecodedImage, Frame
from weft.text.sizing_reader import read_sizing
from weft.text.template import Capabilities
from weft.text.tokenizer import Tokenizer
from weft.text.types import Conversation

Counts = list[tuple[int, int]]  # rows and columns of tokens of an image's frames
TextOf = Callable[[str], str | None]  # from the name of a token in config.json to its text


@dataclass(frozen=True)
class Markup:
    """What is put for an image: its tokens between two marks, in place of the placeholder."""

    token: str
    placeholder: str
    before: str = ""
    after: str = ""
    row_ends: int = 0  # tokens behind each row of an image

    @property
    def reserved(self) -> set[str]:
        """Texts that stand for images, and so for nothing that a user writes."""
        return {self.token, self.placeholder}

    def write(self, image: DecodedImage, counts: Counts) -> str:  # noqa: ARG002 – families that cut images read it
        return self.before + "".join(self.token * (rows * columns) for rows, columns in counts) + self.after


@dataclass(frozen=True)
class TileMarkup(Markup):
    """What Idefics3 and SmolVLM put for an image: its tiles with their rows and columns, and the whole behind them."""

    fake: str = "<fake_token_around_image>"
    whole: str = "<global-img>"

    def write(self, image: DecodedImage, counts: Counts) -> str:
        frames = [self.token * (rows * columns) for rows, columns in counts]
        parts = []
        if len(frames) > 1:
            columns, rows = image.plan.views[0].grid
            for row in range(rows):
                tiles = enumerate(frames[row * columns : (row + 1) * columns])
                parts += [f"{self.fake}<row_{row + 1}_col_{column + 1}>{tile}" for column, tile in tiles]
                parts.append("\n")
            parts.append("\n")
        return "".join([*parts, self.fake, self.whole, frames[-1], self.fake])


@dataclass(frozen=True)
class GridMarkup(Markup):
    """What LFM2-VL puts for an image: its tokens, or its tiles with their rows and columns and the whole behind them."""

    def write(self, image: DecodedImage, counts: Counts) -> str:
        frames = [self.token * (rows * columns) for rows, columns in counts]
        columns, rows = image.plan.views[0].grid
        if rows * columns > 1:
            marks = [f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(rows) for column in range(columns)]
            marks += ["<|img_thumbnail|>"] * (len(frames) - len(marks))
            frames = [mark + frame for mark, frame in zip(marks, frames, strict=True)]
        return "".join(["<|image_start|>", *frames, "<|image_end|>"])


@dataclass(frozen=True)
class RowMarkup(Markup):
    """What Pixtral and Mistral 3 put for an image: a mark behind each row of its tokens, another one behind the last."""

    row_ends: int = 1

    def write(self, image: DecodedImage, counts: Counts) -> str:  # noqa: ARG002 – its counts say everything
        ((rows, columns),) = counts
        return "[IMG_BREAK]".join([self.token * columns] * rows) + "[IMG_END]"


def _rows(token: str, text_of: TextOf) -> Markup:  # noqa: ARG001 – the marks have the same texts in all models
    return RowMarkup(token, token)


def _grid(token: str, text_of: TextOf) -> Markup:  # noqa: ARG001 – the marks have the same texts in all models
    return GridMarkup(token, token)


def _tiles(token: str, text_of: TextOf) -> Markup:  # noqa: ARG001 – the marks have the same texts in all models
    return TileMarkup(token, token)


def _plain(token: str, text_of: TextOf) -> Markup:  # noqa: ARG001 – the template has the marks
    return Markup(token, token)


def _gemma3(token: str, text_of: TextOf) -> Markup | None:
    start, end = text_of("boi_token"), text_of("eoi_token")
    return None if start is None or end is None else Markup(token, start, f"\n\n{start}", f"{end}\n\n")


def _gemma4(token: str, text_of: TextOf) -> Markup | None:
    start, end = text_of("boi_token"), text_of("eoi_token")
    return None if start is None or end is None else Markup(token, token, start, end)


MARKUPS: dict[type[Sizing], Callable[[str, TextOf], Markup | None]] = {
    ImageSizing: _plain,
    SquareSizing: _gemma3,
    BudgetSizing: _gemma4,
    TileSizing: _tiles,
    GridSizing: _grid,
    EdgeSizing: _rows,
}


@dataclass(frozen=True)
class ImageWriter:
    """How a model's prompts hold images: the token that stands for a piece of one, and the sizes it was trained with."""

    token: int
    markup: Markup
    sizing: Sizing

    @classmethod
    def of(cls, folder: Path, tokenizer: Tokenizer, capabilities: Capabilities | None) -> "ImageWriter | None":
        """Read it from a model's folder; None where its files or its chat template have no place for images."""
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        token, sizing = _token(config, "image_token"), read_sizing(folder)
        if token is None or sizing is None or capabilities is None:
            return None

        def text_of(name: str) -> str | None:
            found = _token(config, name)
            return None if found is None else tokenizer.decode([found], skip_special_tokens=False)

        markup = MARKUPS[type(sizing)](tokenizer.decode([token], skip_special_tokens=False), text_of)
        is_known = markup is not None and capabilities.image.count(markup.placeholder) == 1
        return cls(token, markup, sizing) if markup is not None and is_known else None

    def expand(self, conversation: Conversation, prompt: str) -> str:
        """Put tokens and marks for the images of a rendered prompt.

        Raises InvalidRequest if a text has what stands for one, unless that is hidden in it (`Hiding`).
        """
        images, markup = images_of(conversation), self.markup
        pieces = prompt.split(markup.placeholder)
        if len(pieces) != len(images) + 1 or any(one in prompt for one in markup.reserved - {markup.placeholder}):
            for index, message in enumerate(conversation.messages):
                if written := [one for one in markup.reserved if any(one in text for text in message.texts)]:
                    place = message.place or f"messages[{index}]"
                    words = f"{place} has {written[0]} in its text, which stands for images here; leave it out"
                    raise InvalidRequest(words, place)
            count = f"the prompt has {self.markup.placeholder} {len(pieces) - 1} times, and the request has {len(images)} images"
            raise InvalidRequest(f"{count}; leave it out of texts", "messages")
        found = [pieces[0]]
        for image, piece in zip(images, pieces[1:], strict=True):
            found += [self.markup.write(image, [self._tokens(frame) for frame in image.frames]), piece]
        return "".join(found)

    def _tokens(self, frame: Frame) -> tuple[int, int]:
        """Return the rows and columns of a frame's tokens."""
        return frame.height // self.sizing.factor, frame.width // self.sizing.factor

    def placed(self, conversation: Conversation, ids: list[int]) -> tuple[Image, ...]:
        """Return the images of an encoded prompt, and tiles of images, with their places in it."""
        found, start = [], 0
        for frame in (frame for image in images_of(conversation) for frame in image.frames):
            start = ids.index(self.token, start)
            found.append(Image(start, *self._tokens(frame), frame.key, frame.pixels, self.markup.row_ends))
            start = found[-1].end
        return tuple(found)


def _token(config: dict[str, Any], name: str) -> int | None:
    """Return the id of a token that a config names, with one ending or the other."""
    found = config.get(f"{name}_id", config.get(f"{name}_index"))
    return found if isinstance(found, int) else None

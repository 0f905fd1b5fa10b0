"""Images in conversations: finds the parts of messages that are images in any dialect, and the places of images in prompts."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.errors import ImageProblem, InvalidRequest, UnsupportedParameter
from weft.ipc.messages import Image
from weft.text.images import DecodedImage, ImageSizing, read_base64, read_data_url, read_sizing
from weft.text.template import Capabilities
from weft.text.tokenizer import Tokenizer
from weft.text.types import Conversation, Message

MAX_IMAGES = 32  # of a request
LOW_DETAIL_PIXELS = 512 * 512
KINDS = ("image_url", "input_image", "image")
Part = dict[str, Any]


@dataclass(frozen=True)
class ImageFile:
    """An image of a conversation as it was sent: its file's bytes, where it stands, and how large it may be."""

    place: str
    data: bytes
    max_pixels: int | None = None  # None: as the model allows

    def problem(self, error: ImageProblem) -> ImageProblem:
        """Return what is wrong with the image, with its place."""
        return ImageProblem(f"{self.place}: {error}", self.place)


def image_places(conversation: Conversation) -> Iterator[tuple[str, Part]]:
    """Iterate over the parts of a conversation that are images, in its order, each with its path in the request."""
    for index, message in enumerate(conversation.messages):
        for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.get("type") in KINDS:
                yield f"{message.place or f'messages[{index}]'}.content[{number}]", part


def read_images(conversation: Conversation) -> list[ImageFile]:
    """Return the images of a conversation in its order. Raises ImageProblem naming the part that can not be one."""
    places = list(image_places(conversation))
    if len(places) > MAX_IMAGES:
        raise ImageProblem(f"the request has {len(places)} images, and {MAX_IMAGES} are allowed", places[MAX_IMAGES][0])
    return [_read(part, place) for place, part in places]


def _read(part: Part, place: str) -> ImageFile:
    try:
        data, detail = _data(part, place)
    except ImageProblem as error:
        raise ImageProblem(f"{place}: {error}", place) from error
    if detail not in (None, "auto", "low", "high", "original"):
        raise InvalidRequest(f"{place}: detail is {detail!r}; it is auto, low, high or original", place)
    return ImageFile(place, data, LOW_DETAIL_PIXELS if detail == "low" else None)


def _data(part: Part, place: str) -> tuple[bytes, Any]:
    match part:
        case {"type": "image_url", "image_url": {"url": str(url), **more}}:
            return read_data_url(url), more.get("detail")
        case {"type": "image_url" | "input_image", "image_url": str(url), **more}:
            return read_data_url(url), more.get("detail")
        case {"type": "image", "source": {"type": "base64", "data": str(text), **more}}:
            media_type = more.get("media_type")
            return read_base64(text, media_type if isinstance(media_type, str) else None), None
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return read_data_url(url), None
        case {"type": "image", "image": str(text)}:
            return (read_data_url(text) if text[:5].lower() == "data:" else read_base64(text)), None
    message = f"{place} is an image that is neither a data URL nor base64; files and references are not kept here"
    raise UnsupportedParameter(message, place)


def with_images(conversation: Conversation, images: Sequence[DecodedImage]) -> Conversation:
    """Return the conversation with these images in the places of its image parts, in their order."""
    waiting = iter(images)

    def seen(message: Message) -> Message:
        if not isinstance(message.content, list):
            return message
        parts = [{"type": "image", "image": next(waiting)} if part.get("type") in KINDS else part for part in message.content]
        return replace(message, content=parts)

    return replace(conversation, messages=tuple(map(seen, conversation.messages)))


def images_of(conversation: Conversation) -> list[DecodedImage]:
    """Return the images in a conversation that `with_images` made."""
    return [part["image"] for _, part in image_places(conversation) if isinstance(part.get("image"), DecodedImage)]


@dataclass(frozen=True)
class ImageWriter:
    """How a model's prompts hold images: the token that stands for a piece of one, and the sizes it was trained with."""

    token: int
    text: str  # of that token
    sizing: ImageSizing

    @classmethod
    def of(cls, folder: Path, tokenizer: Tokenizer, capabilities: Capabilities | None) -> "ImageWriter | None":
        """Read it from a model's folder; None where its files or its chat template have no place for images."""
        path = folder / "config.json"
        token = json.loads(path.read_text(encoding="utf-8")).get("image_token_id") if path.is_file() else None
        sizing = read_sizing(folder)
        if not isinstance(token, int) or sizing is None or capabilities is None:
            return None
        text = tokenizer.decode([token], skip_special_tokens=False)
        return cls(token, text, sizing) if capabilities.image.count(text) == 1 else None

    def expand(self, conversation: Conversation, prompt: str) -> str:
        """Write the image token of a rendered prompt once for each token of its image; raises InvalidRequest if a text has it."""
        for index, message in enumerate(conversation.messages):
            if any(self.text in text for text in message.texts):
                place = message.place or f"messages[{index}]"
                raise InvalidRequest(f"{place} has {self.text} in its text, which stands for images here; leave it out", place)
        images = images_of(conversation)
        pieces = prompt.split(self.text)
        if len(pieces) != len(images) + 1:
            count = f"the prompt has {self.text} {len(pieces) - 1} times, and the request has {len(images)} images"
            raise InvalidRequest(f"{count}; leave it out of texts", "messages")
        found = [pieces[0]]
        for image, piece in zip(images, pieces[1:], strict=True):
            found += [self.text * self.num_tokens(image), piece]
        return "".join(found)

    def num_tokens(self, image: DecodedImage) -> int:
        return image.width * image.height // self.sizing.factor**2

    def placed(self, conversation: Conversation, ids: list[int]) -> tuple[Image, ...]:
        """Return the images of an encoded prompt with their places in it."""
        found, start = [], 0
        for image in images_of(conversation):
            start = ids.index(self.token, start)
            rows, columns = image.height // self.sizing.factor, image.width // self.sizing.factor
            found.append(Image(start, rows, columns, image.key, image.pixels))
            start += rows * columns
        return tuple(found)

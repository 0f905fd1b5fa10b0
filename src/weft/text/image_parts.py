"""Images in conversations: finds the parts of messages that are images in any dialect, and reads what they hold."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.errors import ImageProblem, InvalidRequest, UnsupportedParameter
from weft.text.images import DecodedImage, read_base64, read_data_url
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

"""Features of images, kept by content: an image that comes again, in another prompt or after an eviction, is not encoded again.

Encoding is part of the prompt chunk that first has tokens of an image; this module knows which images of a chunk are encoded.
"""

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

import mlx.core as mx

from weft.engine.sequence import Sequence
from weft.model.vision.vision import Seen, Vision

MAX_BYTES = 128 << 20  # of features kept; the newest are, whatever their size

Key = tuple[str, str, bytes]  # the scope and the salt of the request, and the image's own key


@dataclass(frozen=True)
class ChunkImages:
    """The images of one prompt chunk: what its forward is handed, and what is encoded with it."""

    seen: Seen
    states: list[mx.array] = field(default_factory=list)  # of the encodings, to be evaluated before the chunk's layers
    encoded: dict[Key, mx.array] = field(default_factory=dict)  # lazy features of images that were not known


class ImageFeatures:
    """Keeps the features of images by key, least recently used first out, and counts encodings and hits."""

    def __init__(self, vision: Vision, max_bytes: int = MAX_BYTES) -> None:
        self.vision = vision
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.num_encoded = 0
        self.num_hits = 0
        self.encode_seconds = 0.0
        self._kept: OrderedDict[Key, mx.array] = OrderedDict()

    def of_chunk(self, sequence: Sequence, start: int, count: int) -> ChunkImages:
        """Return what a chunk of a prompt with images needs; images not known yet are encoded with it, lazily."""
        images, end = sequence.request.images, start + count
        features: dict[bytes, mx.array] = {}
        states: list[list[mx.array]] = []
        encoded: dict[Key, mx.array] = {}
        for image in images:
            if image.start >= end or image.end <= start or image.key in features:
                continue
            key = sequence.request.scope, sequence.request.salt, image.key
            if (known := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                self.num_hits += image.start >= start  # not where a chunk begins amid an image
                features[image.key] = known
            else:
                states.append(self.vision.encode(image))
                features[image.key] = encoded[key] = states[-1][-1]
        tokens = [sequence.token_at(position) for position in range(start, end)]
        return ChunkImages(self.vision.see(tokens, start, images, features), [*itertools.chain(*states)], encoded)

    @property
    def counters(self) -> dict[str, float]:
        return {"encoded": self.num_encoded, "hits": self.num_hits, "seconds": self.encode_seconds}

    def keep(self, encoded: dict[Key, mx.array]) -> None:
        """Keep features that were evaluated."""
        for key, features in encoded.items():
            self.num_encoded += 1
            if key not in self._kept:
                self._kept[key] = features
                self.held_bytes += features.nbytes
        while self.held_bytes > self.max_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self.held_bytes -= dropped.nbytes

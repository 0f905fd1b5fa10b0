"""A folder of mlx-lm's kind becomes a loaded model: files checked, weights read, cast and evaluated.

mlx-lm knows the architectures and quantisations; this file checks everything before mlx touches it, so that a damaged
folder is one clear sentence and never a crash. It knows nothing of names and downloads; the engine calls `load`.
"""

from __future__ import annotations

import copy
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils

from weft.errors import BadModel, ModelError, UnsupportedModel
from weft.model.fetch import Progress

Json = dict[str, Any]

STEP_BYTES = 1 << 27  # weights evaluated at a time: bounds what the cast holds twice
MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
# The dtypes mlx reads, and the bytes of one value.
DTYPE_BYTES = {
    "F32": 4, "F16": 2, "BF16": 2, "C64": 8, "F8_E4M3": 1, "F8_E8M0": 1, "BOOL": 1,
    "I8": 1, "I16": 2, "I32": 4, "I64": 8, "U8": 1, "U16": 2, "U32": 4, "U64": 8,
}  # fmt: skip
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")  # where wrappers keep the language model's facts
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and the facts others ask it for."""

    model: nn.Module
    config: Json  # config.json as mlx-lm took it
    folder: Path
    extra_tensors: dict[str, Path]  # names in the files that the model itself does not take (mtp.*, vision), and where
    eos_token_ids: tuple[int, ...]
    context_length: int | None
    vocab_size: int
    weights_bytes: int


def load(folder: Path, *, progress: Progress | None = None) -> LoadedModel:
    """Load the model in `folder`; on a CPU its plain weights, scales and so its activations are float32.

    Everything is evaluated in the calling thread before this returns. Raises BadModel or UnsupportedModel.
    """
    written = _read_config(folder)
    generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    files = _weight_files(folder)
    watch = _LoadObserver(folder, _model_class(folder, written))
    model, config = _build(folder, watch)
    _bring_in(folder, model, progress or (lambda *_: None))
    text_config = _text_config(config)
    return LoadedModel(
        model=model,
        config=config,
        folder=folder,
        extra_tensors={name: file for name, file in files.items() if name in watch.extra or not _is_loaded(file)},
        eos_token_ids=_eos_token_ids(folder, generation, written, _text_config(written)),
        context_length=next((text_config[key] for key in CONTEXT_KEYS if isinstance(text_config.get(key), int)), None),
        vocab_size=_vocab_size(folder, model, text_config),
        weights_bytes=sum(array.nbytes for _, array in tree_flatten(model.parameters())),
    )


# --- config.json and its neighbours ----------------------------------------------------------------------------------


def _read_config(folder: Path) -> Json:
    if not folder.is_dir():
        raise BadModel(f"{folder} is not a folder; give the path of a model folder")
    if not (folder / "config.json").is_file():
        raise BadModel(f"{folder} has no config.json; give the folder of a model in mlx-lm's format")
    config = _read_json(folder / "config.json")
    if config.get("model_file") is not None:
        raise UnsupportedModel(
            f"{folder / 'config.json'} asks to run {config['model_file']!r} from the model's folder; weft runs no code "
            "that comes with weights, so use a model whose architecture mlx-lm has"
        )
    if not isinstance(config.get("model_type"), str):
        raise BadModel(f"{folder / 'config.json'} has no model_type, so its architecture is unknown; download it again")
    return config


def _read_json(path: Path) -> Json:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: not JSON, or not UTF-8
        raise BadModel(f"{path} could not be read as JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise BadModel(f"{path} holds no JSON object; download it again")
    return value


def _text_config(config: Json) -> Json:
    for key in TEXT_CONFIGS:
        if isinstance(inner := config.get(key), dict):
            return {name: value for name, value in config.items() if name != key} | inner
    return dict(config)


def _eos_token_ids(folder: Path, *sources: Json) -> tuple[int, ...]:
    found: dict[int, None] = {}  # keeps the order and drops what is named twice
    for source in sources:
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if not isinstance(token, int) or isinstance(token, bool):
                raise BadModel(f"{folder} names the eos_token_id {token!r}, which is not a token id; mend its config.json")
            found[token] = None
    return tuple(found)


def _vocab_size(folder: Path, model: nn.Module, text_config: Json) -> int:
    if isinstance(size := text_config.get("vocab_size"), int):
        return size
    for module in model.modules():  # some configs leave it to the architecture's default
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            return int(module.num_embeddings if isinstance(module, nn.QuantizedEmbedding) else module.weight.shape[0])
    raise UnsupportedModel(f"{folder / 'config.json'} has no vocab_size, and the model has no embedding to count")


# --- weight files ----------------------------------------------------------------------------------------------------


def _is_loaded(file: Path) -> bool:
    """Whether mlx-lm reads this file; it takes every model*.safetensors."""
    return file.name.startswith("model")


def _weight_files(folder: Path) -> dict[str, Path]:
    """Every tensor in the folder and the file it is in; each file is checked against its own table of contents."""
    _check_index(folder)
    if not list(folder.glob("model*.safetensors")):
        raise BadModel(f"{folder} has no model*.safetensors, so there are no weights; download or convert the model again")
    found: dict[str, Path] = {}
    for file in sorted([*folder.glob("model*.safetensors"), *folder.glob("mtp*.safetensors")]):
        for name in _tensor_names(file):
            if name in found:
                raise BadModel(f"{file} and {found[name]} both hold {name}; remove the file that does not belong here")
            found[name] = file
    return found


def _check_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise BadModel(f"{index} has no weight_map; download it again")
    for shard in sorted({str(name) for name in shards.values()}):
        if not (folder / shard).is_file():
            raise BadModel(f"{folder / shard} is missing, though {index.name} names it; download the model again")


def _tensor_names(file: Path) -> Iterable[str]:
    """The names in a safetensors file whose header fits the file to the byte.

    mlx believes the header: a wrong one would be read as garbage or end the process.
    """
    header, data_bytes = _header(file)
    header.pop("__metadata__", None)
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: _start(item[1])):
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(first), int(last)]}:
                if dtype not in DTYPE_BYTES:
                    raise UnsupportedModel(f"{file} stores {name} as {dtype}, which mlx can not read; convert the model")
                is_counted = all(isinstance(length, int) and length >= 0 for length in shape)
                if not is_counted or first != end or last - first != math.prod(shape) * DTYPE_BYTES[dtype]:
                    raise BadModel(f"{file} has a header that contradicts itself at {name}; download it again")
                end = last
            case _:
                raise BadModel(f"{file} has a broken entry for {name} in its header; download it again")
    if end != data_bytes:
        raise BadModel(f"{file} should hold {end} bytes of weights but holds {data_bytes}; download it again")
    return header


def _start(entry: Any) -> int:
    match entry:
        case {"data_offsets": [int(first), _]}:
            return first
    return -1


def _header(file: Path) -> tuple[Json, int]:
    """The JSON at the head of a safetensors file, and how many bytes follow it."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise BadModel(f"{file} is not a whole safetensors file: it is cut off or something else; download it again")
            header = json.loads(opened.read(length))
    except OSError as error:
        raise BadModel(f"{file} could not be read ({error.strerror or error}); download it again") from error
    except (ValueError, RecursionError) as error:
        raise BadModel(f"{file} has a header that is not JSON, so it is no safetensors file; download it again") from error
    if not isinstance(header, dict):
        raise BadModel(f"{file} has a header that is no JSON object; download it again")
    return header, size - 8 - length


# --- the model -------------------------------------------------------------------------------------------------------


def _model_class(folder: Path, config: Json) -> tuple[Any, Any]:
    try:
        model_class, args_class = mlx_lm_utils._get_classes(config)
    except (ValueError, AttributeError) as error:  # AttributeError: a module of mlx-lm that is no architecture
        raise UnsupportedModel(
            f"{folder / 'config.json'} has model_type {config['model_type']!r}, which mlx-lm {mlx_lm.__version__} does "
            "not know; use a model of another architecture"
        ) from error
    return model_class, args_class


def _build(folder: Path, watch: _LoadObserver) -> tuple[nn.Module, Json]:
    """Let mlx-lm make the model, with lazy weights, and look over its shoulder."""
    try:
        model, config = mlx_lm_utils.load_model(folder, lazy=True, strict=False, get_model_classes=watch.classes)
    except ModelError:
        raise
    except Exception as error:  # whatever a config or a sanitizer stumbles over: it names the folder at least
        raise BadModel(
            f"{folder} could not be built as mlx-lm's {watch.name} ({type(error).__name__}: {error}); "
            "its config.json and weights do not fit this architecture"
        ) from error
    watch.leave(model)
    return model, config


class _LoadObserver:
    """Sees which tensors of the files the model takes.

    mlx-lm reads, renames and quantises in one function; the two methods it calls on the model on the way are watched.
    """

    def __init__(self, folder: Path, classes: tuple[Any, Any]) -> None:
        self.folder = folder
        self.model_class, self.args_class = classes
        self.extra: set[str] = set()
        self.read: dict[str, mx.array] = {}  # the arrays under their names in the files, while mlx-lm is at work

    @property
    def name(self) -> str:
        return str(self.model_class.__module__.rpartition(".")[2])

    def classes(self, config: Json) -> tuple[Callable[[Any], nn.Module], Any]:  # noqa: ARG002 – known already
        """What mlx-lm asks for the classes to use."""
        return self.make_model, self.args_class

    def make_model(self, args: Any) -> nn.Module:
        model = self.model_class(args)

        def sanitize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
            self.read = dict(weights)
            kept: dict[str, mx.array] = self.model_class.sanitize(model, dict(weights))
            self.extra |= self.dropped(args, weights, kept)
            return kept

        def load_weights(weights: list[tuple[str, mx.array]], strict: bool) -> None:  # noqa: ARG001 – we check
            nn.Module.load_weights(model, self.matched(model, dict(weights)), strict=False)

        if hasattr(model, "sanitize"):
            object.__setattr__(model, "sanitize", sanitize)
        object.__setattr__(model, "load_weights", load_weights)
        return model

    def leave(self, model: nn.Module) -> None:
        """Give the model its own methods back, and let go of the arrays."""
        self.read = {}
        for name in ("sanitize", "load_weights"):
            if name in vars(model):
                object.__delattr__(model, name)

    def dropped(self, args: Any, weights: dict[str, mx.array], kept: dict[str, mx.array]) -> set[str]:
        """The tensors that the sanitizer left out.

        A tensor that came through unchanged was kept. One that did not was dropped, or went into another (a shifted
        norm, stacked experts): it was dropped if, without it and its like, the same names come out.
        """
        through = {id(array) for array in kept.values()}
        survivors = {name for name, array in weights.items() if id(array) in through}
        dropped: set[str] = set()
        for group in _groups([name for name in weights if name not in survivors], survivors):
            if self.same_names_without(args, weights, set(group), set(kept)):
                dropped |= set(group)
        return dropped

    def same_names_without(self, args: Any, weights: dict[str, mx.array], group: set[str], names: set[str]) -> bool:
        rest = {name: array for name, array in weights.items() if name not in group}
        model = self.model_class(copy.deepcopy(args))  # a sanitizer may change its model
        try:
            return set(model.sanitize(rest)) == names
        except (LookupError, ValueError, TypeError, AttributeError):
            return False  # it stumbled without them, so it uses them

    def matched(self, model: nn.Module, weights: dict[str, mx.array]) -> list[tuple[str, mx.array]]:
        """The weights the model has a place for; each place must be filled, by an array of its shape and sort."""
        places = dict(tree_flatten(model.parameters()))
        if missing := [name for name in places if name not in weights]:
            raise BadModel(
                f"{self.folder} lacks the tensor {missing[0]} ({len(missing)} of {len(places)} are missing); "
                "download the model again"
            )
        for name, place in places.items():
            self.check(name, place, weights[name])
        self.set_aside([name for name in weights if name not in places], places, weights)
        return [(name, weights[name]) for name in places]

    def check(self, name: str, place: mx.array, array: mx.array) -> None:
        if array.shape != place.shape:
            raise BadModel(
                f"{self.folder} holds {name} of shape {array.shape} where its config.json asks for {place.shape}; "
                "the files do not belong together, so download the model again"
            )
        if mx.issubdtype(array.dtype, mx.floating) != mx.issubdtype(place.dtype, mx.floating):
            raise BadModel(
                f"{self.folder} holds {name} as {array.dtype} where mlx-lm's {self.name} has {place.dtype}; "
                "its quantisation is not what its config.json says"
            )

    def set_aside(self, homeless: list[str], places: dict[str, mx.array], weights: dict[str, mx.array]) -> None:
        """Remember tensors without a place; refuse those of a part the model has, as without them it would be wrong."""
        parts = {_part(name) for name in places}
        names = {id(array): name for name, array in self.read.items()}
        for name in homeless:
            if _part(name) in parts:
                raise UnsupportedModel(
                    f"{self.folder} holds {name}, which mlx-lm's {self.name} has no place for; "
                    "it would be ignored and the answers would be wrong, so use another conversion of this model"
                )
            self.extra.add(names.get(id(weights[name]), name))


def _part(name: str) -> str:
    """The part of a model a tensor belongs to: its layer (up to the first number), or its module."""
    steps = name.split(".")
    for position, step in enumerate(steps):
        if step.isdigit():
            return ".".join(steps[: position + 1])
    return ".".join(steps[:-1])


def _groups(gone: list[str], survivors: set[str]) -> Iterable[list[str]]:
    """Names in groups that live or die together: the largest part without a survivor, in all layers alike."""
    alive = {".".join(name.split(".")[:depth]) for name in survivors for depth in range(1, name.count(".") + 2)}
    groups: dict[str, list[str]] = defaultdict(list)
    for name in gone:
        steps = name.split(".")
        prefixes = (steps[:depth] for depth in range(1, len(steps) + 1))
        largest = next(prefix for prefix in prefixes if ".".join(prefix) not in alive)
        groups[".".join("*" if step.isdigit() else step for step in largest)].append(name)
    return groups.values()


def _bring_in(folder: Path, model: nn.Module, progress: Progress) -> None:
    """Read, cast and evaluate the weights, some at a time; what is done is no longer held in its old dtype."""
    on_cpu = mx.default_device() == mx.cpu
    waiting = tree_flatten(model.parameters())[::-1]
    total = sum(array.nbytes for _, array in waiting)
    done = 0
    while waiting:
        step: list[tuple[str, mx.array]] = []
        step_bytes = 0
        while waiting and step_bytes < STEP_BYTES:
            name, array = waiting.pop()
            step_bytes += array.nbytes
            step.append((name, _for_cpu(array) if on_cpu else array))
            del array
        model.load_weights(step, strict=False)
        try:
            mx.eval([array for _, array in step])
        except RuntimeError as error:
            raise BadModel(f"the weights in {folder} could not be read ({error}); download the model again") from error
        done += step_bytes
        if total > STEP_BYTES:  # what loads at once needs no bar
            progress("loading weights", done, total)


def _for_cpu(array: mx.array) -> mx.array:
    """Half-precision matrix products are slow scalar code on a CPU; float32 goes through BLAS."""
    return array.astype(mx.float32) if array.dtype in (mx.float16, mx.bfloat16) else array

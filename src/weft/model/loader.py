"""Loads weights and config (not the tokenizer) of an mlx-lm model folder; damaged files raise one-sentence errors."""

import copy
import json
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
from mlx.utils import tree_flatten

from weft.errors import BadModel, ModelError, UnsupportedModel
from weft.kernels import packed
from weft.memory.safetensors import DTYPE_BYTES, read_header
from weft.model.architectures import find_classes
from weft.model.download import Progress
from weft.model.load_phases import LoadPhases
from weft.model.sharding import Group, shard_model

log = logging.getLogger("weft.model")

STEP_BYTES = 1 << 27  # weights evaluated at a time: bounds what the cast holds twice
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")  # where wrappers keep the language model's config
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")

Json = dict[str, Any]
Weights = dict[str, mx.array]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with its config, folder, EOS tokens, context length, vocabulary size and bytes of weights."""

    model: nn.Module
    config: Json  # config.json as mlx-lm took it
    folder: Path
    extra_tensors: dict[str, Path]  # names in the files that the model itself does not take (mtp.*, vision), and where
    eos_token_ids: tuple[int, ...]
    context_length: int | None
    vocab_size: int
    weights_bytes: int
    head_error: str | None = None  # why the files of an MTP head beside it can not be read
    num_shards: int = 1  # ranks that the layers are divided over


def load(
    folder: Path, *, progress: Progress | None = None, phases: LoadPhases | None = None, group: Group | None = None
) -> LoadedModel:
    """Load the model in `folder` and evaluate its weights; on a CPU weights become float32 unless weft's product expands them.

    Everything is evaluated in the calling thread before this returns. With a group, only this rank's slices of the layers are.
    Raises BadModel or UnsupportedModel.
    """
    phases = phases or LoadPhases()
    phases.begin("building")
    written = _read_config(folder)
    generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    files = _find_tensors(folder)
    head_files, head_error = _find_head_tensors(folder)
    observer = _LoadObserver(folder, written)
    model, config, extra = observer.build()
    if group is not None:
        shard_model(model, _text_config(config), observer.name, group)
    phases.begin("weights")
    _evaluate(folder, model, progress or (lambda *_: None))
    phases.begin("building")
    text_config = _text_config(config)
    vocab_size = _vocab_size(folder, model, text_config)
    return LoadedModel(
        model=model,
        config=config,
        folder=folder,
        extra_tensors={name: file for name, file in files.items() if name in extra} | head_files,
        head_error=head_error,
        eos_token_ids=_eos_token_ids(folder, vocab_size, generation, written, _text_config(written)),
        context_length=next((text_config[key] for key in CONTEXT_KEYS if isinstance(text_config.get(key), int)), None),
        vocab_size=vocab_size,
        num_shards=1 if group is None else group.size(),
        weights_bytes=sum(array.nbytes for _, array in tree_flatten(model.parameters())),
    )


def _read_config(folder: Path) -> Json:
    path = folder / "config.json"
    if not folder.is_dir():
        raise BadModel(f"{folder} is not a folder; give the path of a model folder")
    if not path.is_file():
        raise BadModel(f"{folder} has no config.json; give the folder of a model in mlx-lm's format")
    config = _read_json(path)
    if config.get("model_file") is not None:
        what = f"{path} asks to run {config['model_file']!r} from the model's folder; weft runs no code that comes with weights"
        raise UnsupportedModel(f"{what}, so use a model whose architecture mlx-lm has")
    if not isinstance(config.get("model_type"), str):
        raise BadModel(f"{path} has no model_type, so its architecture is unknown; download it again")
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
    """Return the config with the language model's own merged over it, which vision wrappers nest one level deeper."""
    return config | next((config[key] for key in TEXT_CONFIGS if isinstance(config.get(key), dict)), {})


def _eos_token_ids(folder: Path, vocab_size: int, *sources: Json) -> tuple[int, ...]:
    """Return the ids that end an answer: those of the configs, and the tokenizer's own; ids that no token has are left out."""
    values = [source.get("eos_token_id") for source in sources]
    tokens = [token for value in values for token in (value if isinstance(value, list) else [value]) if token is not None]
    if wrong := [token for token in tokens if not isinstance(token, int) or isinstance(token, bool)]:
        raise BadModel(f"{folder} names the eos_token_id {wrong[0]!r}, which is not a token id; mend its config.json")
    ids = _token_ids(folder)
    settings = folder / "tokenizer_config.json"
    end = _read_json(settings).get("eos_token") if settings.is_file() else None
    own = ids.get(end["content"] if isinstance(end, dict) and "content" in end else end if isinstance(end, str) else "")
    largest = min(vocab_size - 1, max(ids.values(), default=vocab_size))
    for token in tokens:
        if not 0 <= token <= largest:
            log.warning("%s names the eos_token_id %d, but the last token is %d: it is not used", folder, token, largest)
    return tuple(token for token in dict.fromkeys([*tokens, *([] if own is None else [own])]) if 0 <= token <= largest)


def _token_ids(folder: Path) -> dict[str, int]:
    """Return the ids of a tokenizer's tokens by text; {} if the folder has no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    written = _read_json(path)
    vocabulary = written.get("model", {}).get("vocab", {})  # a list of [text, score] in Unigram models
    ids = vocabulary if isinstance(vocabulary, dict) else {text: index for index, (text, *_) in enumerate(vocabulary)}
    return {**ids, **{token["content"]: token["id"] for token in written.get("added_tokens", ())}}


def _vocab_size(folder: Path, model: nn.Module, text_config: Json) -> int:
    if isinstance(size := text_config.get("vocab_size"), int):
        return size
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)]
    if not embeddings:
        raise UnsupportedModel(f"{folder / 'config.json'} has no vocab_size, and the model has no embedding to count")
    return int(embeddings[0].weight.shape[0])  # some configs leave it to the architecture's default


def _find_tensors(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor in the folder; raises ModelError unless all files are present, whole and readable."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise BadModel(f"{index} has no weight_map; download it again")
        if missing := [shard for shard in sorted({*map(str, shards.values())}) if not (folder / shard).is_file()]:
            raise BadModel(f"{folder / missing[0]} is missing, though {index.name} names it; download the model again")
    if not any(folder.glob("model*.safetensors")):
        raise BadModel(f"{folder} has no model*.safetensors, so there are no weights; download or convert the model again")
    return _tensors_in(sorted(folder.glob("model*.safetensors")))


def _find_head_tensors(folder: Path) -> tuple[dict[str, Path], str | None]:
    """Return the files of the tensors of an MTP head in files of its own, or none and why: the model needs no head to run."""
    try:
        return _tensors_in(sorted(folder.glob("mtp*.safetensors"))), None
    except ModelError as error:
        return {}, str(error)


def _tensors_in(files: list[Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if entry.dtype not in DTYPE_BYTES:
                raise UnsupportedModel(f"{file} stores {name} as {entry.dtype}, which mlx can not read; convert the model")
            if name in found:
                raise BadModel(f"{file} and {found[name]} both hold {name}; remove the file that does not belong here")
            found[name] = file
    return found


class _LoadObserver:
    """Builds a model with mlx-lm's loader and records which tensors of the files the model does not use."""

    def __init__(self, folder: Path, config: Json) -> None:
        self.folder = folder
        self.extra: set[str] = set()  # names in the files of the tensors that the model does not take
        self._read: Weights = {}  # the arrays under their names in the files
        try:
            self.model_class, self.args_class = find_classes(config)
        except (ValueError, AttributeError) as error:  # AttributeError: a module of mlx-lm that is no architecture
            what = f"{folder / 'config.json'} has model_type {config['model_type']!r}, which mlx-lm {mlx_lm.__version__}"
            raise UnsupportedModel(f"{what} does not know; use a model of another architecture") from error
        self.name = str(self.model_class.__module__.rpartition(".")[2])

    def build(self) -> tuple[nn.Module, Json, set[str]]:
        """Build the model with lazy weights; returns it, its config from mlx-lm, and the names of tensors it does not use."""
        classes = self._make_model, self.args_class
        try:
            model, config = mlx_lm.utils.load_model(self.folder, lazy=True, strict=False, get_model_classes=lambda **_: classes)
        except ModelError:
            raise
        except Exception as error:  # whatever a config or a sanitizer stumbles over
            what = f"{self.folder} could not be built as mlx-lm's {self.name} ({type(error).__name__}: {error})"
            raise BadModel(f"{what}; its config.json and weights do not fit this architecture") from error
        for name in vars(model).keys() & {"sanitize", "load_weights"}:
            object.__delattr__(model, name)  # the class's own methods again
        return model, config, self.extra

    def _make_model(self, args: Any) -> nn.Module:
        # mlx-lm reads, renames and quantises in one function; the two methods that it calls on the model meanwhile are replaced.
        model = self.model_class(args)

        def sanitize(weights: Weights) -> Weights:
            self._read = dict(weights)
            kept: Weights = self.model_class.sanitize(model, dict(weights))
            self.extra |= self._dropped(args, weights, kept)
            return kept

        def load_weights(weights: list[tuple[str, mx.array]], strict: bool) -> None:  # noqa: ARG001 – checked here
            nn.Module.load_weights(model, self._matched(model, dict(weights)), strict=False)

        if hasattr(model, "sanitize"):
            object.__setattr__(model, "sanitize", sanitize)
        object.__setattr__(model, "load_weights", load_weights)
        return model

    def _dropped(self, args: Any, weights: Weights, kept: Weights) -> set[str]:
        """Return the names of tensors that the model's `sanitize` dropped without merging them into others."""
        # A tensor that came through unchanged was kept. One that did not was dropped, or went into another (a shifted norm,
        # stacked experts): it was dropped if, without it and its like, the same names come out.
        through = {id(array) for array in kept.values()}
        survivors = {name for name, array in weights.items() if id(array) in through}
        dropped: set[str] = set()
        for group in _groups([name for name in weights if name not in survivors], survivors):
            rest = {name: array for name, array in weights.items() if name not in group}
            model = self.model_class(copy.deepcopy(args))  # a sanitizer may change its model
            try:
                dropped |= group if model.sanitize(rest).keys() == kept.keys() else set()
            except (LookupError, ValueError, TypeError, AttributeError):
                continue  # it stumbled without them, so it uses them
        return dropped

    def _matched(self, model: nn.Module, weights: Weights) -> list[tuple[str, mx.array]]:
        """Return the model's parameters from `weights`; tensors of parts it lacks are extra, other misfits raise ModelError."""
        places = dict(tree_flatten(model.parameters()))
        if missing := [name for name in places if name not in weights]:
            what = f"{self.folder} lacks the tensor {missing[0]} ({len(missing)} of {len(places)} are missing)"
            raise BadModel(f"{what}; download the model again")
        parts = {_part(name) for name in places}
        names = {id(array): name for name, array in self._read.items()}
        for name, array in weights.items():
            place = places.get(name)
            if place is None and _part(name) not in parts:
                self.extra.add(names.get(id(array), name))
            elif place is None:
                what = f"{self.folder} holds {name}, which mlx-lm's {self.name} has no place for; it would be ignored"
                raise UnsupportedModel(f"{what} and the answers would be wrong, so use another conversion of this model")
            elif array.shape != place.shape:
                what = f"{self.folder} holds {name} of shape {array.shape} where its config.json asks for {place.shape}"
                raise BadModel(f"{what}; the files do not belong together, so download the model again")
            elif mx.issubdtype(array.dtype, mx.floating) != mx.issubdtype(place.dtype, mx.floating):
                what = f"{self.folder} holds {name} as {array.dtype} where mlx-lm's {self.name} has {place.dtype}"
                raise BadModel(f"{what}; its quantisation is not what its config.json says")
        return [(name, weights[name]) for name in places]


def _part(name: str) -> str:
    """Return the part of a model that a tensor's name belongs to: the name through its first number, or its module if none."""
    steps = name.split(".")
    number = next((position for position, step in enumerate(steps) if step.isdigit()), len(steps) - 2)
    return ".".join(steps[: number + 1])


def _groups(gone: list[str], survivors: set[str]) -> Iterable[set[str]]:
    """Group tensor names that can only be dropped together: by the shortest prefix without a survivor, in all layers."""
    alive = {prefix for name in survivors for prefix in accumulate(name.split("."), "{}.{}".format)}
    groups: dict[str, set[str]] = defaultdict(set)
    for name in gone:
        largest = next(prefix for prefix in accumulate(name.split("."), "{}.{}".format) if prefix not in alive)
        groups[".".join("*" if step.isdigit() else step for step in largest.split("."))].add(name)
    return groups.values()


def _evaluate(folder: Path, model: nn.Module, progress: Progress) -> None:
    """Read a model's weights, on a CPU cast to float32 where weft's product does not expand them itself; blocks.

    A few are read at a time, to bound memory, and progress is reported.
    """
    # Half-precision matrix products are slow scalar code on a CPU; float32 goes through BLAS.
    to_cast = (mx.float16, mx.bfloat16) if mx.default_device() == mx.cpu else ()
    if to_cast:
        packed.bind(model)
    kept = packed.kept_parameters(model)
    waiting = tree_flatten(model.parameters())[::-1]
    total, done = sum(array.nbytes for _, array in waiting), 0
    while waiting:
        step: list[tuple[str, mx.array]] = []
        start = done
        while waiting and done - start < STEP_BYTES:
            name, array = waiting.pop()
            done += array.nbytes
            step.append((name, array.astype(mx.float32) if array.dtype in to_cast and name not in kept else array))
            del array
        model.load_weights(step, strict=False)
        try:
            mx.eval([array for _, array in step])
        except RuntimeError as error:
            raise BadModel(f"the weights in {folder} could not be read ({error}); download the model again") from error
        if total > STEP_BYTES:  # what loads at once needs no bar
            progress("loading weights", done, total)

"""Builds the module of a multi-token-prediction (MTP) head from a checkpoint's tensors; knows how families name them.

The head's decoder layer is one of the trunk's own class, made as mlx-lm makes it for a layer of the trunk; the trunk's own
`sanitize` converts its tensors. Whether the head predicts anything is not known here: model/mtp_trial.py finds out.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from weft.errors import BadModel, UnsupportedModel
from weft.kernels import packed
from weft.model.loader import LoadedModel, Weights

HALF_PRECISION = (mx.float16, mx.bfloat16)
DECLARED_BY = ("mtp_num_hidden_layers", "num_nextn_predict_layers")  # fields of a config.json that count heads
STUMBLES = (LookupError, ValueError, TypeError, AttributeError)  # of a `sanitize` that misses other layers' tensors
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(.+)")


@dataclass(frozen=True)
class HeadNaming:
    """How a family names its head's tensors, and what the head reads; `{i}` is the number of the head's layer in the files."""

    family: str
    projection: str
    embedding_norm: str
    hidden_norm: str
    norm: str | None  # of the head's output; None: it has none
    layer: str
    shared: tuple[str, ...] = ()  # repeats of the trunk's own tensors, which the head shares
    counts_on: bool = False  # `{i}` counts on from the trunk's layers
    hidden_first: bool = False  # the projection reads the hidden state before the embedding
    shifts: tuple[float, ...] = (0.0,)  # that may belong on norm weights: zero-centred ones (scale = 1 + weight) need 1
    after_norm: tuple[bool, ...] = (True,)  # whether hidden states may be taken after, or before, the trunk's final norm

    def at(self, index: int) -> "HeadNaming":
        """Return the names with `{i}` filled in."""
        names = {key: value.format(i=index) for key, value in vars(self).items() if isinstance(value, str)}
        return replace(self, **names, shared=tuple(name.format(i=index) for name in self.shared))  # type: ignore[arg-type]

    def parts(self) -> dict[str, str]:
        """Return the places in a `HeadModule` by the beginnings of the names in the files, longest first; layers come last."""
        places = {
            self.projection: "projection",
            self.embedding_norm: "embedding_norm",
            self.hidden_norm: "hidden_norm",
            **({self.norm: "norm"} if self.norm else {}),
            **dict.fromkeys(self.shared, ""),
        }
        return {**places, self.layer: "layer"}


NAMINGS = (
    HeadNaming(
        "Qwen3-Next, Qwen3.5, EXAONE-MoE",
        projection="mtp.fc",
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        norm="mtp.norm",
        layer="mtp.layers.{i}",
        shared=("mtp.embed_tokens", "mtp.shared_head.head"),
        shifts=(1.0, 0.0),
    ),
    HeadNaming(
        "DeepSeek-V3, GLM-4 MoE, Bailing",
        projection="layers.{i}.eh_proj",
        embedding_norm="layers.{i}.enorm",
        hidden_norm="layers.{i}.hnorm",
        norm="layers.{i}.shared_head.norm",
        layer="layers.{i}",
        shared=("layers.{i}.embed_tokens", "layers.{i}.shared_head.head"),
        counts_on=True,
        after_norm=(True, False),
    ),
    HeadNaming(
        "MiMo",
        projection="mtp_layers.{i}.input_proj",
        embedding_norm="mtp_layers.{i}.token_layernorm",
        hidden_norm="mtp_layers.{i}.hidden_layernorm",
        norm="mtp_layers.{i}.final_layernorm",
        layer="mtp_layers.{i}",
        hidden_first=True,
    ),
    HeadNaming(
        "ERNIE 4.5",
        projection="mtp_linear_proj.{i}",
        embedding_norm="mtp_emb_norm.{i}",
        hidden_norm="mtp_hidden_norm.{i}",
        norm=None,
        layer="mtp_block.{i}",
        after_norm=(True, False),
    ),
)


class HeadModule(nn.Module):  # type: ignore[misc]
    """The layers that are an MTP head's own: two norms, a projection of (embedding, hidden), a decoder layer and a norm."""

    def __init__(self, layer: nn.Module, hidden_size: int, eps: float, *, has_norm: bool) -> None:
        super().__init__()
        self.embedding_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.projection = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layer = layer
        self.norm = nn.RMSNorm(hidden_size, eps=eps) if has_norm else nn.Identity()


@dataclass(frozen=True)
class BuiltHead:
    """A head's module with its weights, and what of its reading is still open."""

    module: HeadModule
    naming: HeadNaming
    layer_index: int  # of the trunk's layer that the head's is built like
    norms: Weights  # norm weights by their names in the module, as the files have them
    dtype: mx.Dtype  # of norm weights in the module

    def shift_norms(self, shift: float) -> None:
        """Set every norm weight of the module to the files' plus `shift`, rounded as the files' dtype does."""
        shifted = [(name, (array + shift).astype(array.dtype)) for name, array in self.norms.items()]
        self.module.load_weights([(name, _cast(array, self.dtype)) for name, array in shifted], strict=False)


def find_stack(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the module that holds a model's decoder layers and final norm, and its path; raises UnsupportedModel."""
    found = [(path, module) for path, module in model.named_modules() if {"layers", "norm"} <= module.keys()]
    if not found:
        raise UnsupportedModel("the model keeps its layers and its final norm in no one place")
    return min(found, key=lambda one: len(one[0]))


def read_head(loaded: LoadedModel) -> BuiltHead | None:
    """Build a model's MTP head from the tensors its trunk did not take; None if it has none. Raises ModelError."""
    files = {_full_name(name, file): (name, file) for name, file in loaded.extra_tensors.items()}
    for naming in NAMINGS:
        first = len(loaded.model.layers) if naming.counts_on else 0
        if (root := _find_root(files, naming.at(first))) is not None:
            if any(name.startswith(f"{root}{naming.at(first + 1).layer}.") for name in files):
                raise UnsupportedModel(
                    "its files hold several MTP heads, one for each token ahead, and weft uses single ones only"
                )
            return _build(loaded, naming.at(first), _read_parts(files, naming.at(first), root))
    _check_nothing_is_missing(loaded, files)
    return None


def _full_name(name: str, file: Path) -> str:
    """Return a tensor's name with the prefix that files of a head alone leave out."""
    return f"mtp.{name}" if file.name.startswith("mtp") and "mtp" not in name else name


def _find_root(names: Iterable[str], naming: HeadNaming) -> str | None:
    """Return what stands before the names of a head's tensors, such as "model."; None if this is not their naming."""
    key = f"{naming.projection}.weight"
    return next((name.removesuffix(key) for name in names if f".{name}".endswith(f".{key}")), None)


def _check_nothing_is_missing(loaded: LoadedModel, names: Iterable[str]) -> None:
    """Raise ModelError if a model has, or is said to have, a head that no naming fits."""
    if parts := sorted(name for name in names if re.search(r"(^|[._])(mtp|nextn)|eh_proj", name)):
        raise UnsupportedModel(f"its files hold an MTP head that is incomplete or of a form weft does not know ({parts[0]})")
    for config in (loaded.config, *(value for value in loaded.config.values() if isinstance(value, dict))):
        for key in DECLARED_BY:
            if config.get(key):
                raise BadModel(f"its config.json declares an MTP head ({key} {config[key]}), but its files hold none")


def _read_parts(files: dict[str, tuple[str, Path]], naming: HeadNaming, root: str) -> Weights:
    """Read a head's tensors lazily; returns them by their places in a `HeadModule`, the layer's as the files name them."""
    arrays = {file: _read_file(file) for file in {file for _, file in files.values()}}
    found: Weights = {}
    for full_name, (name, file) in files.items():
        for start, place in naming.parts().items():
            if full_name.startswith(f"{root}{start}."):
                if place and "rotary_emb" not in full_name:
                    found[place + full_name.removeprefix(root + start)] = arrays[file][name]
                break
    return found


def _read_file(file: Path) -> Weights:
    try:
        arrays = mx.load(str(file))
    except (RuntimeError, OSError) as error:
        raise BadModel(f"the MTP head in {file.name} could not be read ({error})") from error
    assert isinstance(arrays, dict)
    return arrays


def _build(loaded: LoadedModel, naming: HeadNaming, tensors: Weights) -> BuiltHead:
    """Make the head's module, quantised where its tensors are, and load the tensors into it, cast or kept like the trunk's."""
    _, stack = find_stack(loaded.model)
    own = {name: array for name, array in tensors.items() if not name.startswith("layer.")}
    raw = {name.removeprefix("layer."): array for name, array in tensors.items() if name.startswith("layer.")}
    index, layer, layer_tensors = _find_layer(loaded, raw)
    dtype = stack.norm.weight.dtype
    module = HeadModule(layer, stack.norm.weight.shape[-1], getattr(stack.norm, "eps", 1e-6), has_norm=naming.norm is not None)
    weights = own | {f"layer.{name}": array for name, array in layer_tensors.items()}
    _quantise(module, weights)
    _check_fit(module, weights)
    if mx.default_device() == mx.cpu:
        packed.bind(module)
    kept = packed.kept_parameters(module)
    module.load_weights([(name, array if name in kept else _cast(array, dtype)) for name, array in weights.items()])
    module.eval()
    try:
        mx.eval(module.parameters())
    except RuntimeError as error:
        raise BadModel(f"the tensors of its MTP head could not be read ({error})") from error
    norms = {f"{path}.weight" for path, part in module.named_modules() if isinstance(part, nn.RMSNorm)}
    return BuiltHead(module, naming, index, {name: weights[name] for name in sorted(norms)}, dtype)


def _cast(array: mx.array, dtype: mx.Dtype) -> mx.array:
    return array.astype(dtype) if array.dtype in HALF_PRECISION else array


def _find_layer(loaded: LoadedModel, tensors: Weights) -> tuple[int, nn.Module, Weights]:
    """Return the place in the trunk, a fresh layer as there, and its tensors, of the kind of layer that fits the head's best."""
    model_class, args_class = mlx_lm.utils._get_classes(loaded.config)
    fresh = model_class(args_class.from_dict(copy.deepcopy(loaded.config)))  # lazy: weights that nobody reads take no memory
    path, stack = find_stack(fresh)
    kinds: dict[frozenset[str], int] = {}
    for index, (layer, cache) in enumerate(zip(stack.layers, make_prompt_cache(fresh), strict=False)):
        if _holds_all_tokens(cache):
            kinds.setdefault(frozenset(name for name, _ in tree_flatten(layer.parameters())), index)
    if not kinds:
        raise UnsupportedModel("its MTP head needs a layer with full attention, and the model has none")
    fits = [(names, index, _convert(fresh, f"{path}.layers.{index}.", tensors)) for names, index in kinds.items()]
    _, index, found = min(fits, key=lambda fit: len(fit[0] ^ _unpacked(fit[2]).keys()))
    return index, stack.layers[index], found


def _holds_all_tokens(cache: Any) -> bool:
    return type(cache) is KVCache or (type(cache) is CacheList and all(type(inner) is KVCache for inner in cache.caches))


def _convert(fresh: nn.Module, prefix: str, tensors: Weights) -> Weights:
    """Convert a layer's tensors to mlx-lm's names and layouts with the model's own `sanitize`; norms keep the files' numbers."""
    named = {prefix + name: array for name, array in tensors.items()}
    try:
        kept = fresh.sanitize(dict(named)) if hasattr(fresh, "sanitize") else named
    except STUMBLES:
        kept = named
    found = _stack_experts({name.removeprefix(prefix): array for name, array in kept.items() if name.startswith(prefix)})
    return found | {name: tensors[name] for name, array in found.items() if array.ndim == 1 and name in tensors}


def _stack_experts(tensors: Weights) -> Weights:
    """Stack experts that are stored one by one as mlx-lm's models hold them; other tensors stay as they are."""
    experts: dict[str, dict[int, mx.array]] = defaultdict(dict)
    found: Weights = {}
    for name, array in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts[f"{match[1]}.switch_mlp.{match[3]}"][int(match[2])] = array
        else:
            found[name] = array
    return found | {name: mx.stack([one for _, one in sorted(each.items())]) for name, each in experts.items()}


def _unpacked(weights: Weights) -> Weights:
    """Return the tensors without the scales and biases of quantised ones."""
    packed = {name.removesuffix("scales") for name in weights if name.endswith(".scales")}
    extras = {path + name for path in packed for name in ("scales", "biases")}
    return {name: array for name, array in weights.items() if name not in extras}


def _quantise(module: nn.Module, weights: Weights) -> None:
    """Quantise the layers of a module whose tensors are, with the bits and group size that their shapes tell."""

    def scheme(path: str, layer: nn.Module) -> Any:
        is_packed = f"{path}.scales" in weights and f"{path}.weight" in weights and hasattr(layer, "to_quantized")
        return mlx_lm.utils.infer_quant_config(path, layer, weights) if is_packed else False

    try:
        nn.quantize(module, class_predicate=scheme)
    except (ValueError, ZeroDivisionError) as error:
        raise BadModel(f"the quantisation of its MTP head could not be read ({error})") from error


def _check_fit(module: nn.Module, weights: Weights) -> None:
    """Raise ModelError unless the tensors are exactly the module's parameters, of the same shapes and kinds of numbers."""
    places = dict(tree_flatten(module.parameters()))
    if missing := sorted(places.keys() - weights.keys()):
        raise BadModel(f"its MTP head lacks the tensor {missing[0]} ({len(missing)} of {len(places)} are missing)")
    if unknown := sorted(weights.keys() - places.keys()):
        raise UnsupportedModel(f"its MTP head holds the tensor {unknown[0]}, which its decoder layer has no place for")
    for name, place in places.items():
        array = weights[name]
        if array.shape != place.shape:
            raise BadModel(f"its MTP head holds {name} of shape {array.shape} where {place.shape} is needed")
        if mx.issubdtype(array.dtype, mx.floating) != mx.issubdtype(place.dtype, mx.floating):
            raise BadModel(f"its MTP head holds {name} as {array.dtype} where {place.dtype} is needed")

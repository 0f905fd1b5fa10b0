"""Multi-token-prediction heads: what they guess, how checkpoints name and store them, and which ones are refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache
from tokenizers import Tokenizer

import zoo
from weft.memory.slabs import Pool, RowState
from weft.memory.spec import FullAttention, KeyValues, Plane
from weft.memory.views import KeyValueView, make_batches
from weft.model.adapter import Adapter
from weft.model.loader import LoadedModel, load
from weft.model.mtp import MTPHead, Trunk, load_head
from weft.model.mtp_tensors import find_stack, read_head
from weft.model.resolve import TINY_HYBRID

Checkpoint = Callable[[str], Path]
Weights = dict[str, mx.array]
PROMPTS = ("Tell me a story about a dog.", "Reply with JSON. The marker is 7.", "Count from 1 to 20.", "What is a sheep?")


def served(folder: Path) -> LoadedModel:
    """A loaded model with weft's kernels in place of mlx-lm's."""
    loaded = load(folder)
    Adapter(loaded, way="seam")
    return loaded


def head_of(loaded: LoadedModel) -> MTPHead:
    head, reason = load_head(loaded)
    assert head is not None, reason
    return head


def before(states: mx.array) -> mx.array:
    """The hidden states of the tokens before: zero for the first."""
    return mx.concatenate([mx.zeros_like(states[:, :1]), states[:, :-1]], axis=1)


def guesses(head: MTPHead, tokens: mx.array, caches: list[Any]) -> mx.array:
    states, _ = head.trunk(tokens, caches)
    return head.logits(head.read(tokens, before(states), head.new_cache()))


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return served(TINY_HYBRID)


@pytest.fixture(scope="module")
def head(tiny: LoadedModel) -> MTPHead:
    return head_of(tiny)


@pytest.fixture
def tokens() -> mx.array:
    return mx.array([[(7 + 31 * n * n) % 4000 for n in range(24)], [(9 + 17 * n * n) % 4000 for n in range(24)]])


# --- the trained head of tiny-hybrid ---------------------------------------------------------------------------------


def test_the_head_agrees_with_the_models_own_answers_as_its_card_says(tiny: LoadedModel, head: MTPHead) -> None:
    tokenizer = Tokenizer.from_file(str(TINY_HYBRID / "tokenizer.json"))
    right, total = 0, 0
    for prompt in PROMPTS:
        ids = tokenizer.encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n").ids
        answer, _ = zoo.greedy(tiny.model, ids, 48)
        answer = answer[: answer.index(4082) + 1] if 4082 in answer else answer
        text = mx.array([[*ids, *answer[:-1]]])
        found = mx.argmax(guesses(head, text, make_prompt_cache(tiny.model)), axis=-1)[0].tolist()
        right += sum(guess == token for guess, token in zip(found[len(ids) :], answer[1:], strict=True))
        total += len(answer) - 1

    assert total > 80
    assert right / total >= 0.85  # the card: 89.6 % over five prompts


def test_the_trial_gives_the_share_of_guesses_and_the_bytes_of_the_head(tiny: LoadedModel, head: MTPHead) -> None:
    assert 0.8 < head.agreement <= 1.0
    assert head.hidden_size == 320
    arrays = [array for _, array in tree_flatten(head.module.parameters())]
    assert sum(array.size for array in arrays) == 1_394_368  # the parameters of the card
    assert {array.dtype for array in arrays if array.ndim > 1} == {mx.bfloat16}  # as in the file: weft's product expands them
    assert {array.dtype for array in arrays if array.ndim == 1} == {mx.float32}
    assert head.weights_bytes == sum(array.nbytes for array in arrays)
    assert type(head.layer) is type(tiny.model.layers[3])
    assert type(head.new_cache()) is KVCache
    assert head_of(tiny).agreement == head.agreement


@pytest.mark.parametrize("after_norm", [True, False])
def test_logits_beside_hidden_states_are_the_models_bit_for_bit(
    tiny: LoadedModel, head: MTPHead, tokens: mx.array, after_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "after_norm", after_norm)
    ours, theirs = make_prompt_cache(tiny.model), make_prompt_cache(tiny.model)
    for part in (tokens[:, :17], tokens[:, 17:21], tokens[:, 21:22]):
        states, logits = head.trunk(part, ours)

        assert mx.array_equal(logits, tiny.model(part, cache=theirs))
        assert states.shape == (*part.shape, 320)


def test_an_entry_is_the_same_in_chunks_as_in_one_piece(tiny: LoadedModel, head: MTPHead, tokens: mx.array) -> None:
    states, _ = head.trunk(tokens, make_prompt_cache(tiny.model))
    whole = head.read(tokens, before(states), head.new_cache())
    cache = head.new_cache()
    chunks = [head.read(tokens[:, a:b], before(states)[:, a:b], cache) for a, b in [(0, 7), (7, 8), (8, 20), (20, 24)]]

    assert mx.array_equal(mx.concatenate(chunks, axis=1), whole)


def test_an_entry_does_not_depend_on_later_tokens_nor_on_other_rows(tiny: LoadedModel, head: MTPHead, tokens: mx.array) -> None:
    together = guesses(head, tokens, make_prompt_cache(tiny.model))
    alone = guesses(head, tokens[1:, :9], make_prompt_cache(tiny.model))

    assert mx.array_equal(together[1:, :9], alone)


def test_a_batched_step_over_slabs_gives_each_row_its_own_entry(tiny: LoadedModel, head: MTPHead, tokens: mx.array) -> None:
    states, _ = head.trunk(tokens, make_prompt_cache(tiny.model))
    plane, lengths = Plane(2, 64, mx.float32), (9, 5)
    pool = Pool([FullAttention(plane, plane)], slab_tokens=256, max_rows=4)
    rows, alone = [RowState(), RowState()], []
    for row, (state, length) in enumerate(zip(rows, lengths, strict=True)):
        text, hidden, cache = tokens[row : row + 1], before(states)[row : row + 1], head.new_cache()
        head.read(text[:, :length], hidden[:, :length], cache)
        pool.allocate(state, [KeyValues(cache.keys[..., :length, :], cache.values[..., :length, :])], length)
        alone.append(head.read(text[:, length : length + 1], hidden[:, length : length + 1], cache))
    (batch,) = make_batches(pool, rows, seam=True, width=None)
    places = [batch.rows.index(row) for row in rows]
    order = sorted(range(2), key=lambda row: places[row])
    step = mx.stack([tokens[row, lengths[row]] for row in order])[:, None]
    hidden = mx.stack([before(states)[row, lengths[row]] for row in order])[:, None]

    found = head.read(step, hidden, KeyValueView(batch, 0))

    assert mx.allclose(found, mx.concatenate([alone[row] for row in order]), rtol=1e-5, atol=1e-5)


# --- how checkpoints store a head ------------------------------------------------------------------------------------


def tiny_weights() -> Weights:
    weights = mx.load(str(TINY_HYBRID / "model.safetensors"))
    assert isinstance(weights, dict)
    return weights


def is_head(name: str) -> bool:
    return name.startswith("mtp.")


def write_folder(folder: Path, weights: Weights, source: Path = TINY_HYBRID, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def split_folder(folder: Path, prefix: str = "mtp.") -> Path:
    """A copy of tiny-hybrid with its head in a file of its own, and this prefix before the head's names."""
    weights = tiny_weights()
    write_folder(folder, {name: array for name, array in weights.items() if not is_head(name)})
    own = {prefix + name.removeprefix("mtp."): array for name, array in weights.items() if is_head(name)}
    mx.save_safetensors(str(folder / "mtp.safetensors"), own)
    return folder


def with_head(folder: Path, **changes: mx.array | None) -> Path:
    """A copy of tiny-hybrid with tensors of its head changed, or left out; `__` stands for a dot."""
    changed = {f"mtp.{name.replace('__', '.')}": array for name, array in changes.items()}
    weights = tiny_weights() | changed
    return write_folder(folder, {name: array for name, array in weights.items() if array is not None})


def test_norms_may_be_stored_zero_centred_or_as_scales(
    tiny: LoadedModel, head: MTPHead, tokens: mx.array, tmp_path: Path
) -> None:
    scales = {name: array + 1.0 for name, array in tiny_weights().items() if is_head(name) and array.ndim == 1}
    converted = served(write_folder(tmp_path / "converted", tiny_weights() | scales))

    found = guesses(head_of(converted), tokens, make_prompt_cache(converted.model))

    assert mx.array_equal(found, guesses(head, tokens, make_prompt_cache(tiny.model)))


@pytest.mark.parametrize("prefix", ["", "mtp.", "language_model.mtp."])
def test_a_head_may_lie_in_a_file_of_its_own(
    tiny: LoadedModel, head: MTPHead, tokens: mx.array, tmp_path: Path, prefix: str
) -> None:
    folder = split_folder(tmp_path / "split", prefix)
    loaded = served(folder)

    found = guesses(head_of(loaded), tokens, make_prompt_cache(loaded.model))

    assert mx.array_equal(found, guesses(head, tokens, make_prompt_cache(tiny.model)))


@pytest.mark.parametrize("packs_head", [True, False])
def test_a_quantised_model_keeps_its_head_as_the_files_have_it(tmp_path: Path, packs_head: bool) -> None:
    model = load(TINY_HYBRID).model
    nn.quantize(model, group_size=64, bits=8)
    weights = dict(tree_flatten(model.parameters()))
    for name, array in tiny_weights().items():
        if is_head(name) and array.ndim == 2 and packs_head:
            packed = mx.quantize(array, group_size=32, bits=4)  # other than the trunk
            weights |= {
                name.replace("weight", part): one for part, one in zip(("weight", "scales", "biases"), packed, strict=True)
            }
        elif is_head(name):
            weights[name] = array
    loaded = served(write_folder(tmp_path / "packed", weights, quantization={"group_size": 64, "bits": 8}))

    head = head_of(loaded)

    assert head.agreement > 0.6
    assert isinstance(head.module.projection, nn.QuantizedLinear) == packs_head
    assert isinstance(head.layer.self_attn.q_proj, nn.QuantizedLinear) == packs_head
    assert head.weights_bytes < 4 * 1_394_368 or not packs_head


# --- heads of other families, on models that count -------------------------------------------------------------------

# What a family's head is called, by place; the number is that of the head's layer.
QWEN = {
    "projection": "mtp.fc",
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
    "layer": "mtp.layers.0",
}
DEEPSEEK = {
    "projection": "model.layers.{n}.eh_proj",
    "embedding_norm": "model.layers.{n}.enorm",
    "hidden_norm": "model.layers.{n}.hnorm",
    "norm": "model.layers.{n}.shared_head.norm",
    "layer": "model.layers.{n}",
}
MIMO = {
    "projection": "model.mtp_layers.0.input_proj",
    "embedding_norm": "model.mtp_layers.0.token_layernorm",
    "hidden_norm": "model.mtp_layers.0.hidden_layernorm",
    "norm": "model.mtp_layers.0.final_layernorm",
    "layer": "model.mtp_layers.0",
}
ERNIE = {
    "projection": "model.mtp_linear_proj.0",
    "embedding_norm": "model.mtp_emb_norm.0",
    "hidden_norm": "model.mtp_hidden_norm.0",
    "layer": "model.mtp_block.0",
}
FAMILIES = {
    "qwen3_next": QWEN,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "exaone_moe": QWEN,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "mimo": MIMO,
    "ernie4_5_moe": ERNIE,
}
HIDDEN_FIRST = {"mimo"}
HIDDEN = 64


PLAIN = mx.ones((HIDDEN,))
SIGNS = mx.where(mx.random.bernoulli(0.5, (HIDDEN,), key=mx.random.key(2)), 1.0, -1.0)


def turned(steps: mx.array) -> mx.array:
    """Directions (…, HIDDEN), each the one before turned by the same rotation; after 128 steps they begin again."""
    angles = steps[..., None] * mx.arange(1, HIDDEN // 2 + 1) * (2 * math.pi / zoo.VOCABULARY)
    return mx.concatenate([mx.cos(angles), mx.sin(angles)], axis=-1)


def rotation() -> mx.array:
    """The matrix that turns a direction into the next one."""
    cosines, sines = (mx.diag(half) for half in mx.split(turned(mx.array(1)), 2))
    return mx.concatenate([mx.concatenate([cosines, -sines], axis=1), mx.concatenate([sines, cosines], axis=1)])


def counting(weights: Weights, norm: mx.array = PLAIN) -> Weights:
    """Weights of a model that answers token x with 5 x + 3 whatever stood before: its layers add nothing to the embedding.

    The embedding of a token's answer is its own, turned; if the final norm has signs, the output layer undoes them.
    """
    size, token, orbit = zoo.VOCABULARY, 0, []
    for _ in range(size):
        orbit.append(token)
        token = (5 * token + 3) % size
    directions = mx.zeros((size, HIDDEN)).at[mx.array(orbit)].add(turned(mx.arange(size)))
    found = dict(weights)
    for name, array in weights.items():
        if ".embed_tokens." in name:
            found[name] = directions
        elif "lm_head." in name:
            found[name] = mx.zeros_like(directions).at[mx.array([(5 * x + 3) % size for x in range(size)])].add(directions * norm)
        elif name.endswith("model.norm.weight"):
            found[name] = norm
        elif any(part in name for part in (".o_proj.", ".out_proj.", ".down_proj.")):
            found[name] = mx.zeros_like(array)
    return found


def last_full_attention(trunk: nn.Module) -> int:
    """The number of the trunk's last layer that attends to all tokens."""
    caches = make_prompt_cache(trunk)
    return max(number for number, cache in enumerate(caches) if type(cache) in (KVCache, CacheList))


def head_layer(weights: Weights, trunk: nn.Module) -> Weights:
    """The tensors of the trunk's last layer with full attention, for a head to have the same."""
    prefix = f"{find_stack(trunk)[0]}.layers.{last_full_attention(trunk)}."
    return {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}


def head_tensors(name: str, layer: Weights, num_layers: int, projection: mx.array, *, spread: float = 0.0) -> Weights:
    places = {place: text.format(n=num_layers) for place, text in FAMILIES[name].items()}
    found = {f"{places['layer']}.{part}": array for part, array in layer.items()}
    found[f"{places['projection']}.weight"] = projection
    for number, place in enumerate(("embedding_norm", "hidden_norm", "norm")):
        if place in places:
            found[f"{places[place]}.weight"] = 1.0 + spread * mx.random.normal((HIDDEN,), key=mx.random.key(number))
    return found


def passing_on(name: str) -> mx.array:
    """A projection that hands on the embedding and drops the hidden state."""
    halves = [mx.eye(HIDDEN), mx.zeros((HIDDEN, HIDDEN))]
    return mx.concatenate(halves[::-1] if name in HIDDEN_FIRST else halves, axis=1)


def read_weights(folder: Path) -> Weights:
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    return weights


def one_by_one(layer: Weights) -> Weights:
    """A layer's tensors with experts and latent attention stored as the original checkpoints do."""
    found: Weights = {}
    for name, array in layer.items():
        if ".switch_mlp." in name:
            found |= {name.replace("switch_mlp", f"experts.{number}"): one for number, one in enumerate(array)}
        elif ".unembed_out." not in name and ".embed_q." not in name:
            found[name] = array
    if "self_attn.embed_q.weight" in layer:
        both = [layer["self_attn.embed_q.weight"].swapaxes(-1, -2), layer["self_attn.unembed_out.weight"]]
        found["self_attn.kv_b_proj.weight"] = mx.concatenate(both, axis=1).reshape(-1, both[1].shape[-1])
    return found


def fused(layer: Weights) -> Weights:
    """A layer's tensors with all experts in two tensors, as Qwen3.6 stores them."""
    gate, up, down = (layer[f"mlp.switch_mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    others = {name: array for name, array in layer.items() if ".switch_mlp." not in name}
    return others | {"mlp.experts.gate_up_proj": mx.concatenate([gate, up], axis=1), "mlp.experts.down_proj": down}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_that_continues_the_embedding_predicts_a_model_that_does(
    checkpoint: Checkpoint, tmp_path: Path, name: str
) -> None:
    plain = load(checkpoint(name))
    weights = counting(read_weights(plain.folder))
    layer = head_layer(weights, plain.model)
    tensors = head_tensors(name, layer, len(plain.model.layers), passing_on(name))

    head = head_of(served(write_folder(tmp_path / name, weights | tensors, plain.folder)))

    assert head.agreement == 1.0


@pytest.mark.parametrize(("after_norm", "turn"), [(True, rotation() * SIGNS), (False, rotation())])
def test_hidden_states_are_taken_where_the_head_guesses_best(
    checkpoint: Checkpoint, tmp_path: Path, after_norm: bool, turn: mx.array
) -> None:
    plain = load(checkpoint("glm4_moe"))
    weights = counting(read_weights(plain.folder), SIGNS)
    layer, count = head_layer(weights, plain.model), len(plain.model.layers)
    tensors = head_tensors("glm4_moe", layer, count, mx.concatenate([mx.zeros_like(turn), turn], axis=1))
    tensors[f"model.layers.{count}.shared_head.norm.weight"] = SIGNS

    head = head_of(served(write_folder(tmp_path / "turned", weights | tensors, plain.folder)))

    assert (head.after_norm, head.agreement) == (after_norm, 1.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_random_head_is_refused_with_the_share_it_guessed(checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    plain = load(checkpoint(name))
    weights = counting(read_weights(plain.folder))
    layer = head_layer(weights, plain.model)
    noise = mx.random.normal((HIDDEN, 2 * HIDDEN), key=mx.random.key(5))
    tensors = head_tensors(name, layer, len(plain.model.layers), noise)

    head, reason = load_head(served(write_folder(tmp_path / name, weights | tensors, plain.folder)))

    assert head is None
    assert reason is not None
    assert "% of 46 tokens of the model's own text" in reason


@pytest.mark.parametrize("stored", [dict, one_by_one])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_numbers_are_those_of_a_plain_reference(checkpoint: Checkpoint, tmp_path: Path, name: str, stored: Any) -> None:
    plain = load(checkpoint(name))
    weights = read_weights(plain.folder)
    layer = head_layer(weights, plain.model)
    mix = mx.random.normal((HIDDEN, 2 * HIDDEN), key=mx.random.key(5)) / HIDDEN**0.5
    tensors = head_tensors(name, stored(layer), len(plain.model.layers), mix, spread=0.3)
    loaded = served(write_folder(tmp_path / name, weights | tensors, plain.folder))
    built = read_head(loaded)
    assert built is not None
    head = MTPHead(built, Trunk(loaded.model))
    tokens = mx.array([[3, 50, 7, 7, 100, 12]])
    states, _ = head.trunk(tokens, make_prompt_cache(loaded.model))

    found = head.logits(head.read(tokens, before(states), head.new_cache()))

    assert mx.allclose(found, reference(name, loaded, tensors, tokens, before(states)), rtol=1e-4, atol=1e-4)


def reference(name: str, loaded: LoadedModel, tensors: Weights, tokens: mx.array, hidden: mx.array) -> mx.array:
    """The head's logits by plain operations, with the trunk's layer in place of the head's, whose weights are the same."""
    places = {place: text.format(n=len(loaded.model.layers)) for place, text in FAMILIES[name].items()}
    _, stack = find_stack(loaded.model)

    def norm(x: mx.array, place: str) -> mx.array:
        if place not in places:
            return x
        return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + stack.norm.eps) * tensors[f"{places[place]}.weight"]

    both = [norm(stack.embed_tokens(tokens), "embedding_norm"), norm(hidden, "hidden_norm")]
    x = mx.concatenate(both[::-1] if name in HIDDEN_FIRST else both, axis=-1) @ tensors[f"{places['projection']}.weight"].T
    index = last_full_attention(loaded.model)
    mask = mx.tril(mx.ones((tokens.shape[1], tokens.shape[1]), mx.bool_))
    x = norm(stack.layers[index](x, mask, make_prompt_cache(loaded.model)[index]), "norm")
    output = getattr(loaded.model, "language_model", loaded.model)
    return output.lm_head(x) if "lm_head" in output else stack.embed_tokens.as_linear(x)  # type: ignore[no-any-return]


def test_experts_may_be_stored_fused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    plain = load(checkpoint("qwen3_5_moe"))
    layer = head_layer(read_weights(plain.folder), plain.model)
    tensors = head_tensors("qwen3_5_moe", fused(layer), 0, mx.ones((HIDDEN, 2 * HIDDEN)))
    loaded = served(write_folder(tmp_path / "fused", read_weights(plain.folder) | tensors, plain.folder))

    built = read_head(loaded)

    assert built is not None
    for name, array in tree_flatten(built.module.layer.parameters()):
        assert mx.array_equal(array, layer[name])


# --- what is refused, and why ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba", "qwen3_5"])
def test_a_model_without_a_head_has_none_and_no_reason(checkpoint: Checkpoint, name: str) -> None:
    assert load_head(served(checkpoint(name))) == (None, None)


def test_a_head_that_is_declared_and_not_there_is_missed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "bare", {name: array for name, array in tiny_weights().items() if not is_head(name)})

    head, reason = load_head(served(folder))

    assert (head, reason) == (None, "its config.json declares an MTP head (mtp_num_hidden_layers 1), but its files hold none")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm__weight": None}, "lacks the tensor norm.weight (1 of 15 are missing)"),
        ({"layers__0__mlp__up_proj__weight": None}, "lacks the tensor layer.mlp.up_proj.weight"),
        ({"fc__weight": None}, "incomplete or of a form weft does not know (mtp.layers.0."),
        ({"fc__weight": mx.zeros((320, 320))}, "projection.weight of shape (320, 320) where (320, 640) is needed"),
        ({"layers__0__mlp__up_proj__weight": mx.zeros((64, 320))}, "layer.mlp.up_proj.weight of shape (64, 320)"),
        ({"fc__weight": mx.zeros((320, 640), mx.uint8)}, "projection.weight as mlx.core.uint8"),
        ({"fc__scales": mx.zeros((320, 7))}, "quantisation"),
        ({"fc__bias": mx.zeros((320,))}, "projection.bias, which its decoder layer has no place for"),
        ({"layers__0__self_attn__extra__weight": mx.zeros((3,))}, "layer.self_attn.extra.weight"),
        ({"layers__1__mlp__up_proj__weight": mx.zeros((3,))}, "several MTP heads"),
        ({"norm__weight": mx.full((320,), mx.nan)}, "guesses 0% of 46 tokens of the model's own text, and 20% are needed"),
    ],
)
def test_a_damaged_head_is_refused_with_a_reason(tmp_path: Path, changes: dict[str, mx.array | None], words: str) -> None:
    head, reason = load_head(served(with_head(tmp_path / "damaged", **changes)))

    assert head is None
    assert reason is not None
    assert words in reason


def test_several_heads_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    plain = load(checkpoint("glm4_moe"))
    weights = read_weights(plain.folder)
    layer, count = head_layer(weights, plain.model), len(plain.model.layers)
    heads = [head_tensors("glm4_moe", layer, number, passing_on("glm4_moe")) for number in (count, count + 1)]

    head, reason = load_head(served(write_folder(tmp_path / "two", weights | heads[0] | heads[1], plain.folder)))

    assert head is None
    assert "several MTP heads" in str(reason)


def test_a_file_that_is_gone_is_a_reason(tmp_path: Path) -> None:
    folder = split_folder(tmp_path / "split")
    loaded = served(folder)
    (folder / "mtp.safetensors").unlink()

    head, reason = load_head(loaded)

    assert head is None
    assert "mtp.safetensors could not be read" in str(reason)


@pytest.mark.parametrize("size", [0, 5, 2000, -1], ids=["empty", "no header", "cut in the header", "cut at the end"])
def test_a_damaged_file_of_a_head_costs_the_head_and_not_the_model(
    tiny: LoadedModel, tokens: mx.array, tmp_path: Path, size: int
) -> None:
    folder = split_folder(tmp_path / "split")
    file = folder / "mtp.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    loaded = served(folder)

    head, reason = load_head(loaded)

    assert head is None
    assert "mtp.safetensors" in str(reason)
    assert mx.array_equal(
        loaded.model(tokens, cache=make_prompt_cache(loaded.model)), tiny.model(tokens, cache=make_prompt_cache(tiny.model))
    )


def test_a_refused_head_leaves_the_model_as_it_was(tiny: LoadedModel, tokens: mx.array, tmp_path: Path) -> None:
    loaded = served(with_head(tmp_path / "damaged", norm__weight=mx.zeros((320,)) - 1.0))
    load_head(loaded)

    assert mx.array_equal(
        loaded.model(tokens, cache=make_prompt_cache(loaded.model)), tiny.model(tokens, cache=make_prompt_cache(tiny.model))
    )

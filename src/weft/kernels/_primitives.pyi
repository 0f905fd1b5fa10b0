"""Types of the compiled operations (native/primitives.cpp): lazy nodes of MLX's graph, but decode steps compute at once."""

from collections.abc import Sequence

import mlx.core as mx

mlx_version: str  # it was built against

class Weights:
    """A matrix (outputs, inputs) of weights as a file has them: float32, float16, bfloat16, or packed in groups."""

    def __init__(
        self,
        codes: mx.array,
        scales: mx.array | None = None,
        biases: mx.array | None = None,
        mode: str = "affine",
        bits: int = 0,
        group_size: int = 0,
        bias: mx.array | None = None,  # added to the product
    ) -> None: ...
    @property
    def num_outputs(self) -> int: ...
    @property
    def num_inputs(self) -> int: ...

class Norm:
    """The weight of an RMSNorm and its epsilon."""

    def __init__(self, weight: mx.array, eps: float) -> None: ...

class StepRows:
    """A step's rows: of each its slab, the slot there, the tokens it has, how many come, and the line of the first of these."""

    def __init__(self, rows: list[tuple[int, int, int, int, int]]) -> None: ...

class Heads:
    """How an attention layer's queries, keys and values lie in a line, and what is done to them before attention."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        dim: int,
        scale: float,
        of_neighbours: bool,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        is_gated: bool = False,
    ) -> None: ...

class DeltaLayer:
    """What a gated delta layer has beside its two products; the convolution is (channels, taps, 1)."""

    def __init__(
        self, convolution: mx.array, rate: mx.array, bias: mx.array, query_norm: Norm, key_norm: Norm, norm: Norm
    ) -> None: ...

class FusedModel:
    """A model's embeddings, decoder layers, last norm, vocabulary and kinds of rotary positions (rates, scale).

    Of each layer: norm, joint weights, heads or delta layer, which positions, output, norm, gate, up and down.
    """

    def __init__(
        self,
        embedding: Weights,
        layers: list[tuple[Norm, list[Weights], Heads | None, DeltaLayer | None, int, Weights, Norm, Weights, Weights, Weights]],
        norm: Norm,
        vocabulary: Weights,
        turns: list[tuple[mx.array, float]],
        is_normed: bool,
    ) -> None: ...

class FusedRows:
    """A step's rows: of each its slab, the slot there, the tokens it has, its position, known new tokens, and its draft."""

    def __init__(self, rows: list[tuple[int, int, int, int, int, list[int]]]) -> None: ...

class MTPHead:
    """The weights of an MTP head whose layer is attention and a gated MLP; embeddings and vocabulary are the trunk's."""

    def __init__(
        self,
        embedding: Weights,
        projection: Weights,
        joint: list[Weights],
        output: Weights,
        inward: list[Weights],  # gate, then up
        down: Weights,
        vocabulary: Weights,
        embedding_norm: Norm,
        hidden_norm: Norm,
        input_norm: Norm,
        mlp_norm: Norm,
        output_norm: Norm | None,
        heads: Heads,
        rates: mx.array,
        scale: float,
        hidden_first: bool,
        is_normed: bool,
    ) -> None: ...

def linear(x: mx.array, weights: list[Weights], norm: Norm | None = None, residual: mx.array | None = None) -> mx.array: ...
def gated(x: mx.array, gate: Weights, up: Weights, norm: Norm | None = None) -> mx.array: ...
def switched(x: mx.array, indices: mx.array, weights: Weights) -> mx.array: ...
def experts(x: mx.array, indices: mx.array, gate: Weights, up: Weights, down: Weights) -> mx.array: ...
def embed(tokens: mx.array, weights: Weights) -> mx.array: ...
def norm(x: mx.array, norm: Norm) -> mx.array: ...
def silu(x: mx.array) -> mx.array: ...
def choose(
    logits: mx.array,
    temperature: list[float],
    min_p: list[float],
    allowed: mx.array | None = None,
    uniform: mx.array | None = None,
    top_k: list[int] = [],
    top_p: list[float] = [],
) -> list[mx.array]: ...
def logprobs(logits: mx.array, tokens: mx.array, lines: list[int], count: int) -> list[mx.array]: ...
def angles(places: mx.array, rates: mx.array, scale: float) -> mx.array: ...
def angles_from(offsets: mx.array, tokens: int, rates: mx.array, scale: float) -> mx.array: ...
def rotate(x: mx.array, angles: mx.array, of_neighbours: bool) -> mx.array: ...
def attention_weights(queries: mx.array, keys: mx.array, bias: mx.array | None, tokens: int) -> mx.array: ...
def append(
    slab: mx.array,
    lines: mx.array,
    angles: mx.array | None,
    rows: StepRows,
    heads: Heads,
    which: int,
    is_values: bool,
) -> mx.array: ...
def attend(
    lines: mx.array,
    keys: list[mx.array],
    values: list[mx.array],
    angles: mx.array | None,
    rows: StepRows,
    heads: Heads,
) -> mx.array: ...
def recur(
    state: mx.array,
    value: mx.array,
    key: mx.array,
    query: mx.array,
    gate: mx.array,
    beta: mx.array | None,
    keeps: bool,
) -> list[mx.array]: ...
def delta(lines: mx.array, columns: mx.array, state: mx.array, layer: DeltaLayer, keeps: bool) -> list[mx.array]: ...
def head_lines(tokens: mx.array, hidden: mx.array, starts: list[int], offsets: mx.array, head: MTPHead) -> list[mx.array]: ...
def head_guess(
    lines: mx.array,
    states: mx.array,
    angles: mx.array,
    keys: list[mx.array],
    values: list[mx.array],
    rows: StepRows,
    head: MTPHead,
    chosen: mx.array | None = None,  # by row: the token that is guessed from
) -> list[mx.array]: ...
def shift(x: mx.array, last: mx.array) -> mx.array: ...
def windows(arrays: list[mx.array], starts: list[list[int]], counts: list[int | None]) -> list[mx.array]: ...
def window(x: mx.array, starts: list[int], count: int | None = None) -> mx.array: ...

# These three compute at once, and empty the lists of arrays that they are given: memory that only these hold is changed in place.
def decode_step(
    tokens: mx.array, rows: FusedRows, model: FusedModel, memory: list[mx.array], table: list[mx.array]
) -> list[mx.array]: ...
def clear_places(slabs: list[mx.array], ranges: list[tuple[int, int, int]]) -> list[mx.array]: ...
def keep_step(
    sampled: mx.array,
    rows: FusedRows,
    model: FusedModel,
    states: list[mx.array],  # by gated delta layer: lines, channels, states
    hidden: mx.array | None,
    table: list[mx.array],
    head: MTPHead | None,
    slabs: list[mx.array],  # the head's: of keys, then of values
    sampling: Sequence[tuple[float, float, int, float, list[float]]],  # temperature, min_p, top_k, top_p, random numbers
    count: int,
) -> list[mx.array]: ...

"""A model's multi-token-prediction (MTP) head: guesses the token after next, as drafts that the model itself verifies.

The head reads token p with the trunk's hidden state of token p − 1 and guesses token p + 1; so its entry for p depends on
tokens up to p only, like those of every layer. Position 0 has a zero hidden state. The trunk is the model without its head.
Array letters: B rows, T tokens, H hidden size, V vocabulary size.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList, make_prompt_cache

from weft.errors import ModelError, UnsupportedModel
from weft.kernels.blocks import bind as bind_blocks
from weft.kernels.cpu import bind as bind_layers
from weft.kernels.mtp_block import FusedHead, fused_head
from weft.model.loader import LoadedModel
from weft.model.mtp_tensors import BuiltHead, HeadModule, find_stack, read_head
from weft.model.mtp_trial import choose_reading
from weft.model.probe import PROBE_ERRORS


class Trunk:
    """A model as its head sees it: embeddings, hidden states around the final norm, and logits of hidden states."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        _, self.stack = find_stack(model)
        kinds = nn.Embedding | nn.QuantizedEmbedding
        embeddings = [part for part in self.stack.children().values() if isinstance(part, kinds)]
        if not embeddings:
            raise UnsupportedModel("the model has no embedding beside its layers, which an MTP head would share")
        self.embed = embeddings[0]
        outputs = [part for path, part in model.named_modules() if path.rpartition(".")[2] == "lm_head"]
        self.vocabulary = outputs[0] if outputs else self.embed  # the layer whose product with hidden states is the logits
        self.logits = outputs[0] if outputs else self.embed.as_linear

    def states(self, tokens: mx.array, caches: list[Any], embeddings: mx.array | None = None) -> mx.array:
        """Run the trunk's layers over tokens (B, T), or over embeddings in their place: hidden states after its final norm."""
        given = {} if embeddings is None else {"input_embeddings": embeddings}
        return self.stack(tokens, caches, **given)  # type: ignore[no-any-return]

    def states_before_norm(self, tokens: mx.array, caches: list[Any], embeddings: mx.array | None = None) -> mx.array:
        """Run the trunk's layers over tokens (B, T), or over embeddings in their place: hidden states before its final norm."""
        norm = self.stack.norm
        self.stack.norm = nn.Identity()
        try:
            return self.states(tokens, caches, embeddings)
        finally:
            self.stack.norm = norm


class MTPHead:
    """A model's MTP head: from the hidden state of the token before and a token it guesses the next one."""

    def __init__(self, built: BuiltHead, trunk: Trunk) -> None:
        self.module: HeadModule = built.module  # all that is the head's own: embeddings and vocabulary are the trunk's
        self.layer: nn.Module = built.module.layer
        self.hidden_size: int = built.module.embedding_norm.weight.shape[-1]
        self.weights_bytes: int = sum(array.nbytes for _, array in tree_flatten(built.module.parameters()))
        self.after_norm = True  # hidden states that go in and come out are normed; which it is, and `agreement`, the trial finds
        self.agreement = 0.0  # share of tokens of the model's own text that the head guessed
        self.fused: FusedHead | None = None  # the head as weft's own operations, where it can be computed by them
        self._trunk = trunk
        self._hidden_first = built.naming.hidden_first
        self._layer_index = built.layer_index
        self._wants_array = self._refuses_causal()

    def new_cache(self) -> Any:
        """Make an empty mlx-lm cache for the head's layer."""
        return make_prompt_cache(self._trunk.model)[self._layer_index]

    def trunk(self, tokens: mx.array, caches: list[Any], embeddings: mx.array | None = None) -> tuple[mx.array, mx.array]:
        """Run the model over tokens (B, T): hidden states (B, T, H) for the head, and the model's own logits (B, T, V)."""
        if self.after_norm:
            states = self._trunk.states(tokens, caches, embeddings)
            return states, self._trunk.logits(states)
        states = self._trunk.states_before_norm(tokens, caches, embeddings)
        return states, self._trunk.logits(self._trunk.stack.norm(states))

    def read(self, tokens: mx.array, before: mx.array, cache: Any, embeddings: mx.array | None = None) -> mx.array:
        """Read tokens (B, T) with the hidden states (B, T, H) of the tokens before them; returns the head's own (B, T, H).

        These go to `logits`, or as hidden states to the next `read`, to guess one token further. `embeddings`: of the tokens,
        where they are not the model's own (images).
        """
        embedded = self._trunk.embed(tokens) if embeddings is None else embeddings
        both = [self.module.embedding_norm(embedded), self.module.hidden_norm(before)]
        states = self.module.projection(mx.concatenate(both[::-1] if self._hidden_first else both, axis=-1))
        first = cache[0] if isinstance(cache, CacheList | tuple) else cache
        mask = create_attention_mask(states, first, return_array=self._wants_array)
        states = self.layer(states, mask, cache)
        return self.module.norm(states) if self.after_norm else states  # type: ignore[no-any-return]

    def guess(
        self, tokens: mx.array, hidden: mx.array, starts: list[int], cache: Any, chosen: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Read tokens (B, T) or (B,), and return states (B, 1, H) and logits (B, V) of the guesses behind one token of each row.

        `hidden` (B, N, H): states of earlier tokens; from starts[row] on those before each token of a row. `chosen` (B,):
        which token is guessed from; None: the last.
        """
        if self.fused is not None and (found := self.fused.guess(tokens, hidden, starts, cache, chosen)) is not None:
            return found
        tokens = tokens[:, None] if tokens.ndim == 1 else tokens
        states = self.read(tokens, states_from(hidden, starts, tokens.shape[1]), cache)
        state = states[:, -1:] if chosen is None else mx.take_along_axis(states, chosen[:, None, None], axis=1)
        return state, self.logits(state)[:, -1]

    def fuse(self) -> None:
        """Let guesses be computed by weft's own operations where these can; to be called when all layers are bound."""
        made_of = (self.module, self._trunk.embed, self._trunk.vocabulary)
        self.fused = fused_head(*made_of, hidden_first=self._hidden_first, is_normed=self.after_norm)

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the logits (B, T, V) of guesses from the head's hidden states (B, T, H)."""
        return self._trunk.logits(hidden if self.after_norm else self.module.norm(hidden))  # type: ignore[no-any-return]

    def _refuses_causal(self) -> bool:
        """Whether the layer takes masks as arrays only, found by building (not running) a forward."""
        try:
            self.layer(mx.zeros((1, 2, self.hidden_size)), "causal", self.new_cache())
        except (TypeError, ValueError):
            return True
        return False


def states_from(hidden: mx.array, starts: list[int], count: int) -> mx.array:
    """Return `count` of each row's hidden states (B, N, H) from its own start on; beyond the end the last one."""
    if len({*starts}) == 1:
        return hidden[:, starts[0] : starts[0] + count]
    places = mx.minimum(mx.array(starts)[:, None] + mx.arange(count), hidden.shape[1] - 1)
    return mx.take_along_axis(hidden, places[..., None], axis=1)


def load_head(loaded: LoadedModel) -> tuple[MTPHead | None, str | None]:
    """Return a model's MTP head, tried on its own text, or None and why there is none; no head at all has no reason.

    To be called after the model's own layers were bound to weft's kernels; the head's are bound here.
    """
    if loaded.head_error is not None:
        return None, loaded.head_error
    try:
        built = read_head(loaded)
        if built is None:
            return None, None
        bind_layers(built.module)
        head = MTPHead(built, Trunk(loaded.model))
        reason = choose_reading(head, built, loaded)
        bind_blocks(built.module)  # last: the weights of its norms are known now
        head.fuse()
    except ModelError as error:
        return None, str(error)
    except (*PROBE_ERRORS, LookupError) as error:  # whatever a layer or a config stumbles over
        return None, f"its MTP head fails ({type(error).__name__}: {error})"
    return (None, reason) if reason else (head, None)

"""One model over several ranks: each holds a slice of every layer, and the slices' results are added up (tensor parallelism)."""

from typing import Any

import mlx.core as mx

from weft.errors import UnsupportedModel

Group = mx.distributed.Group
HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")  # in configs


def shard_model(model: Any, config: dict[str, Any], name: str, group: Group) -> None:
    """Replace a model's layers by this rank's slices of them, lazily; raise UnsupportedModel if it can not be divided so."""
    size = group.size()
    if not hasattr(model, "shard"):
        raise UnsupportedModel(f"mlx-lm can not divide a {name} over several processes: leave out --shard, or use another model")
    for kind in HEADS:
        if isinstance(count := config.get(kind), int) and count % size:
            raise UnsupportedModel(f"shard {size} does not divide the {kind} {count} of this {name}: choose a number that does")
    try:
        model.shard(group)
    except (ValueError, AssertionError, AttributeError, TypeError) as error:
        raise UnsupportedModel(f"this {name} can not be divided into {size} ({error}): choose another --shard") from error
    if size > 2:
        mx.distributed.all_sum = ordered_sum


def ordered_sum(x: mx.array, *, group: Group | None = None, stream: Any = None) -> mx.array:
    """Add up all ranks' arrays in the order of ranks.

    A ring adds in an order that depends on where in the array a number is, so with three ranks or more a row's bits would depend
    on its place in the batch.
    """
    parts = mx.distributed.all_gather(x[None], group=group, stream=stream)
    total = parts[0]
    for rank in range(1, parts.shape[0]):
        total = total + parts[rank]
    return total

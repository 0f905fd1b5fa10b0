"""Ways to choose a replica: weft's router, and the plain ones it is compared with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

from weft.ipc.messages import Submit
from weft.serving.router import Routed, RoutedReplica, Router, remaining_tokens
from weft.text.types import Placement


class RoundRobin(Router):
    """Sends prompts to one replica after the other, whatever they have to do."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = itertools.count()

    def choose(
        self,
        submit: Submit,  # noqa: ARG002
        replicas: Collection[Routed],
        everywhere: Collection[RoutedReplica],  # noqa: ARG002
    ) -> tuple[Routed, Placement]:
        chosen = list(replicas)[next(self._turn) % len(replicas)]
        return chosen, Placement(chosen.name, 0, 0)


class LeastLoaded(Router):
    """Sends a prompt where the fewest prompt tokens are to be computed, whatever is cached there."""

    def choose(
        self,
        submit: Submit,
        replicas: Collection[Routed],
        everywhere: Collection[RoutedReplica],  # noqa: ARG002
    ) -> tuple[Routed, Placement]:
        def work(one: Routed) -> tuple[float, int]:
            inside = one.client.live.inside.values()
            return max(sum(map(remaining_tokens, inside)), one.status.queued_tokens), len(inside)

        chosen = min(replicas, key=work)
        return chosen, Placement(chosen.name, self.index.matches(submit.prompt, submit.salt).get(chosen.name, 0), 0)


POLICIES: dict[str, Callable[[], Router]] = {"weft": Router, "least-loaded": LeastLoaded, "round-robin": RoundRobin}

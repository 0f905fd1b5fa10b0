"""Models served as on CUDA, kernels run by the emulation: steps over pages give each request its own answer in any crowd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from test_cuda_layers import LLAMA, QWEN

import emulation
from emulation.served import as_on_cuda, random_adapter
from weft.config import EngineConfig, EngineSettings
from weft.engine.engine import Engine
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit
from weft.kernels import cuda_model, cuda_paged, cuda_product
from weft.memory.paged_views import make_batches
from weft.memory.pages import PAGE, PagedPool
from weft.memory.slabs import RowState
from weft.model.adapter import Adapter

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="no C++ compiler")

PROMPTS = [[(7 * row + 3 * token) % 60 + 1 for token in range(length)] for row, length in enumerate((PAGE - 2, 11, 30))]


@pytest.fixture(autouse=True)
def _cuda() -> Iterator[None]:
    with as_on_cuda():
        yield


@pytest.fixture(scope="module", params=[QWEN, LLAMA], ids=lambda config: config["model_type"])
def adapter(request: pytest.FixtureRequest) -> Adapter:
    with as_on_cuda():
        return random_adapter(request.param)


def answers(adapter: Adapter, prompts: list[list[int]], *, emitted: tuple[int, ...] = ()) -> list[list[int]]:
    """The answers of prompts that come at once, with greedy and drawn tokens; `emitted`: some of each that are replayed."""
    settings = EngineSettings(model="", speculate=())
    engine = Engine(adapter, EngineConfig.resolve(settings, "cuda", is_row_invariant=True))
    sequences = []
    for number, prompt in enumerate(prompts):
        sampling = Sampling(temperature=0.0 if len(prompt) % 2 else 0.8, seed=7, max_tokens=6, ignore_eos=True)
        request = Submit((number,), prompt, (sampling,), emitted=(emitted,) if emitted else ())
        sequences += engine.submit_all(request)
    while not engine.idle:
        engine.turn()
        engine.take_events()
    assert not engine.runner.pool.rows
    return [sequence.output for sequence in sequences]


def test_a_model_is_served_by_its_fused_step_and_exactly(adapter: Adapter) -> None:
    assert adapter.model_step is not None
    assert (adapter.way, adapter.refused) == ("seam", {})
    assert adapter.is_row_invariant  # bit for bit, tried at load
    assert adapter.step_tokens == 8


def test_answers_beside_others_are_those_alone(adapter: Adapter) -> None:
    alone = [answers(adapter, [prompt])[0] for prompt in PROMPTS]

    assert answers(adapter, PROMPTS) == alone


def test_tokens_replayed_several_in_a_step_lead_to_the_same_answer(adapter: Adapter) -> None:
    wanted = answers(adapter, PROMPTS[1:2])[0]

    assert answers(adapter, PROMPTS[1:2], emitted=tuple(wanted[:4])) == [wanted]


def test_a_step_has_few_launches(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[str] = []

    def counted(kernel: Any, **launch: Any) -> list[mx.array]:
        launches.append(kernel.name)
        return emulation.call(kernel, **launch)

    pool = adapter.make_pool(slab_tokens=0, max_rows=4)
    assert isinstance(pool, PagedPool)
    engine = Engine(adapter, EngineConfig.resolve(EngineSettings(model="", speculate=()), "cuda", is_row_invariant=True))
    engine.submit(PROMPTS[1], Sampling(temperature=0.0, max_tokens=50, ignore_eos=True))
    while not engine.runner.pool.rows:
        engine.turn()
    engine.turn()
    monkeypatch.setattr(cuda_paged.CudaKernel, "__call__", counted)
    engine.turn()

    kinds = [type(layer.mixer).__name__ for group in adapter.model_step.groups for layer in group.layers]  # type: ignore[union-attr]
    in_layers = sum(6 if kind == "FusedAttention" else 5 for kind in kinds)
    assert len(launches) == in_layers + 5  # the table, the embeddings, the last norm, the output and the choice of a token
    assert launches[0] == "weft_advance_rows"


def test_a_fused_step_that_gives_wrong_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(cuda_model.StepKernels):
        @staticmethod
        def product_in_parts(x: mx.array, weight: cuda_product.Weight) -> mx.array:
            return -cuda_product.product(x, weight)

    original = cuda_model.bind_model
    monkeypatch.setattr(cuda_model, "bind_model", lambda model: original(model, Wrong))
    adapter = random_adapter(LLAMA, seed=6)

    assert adapter.model_step is None
    assert adapter.way == "seam"  # over slabs
    assert not isinstance(adapter.make_pool(slab_tokens=256, max_rows=4), PagedPool)


def test_models_of_other_kinds_have_slabs() -> None:
    adapter = random_adapter({**LLAMA, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16})

    assert adapter.model_step is None
    assert not isinstance(adapter.make_pool(slab_tokens=256, max_rows=4), PagedPool)


def test_a_row_among_many_lines_has_the_bits_of_a_row_alone(adapter: Adapter) -> None:
    prompt, tokens = PROMPTS[1], 3
    caches = adapter.prefilled_caches(prompt)
    contents = adapter.contents(caches)
    found = {}
    for rows in (1, 3, 20):
        pool = adapter.make_pool(slab_tokens=0, max_rows=rows)
        states = [RowState() for _ in range(rows)]
        for state in states:
            pool.allocate(state, contents, len(prompt))
        logits = []
        for step in range(tokens):
            (batch,) = make_batches(pool, states, seam=True, width=None)
            fed = mx.array([[5 + step]] + [[9 + row] for row in range(rows - 1)], mx.int32)
            logits.append(np.array(adapter.decode(fed, batch)[0, -1].astype(mx.float32)))
            batch.keep([1] * rows)
        found[rows] = np.stack(logits)

    assert np.array_equal(found[1], found[3])
    assert np.array_equal(found[1], found[20])

"""The server's Prometheus metrics; those that vLLM has too are also exported under its names, so that its dashboards work."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft.log import RequestRecord

CONTENT_TYPE = CONTENT_TYPE_LATEST
_WAITS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 10)
_WHOLES = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_STALLS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2.5, 5, 10, 30)
_VLLM_LABELS = {"model": "model_name", "finish": "finished_reason"}

Instrument = TypeVar("Instrument", bound=Collector)


class Metrics(Collector):
    """The server's Prometheus counters, gauges and histograms; called from the event loop's thread only."""

    def __init__(self) -> None:
        self._shown: list[tuple[Collector, tuple[str, ...]]] = []
        self._gaps: dict[str, Histogram] = {}
        add, waits = self._add, partial(Histogram, buckets=_WAITS)
        ended = ("model", "wire", "finish")
        self._requests = add(Counter, "weft_requests_total", "Answers by why they ended.", "request_success", labels=ended)
        prompt = ("prompt_tokens", "prefix_cache_queries")
        self._prompt_tokens = add(Counter, "weft_prompt_tokens_total", "Tokens of prompts.", *prompt)
        cached = "Tokens of prompts that were not computed again."
        self._cached_tokens = add(Counter, "weft_cached_tokens_total", cached, "prefix_cache_hits")
        self._generated_tokens = add(Counter, "weft_generated_tokens_total", "Tokens of answers.", "generation_tokens")
        self._queue = add(waits, "weft_queue_seconds", "From arrival to the first work.", "request_queue_time_seconds")
        prefill = "From the first work to the first token."
        self._prefill = add(waits, "weft_prefill_seconds", prefill, "request_prefill_time_seconds")
        first_token = ("weft_time_to_first_token_seconds", "From arrival to the first token.")
        self._first_token = add(waits, *first_token, "time_to_first_token_seconds")
        gap = ("inter_token_latency_seconds", "time_per_output_token_seconds")
        gaps, wholes = partial(Histogram, buckets=_GAPS), partial(Histogram, buckets=_WHOLES)
        self._token_gap = add(gaps, "weft_token_gap_seconds", "Between two tokens of one answer.", *gap)
        self._request = add(wholes, "weft_request_seconds", "From arrival to the end.", "e2e_request_latency_seconds")
        self._running = add(Gauge, "weft_rows_running", "Rows being computed.", "num_requests_running")
        self._waiting = add(Gauge, "weft_rows_waiting", "Rows waiting for their turn.", "num_requests_waiting")
        alone = "Rows that decoded alone, not in the batch."
        self._alone = add(Gauge, "weft_rows_alone_total", alone, labels=("model", "cause"))
        images = "Images whose features were computed (encoded) or still known (hits), and the seconds of computing them."
        self._images = add(Gauge, "weft_images_total", images, labels=("model", "kind"))
        self._engine_up = add(Gauge, "weft_engine_up", "Whether the model's engine answers.")
        self._restarts = add(Gauge, "weft_engine_restarts_total", "Engines that were replaced.")
        replica = ("model", "replica")
        self._replica_up = add(Gauge, "weft_replica_up", "Whether a replica takes requests.", labels=replica)
        self._replica_rows = add(Gauge, "weft_replica_rows_running", "Rows that a replica computes.", labels=replica)
        self._replica_requests = add(
            Gauge, "weft_replica_requests", "Answers that a replica has, waiting or not.", labels=replica
        )
        prompts = "Prompt tokens of answers that ended in a replica."
        self._replica_prompts = add(Gauge, "weft_replica_prompt_tokens_total", prompts, labels=replica)
        hits = "Those of them that it had not to compute."
        self._replica_hits = add(Gauge, "weft_replica_cached_tokens_total", hits, labels=replica)
        self._wanted = add(Gauge, "weft_replicas_wanted", "Replicas that the model should have by its load.")
        queued = "Seconds that a single replica would need for what waits to be computed."
        self._queued = add(Gauge, "weft_replicas_queued_seconds", queued)
        self._moved = add(Gauge, "weft_answers_moved_total", "Answers that went on in another replica.")
        self._memory = add(Gauge, "weft_memory_bytes", "Memory by what it is for.", labels=("model", "kind"))
        reused = "Answers by what ended the known part."
        self._reused = add(Counter, "weft_prefix_cache_requests_total", reused, labels=("model", "cause"))
        self._prefixes = add(Gauge, "weft_prefix_cache_events", "What happened to kept prompts.", labels=("model", "kind"))
        spec = "weft_spec_decode_num"
        drafts = ("Drafts that were verified, of one or more tokens each.", "spec_decode_num_drafts")
        self._drafts = add(Counter, f"{spec}_drafts_total", *drafts)
        drafted = ("Draft tokens that were verified.", "spec_decode_num_draft_tokens")
        self._drafted = add(Counter, f"{spec}_draft_tokens_total", *drafted, labels=("model", "source"))
        accepted = ("Draft tokens that were accepted.", "spec_decode_num_accepted_tokens")
        self._accepted = add(Counter, f"{spec}_accepted_tokens_total", *accepted, labels=("model", "source"))
        placed = ("Draft tokens that were accepted, by place in the draft.", "spec_decode_num_accepted_tokens_per_pos")
        self._accepted_at = add(Counter, f"{spec}_accepted_tokens_per_pos_total", *placed, labels=("model", "position"))
        self._http = add(Counter, "weft_http_requests_total", "HTTP responses by status.", labels=("status",))
        stalls = partial(Histogram, buckets=_STALLS)
        self._stalls = add(
            stalls, "weft_event_loop_stall_seconds", "How late the front's event loop was, every 50 ms.", labels=()
        )

    def finished(self, record: RequestRecord) -> None:
        """Record one finished request in counters and histograms; values that are None in its record are not observed."""
        model = record.model
        self._requests.labels(model, record.dialect, record.finish or "error").inc()
        self._request.labels(model).observe(record.total_seconds)
        if record.first_token_seconds is not None:
            self._first_token.labels(model).observe(record.first_token_seconds)
        if record.prompt_tokens is not None:
            self._prompt_tokens.labels(model).inc(record.prompt_tokens)
            self._cached_tokens.labels(model).inc(record.cached_tokens)
            self._generated_tokens.labels(model).inc(record.completion_tokens)
            self._queue.labels(model).observe(record.queue_seconds)
            self._prefill.labels(model).observe(record.prefill_seconds)
        if record.miss_cause is not None:
            self._reused.labels(model, record.miss_cause).inc()

    def token_gap(self, model: str, seconds: float) -> None:
        """Observe the time between two tokens of one answer, streamed or not; called per token, so labels are looked up once."""
        if model not in self._gaps:
            self._gaps[model] = self._token_gap.labels(model)
        self._gaps[model].observe(seconds)

    def gaps(self, model: str) -> list[tuple[float, float]]:
        """Return a model's cumulative token-gap histogram as (upper bound in seconds, count) pairs; empty before any gap."""
        if model not in self._gaps:
            return []
        (metric,) = self._gaps[model].collect()
        return [(float(sample.labels["le"]), sample.value) for sample in metric.samples if sample.name.endswith("_bucket")]

    def rows(self, model: str, running: int, waiting: int) -> None:
        self._running.labels(model).set(running)
        self._waiting.labels(model).set(waiting)

    def images(self, model: str, counts: Mapping[str, float]) -> None:
        for kind, value in counts.items():
            self._images.labels(model, kind).set(value)

    def rows_alone(self, model: str, counts: Mapping[str, int]) -> None:
        for cause, value in counts.items():
            self._alone.labels(model, cause).set(value)

    def memory(self, model: str, num_bytes: Mapping[str, int]) -> None:
        for kind, value in num_bytes.items():
            self._memory.labels(model, kind).set(value)

    def prefixes(self, model: str, counts: Mapping[str, int]) -> None:
        for kind, value in counts.items():
            self._prefixes.labels(model, kind).set(value)

    def drafts(self, model: str, num_drafts: int, accepted_at: Sequence[int]) -> None:
        """Count further drafts that were verified, and by place in the draft their tokens that were accepted."""
        self._drafts.labels(model).inc(num_drafts)
        for position, number in enumerate(accepted_at):
            self._accepted_at.labels(model, str(position)).inc(number)

    def draft_tokens(self, model: str, drafted: Mapping[str, int], accepted: Mapping[str, int]) -> None:
        """Count further draft tokens that were verified, and those of them that were accepted, both by source."""
        for counter, numbers in ((self._drafted, drafted), (self._accepted, accepted)):
            for source, number in numbers.items():
                counter.labels(model, source).inc(number)

    @property
    def _replica_gauges(self) -> tuple[Gauge, ...]:
        return self._replica_up, self._replica_rows, self._replica_requests, self._replica_prompts, self._replica_hits

    def engine(self, model: str, up: bool, restarts: int) -> None:
        """Set whether a model's engine answers and its restart count; the first call also creates the model's token counters."""
        self._engine_up.labels(model).set(up)
        self._restarts.labels(model).set(restarts)
        for instrument in (self._prompt_tokens, self._cached_tokens, self._generated_tokens):
            instrument.labels(model)

    def forget_replicas(self, model: str) -> None:
        """Drop the gauges of a model's replicas, some of which may have left; those that are there are set again."""
        for instrument in self._replica_gauges:
            instrument.remove_by_labels({"model": model})

    def scaling(self, model: str, num_wanted: int, queued_seconds: float) -> None:
        self._wanted.labels(model).set(num_wanted)
        self._queued.labels(model).set(queued_seconds)

    def replica(self, model: str, replica: str, up: bool, running: int, requests: int) -> None:
        """Set whether a replica takes requests, its running rows, and its unfinished answers."""
        self._replica_up.labels(model, replica).set(up)
        self._replica_rows.labels(model, replica).set(running)
        self._replica_requests.labels(model, replica).set(requests)

    def replica_hits(self, model: str, replica: str, num_prompt: int, num_cached: int) -> None:
        self._replica_prompts.labels(model, replica).set(num_prompt)
        self._replica_hits.labels(model, replica).set(num_cached)

    def moved(self, model: str, number: int) -> None:
        self._moved.labels(model).set(number)

    def unloaded(self, model: str) -> None:
        """Remove the gauges of a model that was unloaded; its counters stay."""
        rows = (self._running, self._waiting, self._alone, self._images)
        pool = (*self._replica_gauges, self._wanted, self._queued, self._moved)
        for instrument in (*rows, *pool, self._engine_up, self._restarts, self._memory, self._prefixes):
            instrument.remove_by_labels({"model": model})

    def http(self, status: int) -> None:
        self._http.labels(str(status)).inc()

    def loop_stall(self, seconds: float) -> None:
        self._stalls.observe(seconds)

    def render(self) -> bytes:
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        for instrument, names in self._shown:
            for metric in instrument.collect():
                # Nobody reads the times at which series were made, and they are as many as the counters.
                metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
                yield metric
                yield from (_as_vllm(metric, name) for name in names)

    def _add(
        self, kind: Callable[..., Instrument], name: str, about: str, *vllm_names: str, labels: tuple[str, ...] = ("model",)
    ) -> Instrument:
        instrument = kind(name, about, labelnames=labels, registry=None)
        self._shown.append((instrument, vllm_names))
        return instrument


def _as_vllm(metric: Metric, name: str) -> Metric:
    renamed = Metric(f"vllm:{name}", metric.documentation, metric.type)
    for sample in metric.samples:
        labels = {_VLLM_LABELS.get(label, label): value for label, value in sample.labels.items()}
        if labels.get("finished_reason") == "cancelled":
            labels["finished_reason"] = "abort"
        renamed.add_sample(renamed.name + sample.name.removeprefix(metric.name), labels, sample.value)
    return renamed

"""Each thing is counted once and shown under all its names."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from weft.log import RequestRecord
from weft.metrics import CONTENT_TYPE, Metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """A sample as a scraper reads it."""
    found = [
        sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    ]
    assert len(found) <= 1, "a series was shown twice"
    return found[0] if found else None


def names(metrics: Metrics) -> set[str]:
    return {family.name for family in text_string_to_metric_families(metrics.render().decode())}


def record(finish: str = "stop", model: str = "tiny", **numbers: Any) -> RequestRecord:
    named = {"request_id": "r", "client": "c", "dialect": "chat", "status": 200, "total_seconds": 1.5}
    return RequestRecord(model=model, finish=finish, **named | numbers)


def finished_once() -> Metrics:
    metrics = Metrics()
    numbers = {"prompt_tokens": 100, "completion_tokens": 7, "cached_tokens": 60, "queue_seconds": 0.2, "prefill_seconds": 0.3}
    metrics.finished(record(first_token_seconds=0.5, **numbers))
    return metrics


def test_a_finished_request_counts_its_tokens_and_times() -> None:
    metrics = finished_once()

    assert value(metrics, "weft_requests_total", model="tiny", wire="chat", finish="stop") == 1
    assert value(metrics, "weft_prompt_tokens_total", model="tiny") == 100
    assert value(metrics, "weft_cached_tokens_total", model="tiny") == 60
    assert value(metrics, "weft_generated_tokens_total", model="tiny") == 7
    assert value(metrics, "weft_queue_seconds_sum", model="tiny") == 0.2
    assert value(metrics, "weft_prefill_seconds_sum", model="tiny") == 0.3
    assert value(metrics, "weft_time_to_first_token_seconds_sum", model="tiny") == 0.5
    assert value(metrics, "weft_request_seconds_sum", model="tiny") == 1.5
    assert value(metrics, "weft_request_seconds_bucket", model="tiny", le="1.0") == 0
    assert value(metrics, "weft_request_seconds_bucket", model="tiny", le="2.5") == 1


def test_vllms_dashboards_find_the_same_values() -> None:
    metrics = finished_once()
    metrics.rows("tiny", running=3, waiting=4)
    metrics.token_gap("tiny", 0.02)

    assert value(metrics, "vllm:request_success_total", model_name="tiny", finished_reason="stop", wire="chat") == 1
    assert value(metrics, "vllm:prompt_tokens_total", model_name="tiny") == 100
    assert value(metrics, "vllm:prefix_cache_queries_total", model_name="tiny") == 100
    assert value(metrics, "vllm:prefix_cache_hits_total", model_name="tiny") == 60
    assert value(metrics, "vllm:generation_tokens_total", model_name="tiny") == 7
    assert value(metrics, "vllm:time_to_first_token_seconds_count", model_name="tiny") == 1
    assert value(metrics, "vllm:time_to_first_token_seconds_bucket", model_name="tiny", le="0.5") == 1
    assert value(metrics, "vllm:inter_token_latency_seconds_sum", model_name="tiny") == 0.02
    assert value(metrics, "vllm:time_per_output_token_seconds_sum", model_name="tiny") == 0.02
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum", model_name="tiny") == 1.5
    assert value(metrics, "vllm:num_requests_running", model_name="tiny") == 3
    assert value(metrics, "vllm:num_requests_waiting", model_name="tiny") == 4


def test_a_cancelled_request_is_an_abort_in_vllms_words_only() -> None:
    metrics = Metrics()
    metrics.finished(record("cancelled", "cancelled"))

    assert value(metrics, "weft_requests_total", model="cancelled", wire="chat", finish="cancelled") == 1
    assert value(metrics, "vllm:request_success_total", model_name="cancelled", wire="chat", finished_reason="abort") == 1


def test_a_request_without_usage_or_first_token_counts_only_what_it_has() -> None:
    metrics = Metrics()
    metrics.finished(record("error"))

    assert value(metrics, "weft_request_seconds_count", model="tiny") == 1
    assert value(metrics, "weft_time_to_first_token_seconds_count", model="tiny") is None
    assert value(metrics, "weft_queue_seconds_count", model="tiny") is None


def test_gaps_of_two_models_are_kept_apart() -> None:
    metrics = Metrics()
    for model, seconds in (("a", 0.1), ("b", 0.2), ("a", 0.3)):
        metrics.token_gap(model, seconds)

    assert value(metrics, "weft_token_gap_seconds_count", model="a") == 2
    assert value(metrics, "weft_token_gap_seconds_sum", model="a") == 0.4
    assert value(metrics, "weft_token_gap_seconds_count", model="b") == 1


def test_an_engine_shows_that_it_is_up_and_how_often_it_was_replaced() -> None:
    metrics = Metrics()

    metrics.engine("tiny", up=True, restarts=0)
    assert value(metrics, "weft_engine_up", model="tiny") == 1
    assert value(metrics, "weft_engine_restarts_total", model="tiny") == 0

    metrics.engine("tiny", up=False, restarts=1)
    assert value(metrics, "weft_engine_up", model="tiny") == 0
    assert value(metrics, "weft_engine_restarts_total", model="tiny") == 1


def test_rows_that_decoded_alone_are_shown_by_cause_until_the_model_is_unloaded() -> None:
    metrics = Metrics()
    metrics.rows_alone("tiny", {"model": 0, "short": 4, "geometry": 1})

    assert value(metrics, "weft_rows_alone_total", model="tiny", cause="short") == 4
    assert value(metrics, "weft_rows_alone_total", model="tiny", cause="geometry") == 1
    metrics.unloaded("tiny")
    assert value(metrics, "weft_rows_alone_total", model="tiny", cause="short") is None


def test_memory_is_shown_by_kind_and_responses_by_status() -> None:
    metrics = Metrics()
    metrics.memory("tiny", {"weights": 1000, "rows": 20})
    metrics.http(200)
    metrics.http(200)
    metrics.http(499)

    assert value(metrics, "weft_memory_bytes", model="tiny", kind="weights") == 1000
    assert value(metrics, "weft_memory_bytes", model="tiny", kind="rows") == 20
    assert value(metrics, "weft_http_requests_total", status="200") == 2
    assert value(metrics, "weft_http_requests_total", status="499") == 1


def test_what_was_known_of_prompts_is_counted_by_cause_and_what_became_of_them_shown_by_kind() -> None:
    metrics = Metrics()
    for cause in ("whole", "differs", "whole"):
        metrics.finished(record(prompt_tokens=9, miss_cause=cause))
    metrics.finished(record(prompt_tokens=9))
    metrics.prefixes("tiny", {"evicted": 3, "loaded": 1})
    metrics.prefixes("tiny", {"evicted": 0})  # another engine has begun anew

    assert value(metrics, "weft_prefix_cache_requests_total", model="tiny", cause="whole") == 2
    assert value(metrics, "weft_prefix_cache_requests_total", model="tiny", cause="differs") == 1
    assert value(metrics, "weft_prefix_cache_events", model="tiny", kind="evicted") == 0
    assert value(metrics, "weft_prefix_cache_events", model="tiny", kind="loaded") == 1


def test_two_servers_in_one_process_share_nothing() -> None:
    finished_once()

    assert value(Metrics(), "weft_prompt_tokens_total", model="tiny") is None


def test_only_our_names_and_vllms_are_shown_and_no_series_of_creation_times() -> None:
    shown = names(finished_once())

    assert {name[:5] for name in shown} == {"weft_", "vllm:"}
    assert not [name for name in shown if name.endswith("_created")]


def test_the_content_type_is_prometheus_text() -> None:
    assert CONTENT_TYPE.startswith("text/plain")


def test_drafts_are_counted_by_source_and_place_under_both_names() -> None:
    metrics = Metrics()
    for _ in range(2):
        metrics.drafts("tiny", 3, (3, 2, 0))
        metrics.draft_tokens("tiny", {"lookup": 7, "mtp": 2}, {"lookup": 5})

    spec = "spec_decode_num"
    assert value(metrics, f"weft_{spec}_drafts_total", model="tiny") == 6
    assert value(metrics, f"vllm:{spec}_drafts_total", model_name="tiny") == 6
    assert value(metrics, f"weft_{spec}_draft_tokens_total", model="tiny", source="lookup") == 14
    assert value(metrics, f"weft_{spec}_draft_tokens_total", model="tiny", source="mtp") == 4
    assert value(metrics, f"vllm:{spec}_accepted_tokens_total", model_name="tiny", source="lookup") == 10
    assert value(metrics, f"weft_{spec}_accepted_tokens_per_pos_total", model="tiny", position="1") == 4
    assert value(metrics, f"vllm:{spec}_accepted_tokens_per_pos_total", model_name="tiny", position="2") == 0

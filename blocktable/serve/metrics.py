"""Prometheus metrics under vLLM's names, so that its dashboards work, and ours beside them.

Counters and gauges are read from the scheduler when Prometheus asks: a step pays nothing for
them. Histograms of whole requests are fed once, when a request ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from blocktable.engine.engine import Engine
from blocktable.engine.outputs import RequestOutput
from blocktable.sched.stats import BOUNDS
from blocktable.sched.stats import Histogram as Times

_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_LABELS = ("model_name", "engine")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _tokens(largest: int) -> list[int]:
    """1, 2, 5, 10, ... up to the model's length."""
    return [m * 10**e for e in range(10) for m in (1, 2, 5) if m * 10**e <= largest] or [1]


class Metrics:
    """The metrics of one server. ``observe`` is called by the engine's thread after each step."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.registry = CollectorRegistry()
        self._values = (model, "0")
        self._reasons: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.prompt_tokens = self.cached_tokens = self.rejected = 0
        self.step_seconds = Times()
        self.registry.register(_Reader(engine, self, self._values))
        tokens = _tokens(engine.max_model_len)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens", tokens)
        self._generated = self._histogram("request_generation_tokens", "Output tokens", tokens)
        self._n = self._histogram("request_params_n", "Completions asked for", (1, 2, 5, 10, 20))
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to end", _SECONDS)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "First scheduled to first token", _SECONDS
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "First token to end", _SECONDS
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "First scheduled to end", _SECONDS
        )

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Any:
        made = Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=self.registry)
        return made.labels(*self._values)

    def observe(self, seconds: float, outputs: Iterable[RequestOutput]) -> None:
        """Account one step and the requests that ended in it."""
        self.step_seconds.add(seconds)
        for output in outputs:
            if output.finished:
                self._ended(output)

    def _ended(self, output: RequestOutput) -> None:
        for part in output.outputs:
            self._reasons[part.finish_reason or "error"] += 1
            self._generated.observe(len(part.token_ids))
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens
        self._prompt.observe(len(output.prompt_token_ids))
        self._n.observe(len(output.outputs))
        times = output.metrics
        if times.finished is None:
            return
        self._whole.observe(times.finished - times.arrival)
        if times.first_scheduled is not None:
            self._inference.observe(times.finished - times.first_scheduled)
            if times.first_token is not None:
                self._prefill.observe(times.first_token - times.first_scheduled)
        if times.first_token is not None:
            self._decode.observe(times.finished - times.first_token)

    @property
    def reasons(self) -> dict[str, int]:
        """Completions ended, by reason."""
        return self._reasons

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class _Reader(Collector):
    """Reads the scheduler when it is asked."""

    def __init__(self, engine: Engine, own: Metrics, values: tuple[str, str]) -> None:
        self._engine, self._own, self._values = engine, own, values

    def collect(self) -> Iterator[Metric]:
        scheduler = self._engine.scheduler
        stats, load = scheduler.stats, scheduler.load()
        pool = self._engine.manager.pool.counts()
        gauges = (
            ("vllm:num_requests_running", "Requests that hold a row", load.running),
            ("vllm:num_requests_waiting", "Requests that wait for one", load.waiting),
            ("vllm:kv_cache_usage_perc", "Blocks held by requests, 1 is all", load.usage),
            ("blocktable:blocks_usable", "Blocks of the pool", pool.usable),
            ("blocktable:blocks_used", "Blocks that requests hold", pool.used),
            ("blocktable:blocks_free", "Blocks without content to keep", pool.free),
            ("blocktable:blocks_evictable", "Cached blocks that nobody holds", pool.evictable),
            ("blocktable:blocks_fenced", "Blocks that wait for a step in flight", pool.fenced),
        )
        for name, text, value in gauges:
            yield self._one(GaugeMetricFamily(name, text, labels=_LABELS), value)
        counters = (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up", stats.query_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens found", stats.hit_tokens),
            ("vllm:num_preemptions", "Requests that lost their row", stats.preemptions),
            ("vllm:spec_decode_num_draft_tokens", "Tokens guessed ahead", stats.drafted_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Guesses kept", stats.accepted_tokens),
            ("vllm:prompt_tokens", "Prompt tokens of ended requests", self._own.prompt_tokens),
            ("vllm:prompt_tokens_cached", "Of them from the cache", self._own.cached_tokens),
            ("vllm:generation_tokens", "Tokens generated", stats.generated_tokens),
            ("blocktable:steps", "Engine steps", stats.steps),
            ("blocktable:scheduled_tokens", "Tokens computed", stats.scheduled_tokens),
            ("blocktable:rejected_requests", "Requests answered 429", self._own.rejected),
        )
        for name, text, value in counters:
            yield self._one(CounterMetricFamily(name, text, labels=_LABELS), value)
        yield self._success()
        yield self._info()
        histograms = (
            ("vllm:time_to_first_token_seconds", "Arrival to first token",
             stats.time_to_first_token),
            ("vllm:inter_token_latency_seconds", "Between two tokens", stats.inter_token_time),
            ("vllm:request_queue_time_seconds", "Arrival to first step", stats.queue_time),
            ("blocktable:step_seconds", "Engine steps", self._own.step_seconds),
        )  # fmt: skip
        for name, text, times in histograms:
            yield self._times(name, text, times)

    def _one(self, family: Any, value: float) -> Any:
        family.add_metric(self._values, value)
        return family

    def _success(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success", "Completions ended", labels=(*_LABELS, "finished_reason")
        )
        for reason, count in self._own.reasons.items():
            family.add_metric((*self._values, reason), count)
        return family

    def _info(self) -> Metric:
        pool = self._engine.manager.pool
        facts = {
            "block_size": str(self._engine.block_size),
            "num_gpu_blocks": str(pool.num_blocks),
            "max_model_len": str(self._engine.max_model_len),
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "The cache, as labels", labels=(*_LABELS, *facts)
        )
        family.add_metric((*self._values, *facts.values()), 1)
        return family

    def _times(self, name: str, text: str, times: Times) -> Metric:
        family = HistogramMetricFamily(name, text, labels=_LABELS)
        total, buckets = 0, []
        bounds = [*map(str, BOUNDS), "+Inf"]
        for bound, count in zip(bounds, times.counts.tolist(), strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(self._values, buckets, times.total)
        return family

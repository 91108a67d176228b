"""What values the engine's options may have, as one table, and the checks against it."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from blocktable.attention.options import BACKENDS
from blocktable.core.errors import ConfigError
from blocktable.engine.loader.dtypes import DTYPES
from blocktable.prefix.eviction import POLICIES

_INT32_MAX = 2**31 - 1


class Whole(NamedTuple):
    """An integer in [least, most]; NumPy's are taken too, bools are not."""

    least: int = 1
    most: int = _INT32_MAX
    optional: bool = False

    def check(self, name: str, value: Any) -> int:
        try:
            if isinstance(value, (bool, np.bool_)):
                raise TypeError
            number = operator.index(value)
        except TypeError:
            raise ConfigError(f"{name} must be an integer, got {value!r}") from None
        if not self.least <= number <= self.most:
            raise ConfigError(f"{name} must be in [{self.least}, {self.most}], got {number}")
        return number


class Number(NamedTuple):
    """A finite number in [low, high], or in (low, high] with ``above_low``."""

    low: float
    high: float
    above_low: bool = False
    optional: bool = False

    def check(self, name: str, value: Any) -> float:
        try:
            if isinstance(value, (bool, np.bool_, str, bytes)):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{name} must be a number, got {value!r}") from None
        inside = self.low <= number <= self.high and not (self.above_low and number == self.low)
        if not (math.isfinite(number) and inside):
            bracket = "(" if self.above_low else "["
            limits = f"{bracket}{self.low:g}, {self.high:g}]"
            raise ConfigError(f"{name} must be in {limits}, got {value!r}")
        return number


class Flag(NamedTuple):
    """True or False."""

    optional: bool = False

    def check(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, got {value!r}")
        return value


class Word(NamedTuple):
    """One of some words, or any text where none are given."""

    words: Collection[str] = ()
    optional: bool = False

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or (self.words and value not in self.words):
            wanted = f"one of {', '.join(self.words)}" if self.words else "a string"
            raise ConfigError(f"{name} must be {wanted}, got {value!r}")
        return value


Kind = Whole | Number | Flag | Word

KINDS: dict[str, Kind] = {
    "dtype": Word(DTYPES), "device": Word(),
    "block_size": Whole(), "num_blocks": Whole(optional=True),
    "memory_bytes": Whole(most=2**63 - 1, optional=True),
    "memory_share": Number(0, 1, above_low=True), "max_model_len": Whole(optional=True),
    "max_num_seqs": Whole(), "max_num_batched_tokens": Whole(),
    "enable_prefix_caching": Flag(), "eviction": Word(POLICIES), "retain_share": Number(0, 1),
    "enable_chunked_prefill": Flag(), "preemption": Word(("recompute", "swap")),
    "num_host_blocks": Whole(least=0), "policy": Word(("fcfs", "priority")),
    "seed": Whole(least=0, most=2**64 - 1, optional=True),
    "accelerate": Flag(optional=True), "async_steps": Flag(optional=True),
    "compile": Flag(optional=True), "cuda_graphs": Flag(), "attention_backend": Word(BACKENDS),
    "gpu_memory_utilization": Number(0, 1, above_low=True),
    "tensor_parallel_size": Whole(most=1024), "context_parallel_size": Whole(most=1024),
    "context_parallel_interleave": Whole(),
    "rank_timeout": Number(0, 1e9, above_low=True), "num_draft_tokens": Whole(least=0, most=1024),
    "draft_ngram_min": Whole(), "draft_ngram_max": Whole(),
    "kv_events": Word(optional=True), "kv_events_replay": Word(optional=True),
}  # fmt: skip
"""Every option but ``proposer``, which is an object."""


def checked(name: str, value: Any) -> Any:
    """The value, as a plain Python one; ConfigError names the option, the value and its limit."""
    kind = KINDS[name]
    return None if value is None and kind.optional else kind.check(name, value)


def check_names(given: Mapping[str, Any], known: Collection[str]) -> None:
    """ConfigError for an option that is not among the known ones, with the nearest of them."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"there is no option {name!r}; {hint}")

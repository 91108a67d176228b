"""What an attention call may ask for, checked once, and what it returns.

The meaning of every option is fixed here and in :mod:`blocktable.attention.reference`; every back
end follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from blocktable.core.errors import ConfigError

OURS = "triton"
"""Our own kernels on a GPU, among the names of what may serve attention there."""
BACKENDS = ("auto", OURS, "flashinfer", "flash_attn")
"""What may serve attention on a GPU: the measured best, our own kernels, or a library."""


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Scalar options of one attention layer.

    scale: factor on the dot product of query and key.
    causal: a query sees positions up to its own; otherwise all ``seq_len`` positions.
    sliding_window: number of positions seen, the query's own included (``p - w < k <= p``; without
        ``causal`` also ``k < p + w``).
    num_sink_tokens: this many first positions are seen beside the window (StreamingLLM; not the
        learned logits ``sinks``).
    chunk: positions of the query's own chunk of this many are seen (Llama 4).
    softcap: scores become ``softcap * tanh(score / softcap)``, after the scale and before the mask.
    """

    scale: float
    causal: bool = True
    sliding_window: int | None = None
    num_sink_tokens: int = 0
    chunk: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name in ("sliding_window", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.num_sink_tokens < 0 or (self.num_sink_tokens and self.sliding_window is None):
            raise ConfigError(
                f"num_sink_tokens {self.num_sink_tokens} must be positive, beside a sliding_window "
                f"(got {self.sliding_window})"
            )
        if self.softcap is not None and not self.softcap > 0:
            raise ConfigError(f"softcap must be above 0, got {self.softcap}")


class AttentionOutput(NamedTuple):
    """Output [T, Hq, Dv] in the query's dtype and natural-log denominators [T, Hq] float32.

    ``lse`` is the log of the whole softmax denominator: alibi, softcap and sinks are in it. A query
    that sees no key has output 0 and lse -inf (or its sink).
    """

    out: Any
    lse: Any


def check_shapes(
    query: Any, k_cache: Any, v_cache: Any, block_table: Any, query_start_loc: Any, seq_lens: Any
) -> None:
    """Raise ConfigError unless the arrays of one call fit each other. Reads shapes only."""
    if query.ndim != 3 or k_cache.ndim != 4 or v_cache.ndim != 4 or block_table.ndim != 2:
        raise ConfigError(
            "paged attention takes query [T, Hq, D], k_cache [N, Hkv, bs, D], v_cache "
            f"[N, Hkv, bs, Dv] and block_table [n, W], got {tuple(query.shape)}, "
            f"{tuple(k_cache.shape)}, {tuple(v_cache.shape)} and {tuple(block_table.shape)}"
        )
    if tuple(k_cache.shape[:3]) != tuple(v_cache.shape[:3]):
        raise ConfigError(
            f"k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)} differ in blocks, "
            "heads or block size"
        )
    if query.shape[2] != k_cache.shape[3]:
        raise ConfigError(
            f"query head size {query.shape[2]} differs from key head size {k_cache.shape[3]}"
        )
    if query.shape[1] % k_cache.shape[1]:
        raise ConfigError(
            f"{query.shape[1]} query heads are no multiple of {k_cache.shape[1]} KV heads"
        )
    rows = seq_lens.shape[0]
    if query_start_loc.shape[0] != rows + 1 or block_table.shape[0] < rows:
        raise ConfigError(
            f"{rows} rows in seq_lens need {rows + 1} entries in query_start_loc (got "
            f"{query_start_loc.shape[0]}) and as many block table rows (got {block_table.shape[0]})"
        )

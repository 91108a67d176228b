"""What one layer keeps in the KV cache, and how layers form groups that share a block table.

A spec answers two questions: how many bytes a block of its layer takes, and (through the class in
``groups/`` that serves its kind) which blocks a request keeps. Specs are frozen values; layers
with equal specs may share a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import ClassVar, Literal

from blocktable.core.errors import ConfigError

DTYPE_BYTES: dict[str, int] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1, "uint8": 1,
}  # fmt: skip

MambaCacheMode = Literal["none", "all", "align"]


def ceil_div(a: int, b: int) -> int:
    """Smallest integer >= a / b, for a >= 0 and b > 0."""
    return -(-a // b)


def _positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a positive integer, got {value!r}")


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype given by name; ConfigError for an unknown name."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"unknown KV cache dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """Base of all specs. ``block_size`` counts positions of the sequence in one block."""

    kind: ClassVar[str] = "abstract"
    block_size: int

    def __post_init__(self) -> None:
        _positive("block_size", self.block_size)

    @property
    def page_size_bytes(self) -> int:
        """Bytes one block of this layer takes, padding included."""
        raise ConfigError(f"{type(self).__name__} has no page size of its own")

    @property
    def static_blocks(self) -> int:
        """Blocks of the pool that a group of such layers keeps, whatever runs."""
        return 0

    def max_blocks_per_request(self, max_model_len: int) -> int:
        """Most entries a request's row can have."""
        return ceil_div(max_model_len, self.block_size)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """One K and one V vector for each position and KV head.

    ``page_size_padded`` widens the page so that groups of different kinds can share one pool.
    """

    num_kv_heads: int
    head_size: int
    head_size_v: int | None = None
    dtype: str = "float32"
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("num_kv_heads", self.num_kv_heads)
        _positive("head_size", self.head_size)
        dtype_bytes(self.dtype)
        if self.page_size_padded is not None and self.page_size_padded < self.real_page_size_bytes:
            raise ConfigError(
                f"page_size_padded {self.page_size_padded} is below the page's own "
                f"{self.real_page_size_bytes} bytes"
            )

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one position in this layer."""
        v = self.head_size if self.head_size_v is None else self.head_size_v
        return self.num_kv_heads * (self.head_size + v) * dtype_bytes(self.dtype)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one block without padding."""
        return self.block_size * self.bytes_per_token

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.real_page_size_bytes


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every earlier position is attended, so every block is kept."""

    kind: ClassVar[str] = "full_attention"


@dataclass(frozen=True, kw_only=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention behind ``sink_len`` tokens whose K and V are the model's own parameters.

    They are the same for every request: the manager sets ``sink_len / block_size`` blocks of the
    pool aside once, the model fills them once, and every row is read as if it began with them
    (``device.sinks``). vLLM's spec of this name; openPangu has such layers.
    """

    kind: ClassVar[str] = "sink_full_attention"
    sink_len: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("sink_len", self.sink_len)
        if self.sink_len % self.block_size:
            raise ConfigError(
                f"sink_len {self.sink_len} is no multiple of the block size {self.block_size}"
            )

    @property
    def static_blocks(self) -> int:
        return self.sink_len // self.block_size


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """The last ``sliding_window`` positions, the query's own included, are attended."""

    kind: ClassVar[str] = "sliding_window"
    sliding_window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("sliding_window", self.sliding_window)


@dataclass(frozen=True, kw_only=True)
class SinkWindowSpec(SlidingWindowSpec):
    """The last ``sliding_window`` positions and the sequence's first ``num_sink_tokens`` are
    attended (StreamingLLM, Xiao et al. 2023; positions are not renumbered)."""

    kind: ClassVar[str] = "sink_window"
    num_sink_tokens: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("num_sink_tokens", self.num_sink_tokens)


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Positions of the query's own chunk of ``attention_chunk_size`` are attended (Llama 4)."""

    kind: ClassVar[str] = "chunked_local_attention"
    attention_chunk_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("attention_chunk_size", self.attention_chunk_size)


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(AttentionSpec):
    """Multi-head latent attention: one latent vector for each position, no separate V."""

    kind: ClassVar[str] = "mla_attention"
    num_kv_heads: int = 1
    head_size_v: int | None = 0


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """K and V of the encoder's output: fixed length ``max_encoder_len``, written once."""

    kind: ClassVar[str] = "cross_attention"
    max_encoder_len: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("max_encoder_len", self.max_encoder_len)

    def max_blocks_per_request(self, max_model_len: int) -> int:
        return ceil_div(self.max_encoder_len, self.block_size)


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Bidirectional attention over the step's own tokens: nothing is cached."""

    kind: ClassVar[str] = "encoder_only_attention"

    @property
    def page_size_bytes(self) -> int:
        return 0

    def max_blocks_per_request(self, max_model_len: int) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """A recurrent state (Mamba, gated delta net, short convolution) kept in blocks of the pool.

    ``shapes`` and ``dtypes`` list the state's tensors. Cache modes: ``none`` keeps one state a
    request; ``all`` keeps the state at each block boundary; ``align`` keeps the running state and
    the last one that ends on a block boundary.
    """

    kind: ClassVar[str] = "mamba"
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    page_size_padded: int | None = None
    cache_mode: MambaCacheMode = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.shapes) != len(self.dtypes):
            raise ConfigError(
                f"MambaSpec has {len(self.shapes)} shapes but {len(self.dtypes)} dtypes"
            )
        if self.cache_mode not in ("none", "all", "align"):
            raise ConfigError(f"cache_mode must be none, all or align, got {self.cache_mode!r}")
        if self.page_size_padded is not None and self.page_size_padded < self.real_page_size_bytes:
            raise ConfigError(
                f"page_size_padded {self.page_size_padded} is below the state's own "
                f"{self.real_page_size_bytes} bytes"
            )

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one state."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return sum(prod(shape) * dtype_bytes(dtype) for shape, dtype in pairs)

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.real_page_size_bytes

    def max_blocks_per_request(self, max_model_len: int) -> int:
        return 1 if self.cache_mode == "none" else ceil_div(max_model_len, self.block_size)


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table, and the spec they have in common."""

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_names", tuple(self.layer_names))


@dataclass(frozen=True)
class KVCacheConfig:
    """The whole KV cache of a model: one pool of ``num_blocks`` blocks (the null block included,
    so ``num_blocks - 1`` are usable) and the groups that draw on it."""

    num_blocks: int
    kv_cache_groups: tuple[KVCacheGroupSpec, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_cache_groups", tuple(self.kv_cache_groups))
        _positive("num_blocks", self.num_blocks)
        if self.num_blocks < 2:
            raise ConfigError(
                f"num_blocks is {self.num_blocks}, but block 0 is reserved: at least 2 are needed"
            )
        if not self.kv_cache_groups:
            raise ConfigError("a KV cache needs at least one group")
        static = sum(group.kv_cache_spec.static_blocks for group in self.kv_cache_groups)
        if static > self.num_blocks - 2:
            raise ConfigError(
                f"num_blocks is {self.num_blocks}: {static} hold attention sinks and block 0 is "
                "reserved, so no request has room"
            )

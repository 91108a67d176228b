"""From a model's configuration (the contents of ``config.json``) to what its layers cache.

The one place that knows how model families spell their layers. It takes a plain mapping, so the
planner can use it without loading a model; defaults that a ``config.json`` leaves out are the
reader's to fill in (``plan/config_reader.py`` asks transformers for them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from blocktable.core.config_fields import checked_fields
from blocktable.core.errors import ConfigError
from blocktable.core.grouping import Grouping, group_layers
from blocktable.core.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

LayerKind = Literal["full", "sliding", "chunked", "mamba", "delta", "conv", "hybrid", "none"]
LatentForm = Literal["latent", "expanded"]

_KINDS: dict[str, LayerKind] = {
    "full_attention": "full", "attention": "full", "global": "full", "*": "full",
    "global_attention": "full", "nope_attention": "full", "sliding_attention": "sliding",
    "sliding_window": "sliding", "local": "sliding", "local_attention": "sliding",
    "chunked_attention": "chunked", "linear_attention": "delta", "kda": "delta",
    "mamba": "mamba", "mamba2": "mamba", "recurrent": "mamba", "ssm": "mamba", "M": "mamba",
    "conv": "conv", "short_conv": "conv", "hybrid": "hybrid",
    "moe": "none", "mlp": "none", "-": "none", "E": "none",
}  # fmt: skip
_WITHOUT_GROUPED_QUERIES = {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "codegen"}
_ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model", "dim", "n_embed"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("kv_channels", "attention_head_dim", "d_kv"),
}


class ModelConfig:
    """A configuration's text part, with the names of all families for the same thing."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.values = checked_fields(_text_part(config))
        self.model_type = str(self.values.get("model_type", config.get("model_type", "unknown")))

    def get(self, name: str, default: Any = None) -> Any:
        """The field by its usual name or an alias; ``default`` where it is absent or null."""
        for spelling in (name, *_ALIASES.get(name, ())):
            value = self.values.get(spelling)
            if value is not None:
                return value
        return default

    def need(self, name: str) -> int:
        """A field that must be a positive integer; ConfigError names it."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"the configuration of {self.model_type!r} needs a positive {name}, got {value!r}"
            )
        return value

    @property
    def num_layers(self) -> int:
        if not self.get("num_hidden_layers"):
            for name in ("layers_block_type", "hybrid_override_pattern"):  # one entry a layer
                if self.get(name):
                    return len(self.get(name))
        return self.need("num_hidden_layers")

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the whole model: multi-query spelled in three ways, else as configured."""
        if self.get("multi_query") and not self.get("new_decoder_architecture"):
            groups = self.values.get("multi_query_group_num")
            return int(groups) if groups else 1
        value = self.get("num_key_value_heads")
        if self.model_type in _WITHOUT_GROUPED_QUERIES:
            value = None
        return self.need("num_key_value_heads") if value else self.need("num_attention_heads")

    @property
    def head_size(self) -> int:
        size = self.get("head_dim")
        if size:
            return int(size)
        return self.need("hidden_size") // self.need("num_attention_heads")


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in ("thinker_config", "text_config", "llm_config", "language_config", "decoder"):
        inner = config.get(name)
        if isinstance(inner, Mapping) and inner:
            merged = dict(config)
            merged.pop(name)
            merged.update({k: v for k, v in _text_part(inner).items() if v is not None})
            return merged
    return config


@dataclass(frozen=True)
class LayerSpec:
    """What one layer caches: ``spec`` in blocks of the pool, ``state`` once a request, or both."""

    name: str
    spec: AttentionSpec | None
    state: MambaSpec | None = None


def layer_kinds(config: ModelConfig) -> list[LayerKind]:
    """The kind of each layer, from whichever of the ways the family states it."""
    count = config.num_layers
    named = _listed_kinds(config, count)
    if named is not None:
        return named
    attending = config.get("attn_layer_indices")
    if attending is not None and _is_mamba(config):
        return ["full" if i in attending else "mamba" for i in range(count)]
    if config.model_type in ("mamba", "mamba2", "falcon_mamba"):
        return ["mamba"] * count
    if config.model_type == "falcon_h1":
        return ["hybrid"] * count
    period = config.get("attn_layer_period")
    if period:
        offset = config.get("attn_layer_offset", 0)
        return ["full" if i % period == offset % period else "mamba" for i in range(count)]
    interval = config.get("full_attention_interval")
    if interval:
        return ["full" if (i + 1) % interval == 0 else "delta" for i in range(count)]
    return _windowed_kinds(config, count)


def _listed_kinds(config: ModelConfig, count: int) -> list[LayerKind] | None:
    found: list[Any] | None = None
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern", "block_types"):
        value = config.get(name)
        if value:
            found = list(value)
            break
    if found is None and config.get("attn_type_list"):
        found = [
            "full_attention" if t else "linear_attention" for t in config.get("attn_type_list")
        ]
    if found is None:
        return None
    unknown = sorted({str(kind) for kind in found if kind not in _KINDS})
    if unknown:
        raise ConfigError(f"unknown layer types {', '.join(unknown)} in {config.model_type!r}")
    kinds = dict(_KINDS)
    if _is_mamba(config):  # some families call their Mamba layers linear attention
        kinds["linear_attention"] = "mamba"
    return [kinds[found[i % len(found)]] for i in range(count)]


def _is_mamba(config: ModelConfig) -> bool:
    names = ("mamba_d_state", "mamba_d_conv", "mamba_num_heads", "ssm_state_size")
    return any(config.get(name) for name in names)


def _windowed_kinds(config: ModelConfig, count: int) -> list[LayerKind]:
    if config.get("no_rope_layers") and config.get("attention_chunk_size"):
        rope = config.get("no_rope_layers")  # 1 where a layer has RoPE, and then it is chunked
        _one_a_layer("no_rope_layers", rope, count)
        return ["chunked" if rope[i] else "full" for i in range(count)]
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window", True) is False:
        return ["full"] * count
    default = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}.get(config.model_type)
    pattern = config.get("sliding_window_pattern", default)
    if pattern:
        return ["sliding" if (i + 1) % pattern else "full" for i in range(count)]
    first = config.get("max_window_layers", 0) if config.get("use_sliding_window") else 0
    return ["sliding" if i >= first else "full" for i in range(count)]


def _one_a_layer(name: str, values: Sequence[Any], count: int) -> None:
    if len(values) < count:
        raise ConfigError(f"{name} has {len(values)} entries for {count} layers")


def kv_heads_per_rank(num_kv_heads: int, tensor_parallel_size: int) -> int:
    """KV heads one rank holds; heads are replicated when there are fewer than ranks."""
    if tensor_parallel_size < 1:
        raise ConfigError(f"tensor_parallel_size must be positive, got {tensor_parallel_size}")
    if num_kv_heads % tensor_parallel_size == 0:
        return num_kv_heads // tensor_parallel_size
    if tensor_parallel_size % num_kv_heads == 0:
        return 1
    raise ConfigError(
        f"{num_kv_heads} KV heads cannot be spread over {tensor_parallel_size} ranks: "
        "one number must divide the other"
    )


def model_layers(
    config: Mapping[str, Any] | ModelConfig,
    *,
    block_size: int = 16,
    dtype: str = "bfloat16",
    tensor_parallel_size: int = 1,
    latent_form: LatentForm = "expanded",
    state_dtype: str | None = None,
    state_parallel_size: int | None = None,
) -> list[LayerSpec]:
    """What each layer of one rank caches, in order, layers that cache nothing left out.

    ``latent_form`` says how multi-head latent attention is kept: "expanded" as one K and one V
    vector a head (what transformers' models hand to attention, and this engine caches), "latent"
    as the compressed vector that engines with absorbed projections cache. ``dtype`` is the KV
    cache's, ``state_dtype`` (by default the same) that of recurrent states, which
    ``state_parallel_size`` ranks share (by default as many as share the heads).
    """
    fields = config if isinstance(config, ModelConfig) else ModelConfig(config)
    build = _Builder(
        fields, block_size, dtype, tensor_parallel_size, latent_form, state_dtype or dtype,
        tensor_parallel_size if state_parallel_size is None else state_parallel_size,
    )  # fmt: skip
    shared = int(fields.get("num_kv_shared_layers", 0))
    kinds = layer_kinds(fields)
    layers = []
    for index, kind in enumerate(kinds):
        reuses = index >= len(kinds) - shared  # reads the KV of an earlier layer (Gemma 3n)
        if kind != "none" and not reuses:
            layers.append(build.layer(index, kind))
    layers += build.cross_layers()
    if not layers:
        raise ConfigError(f"no layer of {fields.model_type!r} caches anything")
    return layers


@dataclass(frozen=True)
class _Builder:
    config: ModelConfig
    block_size: int
    dtype: str
    ranks: int
    latent_form: LatentForm
    state_dtype: str
    state_ranks: int

    def layer(self, index: int, kind: LayerKind) -> LayerSpec:
        name = f"layers.{index}"
        if kind in ("mamba", "delta", "conv"):
            return LayerSpec(name, None, self.state(kind))
        if kind == "hybrid":
            return LayerSpec(name, self.attention("full", index), self.state("mamba"))
        return LayerSpec(name, self.attention(kind, index))

    def attention(self, kind: LayerKind, index: int) -> AttentionSpec:
        config = self.config
        if config.get("kv_lora_rank") and kind == "full":
            return self._latent()
        heads, size = config.num_kv_heads, config.head_size
        if kind == "full" and config.get("global_head_dim"):  # Gemma 4: global layers are wider
            size = int(config.get("global_head_dim"))
            if config.get("attention_k_eq_v"):
                heads = int(config.get("num_global_key_value_heads", heads))
        per_layer = config.get("num_key_value_heads_per_layer")
        if per_layer:
            _one_a_layer("num_key_value_heads_per_layer", per_layer, config.num_layers)
            heads = int(per_layer[index])
        shape: dict[str, Any] = {
            "block_size": self.block_size, "dtype": self.dtype, "head_size": size,
            "num_kv_heads": kv_heads_per_rank(heads, self.ranks),
        }  # fmt: skip
        if config.get("v_head_dim") and config.get("head_dim"):
            shape["head_size_v"] = int(config.get("v_head_dim"))
        if kind == "sliding":
            return SlidingWindowSpec(**shape, sliding_window=config.need("sliding_window"))
        if kind == "chunked":
            chunk = config.need("attention_chunk_size")
            return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=chunk)
        return FullAttentionSpec(**shape)

    def _latent(self) -> AttentionSpec:
        config = self.config
        rope = config.need("qk_rope_head_dim")
        if self.latent_form == "latent":
            size = config.need("kv_lora_rank") + rope
            return MLAAttentionSpec(block_size=self.block_size, head_size=size, dtype=self.dtype)
        return FullAttentionSpec(
            block_size=self.block_size,
            dtype=self.dtype,
            num_kv_heads=kv_heads_per_rank(config.need("num_attention_heads"), self.ranks),
            head_size=config.need("qk_nope_head_dim") + rope,
            head_size_v=config.need("v_head_dim"),
        )

    def state(self, kind: LayerKind) -> MambaSpec:
        shapes = {"delta": self._delta, "conv": self._conv}.get(kind, self._mamba)()
        dtypes = (self.state_dtype,) * len(shapes)
        return MambaSpec(block_size=self.block_size, shapes=shapes, dtypes=dtypes)

    def _share(self, name: str, value: int) -> int:
        if value % self.state_ranks:
            raise ConfigError(f"{name} {value} cannot be spread over {self.state_ranks} ranks")
        return value // self.state_ranks

    def _mamba(self) -> tuple[tuple[int, ...], ...]:
        """Convolution window and state-space state; Mamba 2 has heads, Mamba 1 has not."""
        config = self.config
        width = int(config.get("mamba_d_conv", config.get("conv_kernel", 4)))
        expand = config.get("mamba_expand", config.get("expand", 2))
        inner = config.get("mamba_d_ssm") or config.get("intermediate_size_mamba")
        heads = config.get("mamba_n_heads") or config.get("mamba_num_heads")
        size = config.get("mamba_d_head") or config.get("mamba_head_dim")
        if config.model_type == "mamba2":
            heads, size = config.get("num_attention_heads"), config.get("head_dim")
        if not inner and heads and isinstance(size, int):
            inner = heads * size
        inner = int(inner or expand * config.need("hidden_size"))
        depth = config.get("mamba_d_state") or config.get("ssm_state_size")
        depth = int(depth or config.get("state_size", 16))
        if heads:
            heads = int(heads)
            groups = config.get("mamba_n_groups") or config.get("mamba_ngroups")
            groups = int(groups or config.get("n_groups", 1))
            channels = self._share("Mamba channels", inner + 2 * groups * depth)
            split = self._share("Mamba heads", heads)
            return (channels, width), (split, inner // heads, depth)
        inner = self._share("Mamba channels", inner)
        return (inner, width), (inner, depth)

    def _delta(self) -> tuple[tuple[int, ...], ...]:
        """Convolution window and matrix state of a gated delta net."""
        config = self.config
        nested = config.get("linear_attn_config")
        if isinstance(nested, Mapping):  # Kimi: three convolutions, heads of one size
            inner = ModelConfig(nested)
            heads, size = self._share("heads", inner.need("num_heads")), inner.need("head_dim")
            conv = (heads * size, int(inner.get("short_conv_kernel_size", 4)))
            return conv, conv, conv, (heads, size, size)
        if not config.get("linear_num_value_heads"):
            heads = self._share("heads", config.need("num_attention_heads"))
            return ((heads, config.head_size, config.head_size),)
        k_heads, v_heads = (
            config.need("linear_num_key_heads"),
            config.need("linear_num_value_heads"),
        )
        k_size, v_size = config.need("linear_key_head_dim"), config.need("linear_value_head_dim")
        channels = 2 * k_heads * k_size + v_heads * v_size
        conv = (self._share("channels", channels), config.need("linear_conv_kernel_dim"))
        return conv, (self._share("value heads", v_heads), k_size, v_size)

    def _conv(self) -> tuple[tuple[int, ...], ...]:
        config = self.config
        width = int(config.get("conv_L_cache", config.get("conv_kernel", 3)))
        return ((self._share("channels", config.need("hidden_size")), width),)

    def cross_layers(self) -> list[LayerSpec]:
        config = self.config
        if not config.get("is_encoder_decoder"):
            return []
        length = config.get("max_source_positions") or config.need("max_position_embeddings")
        spec = CrossAttentionSpec(
            block_size=self.block_size,
            dtype=self.dtype,
            num_kv_heads=kv_heads_per_rank(config.num_kv_heads, self.ranks),
            head_size=config.head_size,
            max_encoder_len=int(length),
        )
        return [LayerSpec(f"layers.{i}.cross", spec) for i in range(config.num_layers)]


def group_model(layers: list[LayerSpec]) -> Grouping:
    """The groups of a model's attention layers and their memories (see `core.grouping`).

    Recurrent states are not in blocks of the pool (see `LayerSpec.state`).
    """
    attending = [(layer.name, layer.spec) for layer in layers if layer.spec is not None]
    return group_layers([name for name, _ in attending], [spec for _, spec in attending])


def state_bytes(layers: list[LayerSpec]) -> int:
    """Bytes of the recurrent states of one request."""
    return sum(layer.state.page_size_bytes for layer in layers if layer.state is not None)

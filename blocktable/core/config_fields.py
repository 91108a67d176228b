"""Whether a model configuration's fields are of the kind that `model_specs` reads them as.

A ``config.json`` is written by hand, by converters and by other people's code. What is absent or
null is left to the reader's defaults; anything else that is not a number, or no list, where one is
meant, is refused here by name, before it becomes a wrong plan or an error about Python types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blocktable.core.errors import ConfigError

MOST = 1 << 40
MOST_LAYERS = 100_000

NUMBERS = (
    "attention_chunk_size", "attention_head_dim", "attn_layer_offset", "attn_layer_period",
    "conv_L_cache", "conv_kernel", "d_kv", "d_model", "decoder_attention_heads", "decoder_layers",
    "dim", "expand", "full_attention_interval", "global_head_dim", "head_dim", "hidden_size",
    "intermediate_size_mamba", "kv_channels", "kv_lora_rank", "linear_conv_kernel_dim",
    "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "linear_value_head_dim", "mamba_d_conv", "mamba_d_head", "mamba_d_ssm", "mamba_d_state",
    "mamba_expand", "mamba_head_dim", "mamba_n_groups", "mamba_n_heads", "mamba_ngroups",
    "mamba_num_heads", "max_position_embeddings", "max_source_positions", "max_window_layers",
    "multi_query_group_num", "n_embd", "n_embed", "n_groups", "n_head", "n_head_kv", "n_heads",
    "n_layer", "n_layers", "num_attention_heads", "num_global_key_value_heads", "num_heads",
    "num_hidden_layers", "num_key_value_heads", "num_kv_heads", "num_kv_shared_layers",
    "num_layers", "qk_nope_head_dim", "qk_rope_head_dim", "short_conv_kernel_size",
    "sliding_window", "sliding_window_pattern", "ssm_state_size", "state_size", "v_head_dim",
    "vocab_size",
)  # fmt: skip
LAYER_COUNTS = {"decoder_layers", "n_layer", "n_layers", "num_hidden_layers", "num_layers"}
NUMBER_LISTS = ("attn_layer_indices", "num_key_value_heads_per_layer")
NAME_LISTS = ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern")
FLAG_LISTS = ("attn_type_list", "no_rope_layers")


def checked_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, whole numbers as integers. Raises ConfigError, naming field and value."""
    found = dict(values)
    for name in NUMBERS:
        if found.get(name) is not None:
            most = MOST_LAYERS if name in LAYER_COUNTS else MOST
            found[name] = _number(name, found[name], most)
    if found.get("intermediate_size") is not None:
        _sizes(found["intermediate_size"])
    for name in NUMBER_LISTS:
        for value in _entries(name, found.get(name)):
            _number(name, value, MOST)
    for name in NAME_LISTS:
        for value in _entries(name, found.get(name)):
            if not isinstance(value, str):
                raise _wrong(name, value, "names of layer types")
    for name in FLAG_LISTS:
        _entries(name, found.get(name))
    return found


def _number(name: str, value: Any, most: int) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, value, "an integer")
    if not 0 <= value <= most:
        raise _wrong(name, value, f"within 0 .. {most}")
    return value


def _sizes(value: Any) -> None:
    entries = value if isinstance(value, list) and value else [value]
    for entry in entries:
        _number("intermediate_size", entry, MOST)


def _entries(name: str, value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, str) and name == "hybrid_override_pattern":
        return list(value)
    if not isinstance(value, list | tuple):
        raise _wrong(name, value, "a list")
    return list(value)


def _wrong(name: str, value: Any, wanted: str) -> ConfigError:
    shown = repr(value)
    return ConfigError(
        f"the configuration's {name} must be {wanted}, got {shown[:60] + '...' * (len(shown) > 60)}"
    )

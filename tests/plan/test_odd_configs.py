"""Configurations with fields that are missing, null, of another type or absurd; and hybrid and
latent models by hand."""

import json
from itertools import product
from typing import Any

import pytest

from blocktable.core.errors import ConfigError, LoadError
from blocktable.plan import as_json, plan

GIB = 1 << 30
BASE = {
    "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "plain": BASE | {"head_dim": 64},
    "window": BASE | {"sliding_window": 256,
                      "layer_types": ["sliding_attention", "full_attention"]},
    "chunked": BASE | {"no_rope_layers": [1, 1, 1, 0] * 2, "attention_chunk_size": 512},
    "latent": BASE | {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 16,
                      "qk_nope_head_dim": 32, "v_head_dim": 32},
    "mamba": BASE | {"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 16,
                     "mamba_d_conv": 4, "mamba_expand": 2},
    "delta": BASE | {"full_attention_interval": 4, "linear_num_value_heads": 8,
                     "linear_num_key_heads": 4, "linear_key_head_dim": 32,
                     "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4},
}  # fmt: skip
ODD = [
    None, 0, -3, 2.5, "8", "x", True, [], [0], {}, 10**30, float("nan"), float("inf"),
    [None] * 8, ["x"] * 3,
]  # fmt: skip


def planned(values: dict[str, Any], **options: Any):
    given: dict[str, Any] = {"weight_bytes": GIB, "requests": 4, "gpu": "h200"}
    return plan({"model_type": "unheard_of"} | values, **(given | options))


@pytest.mark.parametrize("kind", KINDS)
def test_odd_fields_are_refused_by_name_or_understood(kind):
    """Every field with every odd value, and without it: an error of ours or a sound plan."""
    for field, value in product(KINDS[kind], ["absent", *ODD]):
        values = dict(KINDS[kind]) | {field: value}
        if value == "absent":
            del values[field]
        for form in ("expanded", "latent"):
            try:
                made = planned(values, latent_form=form)
            except (ConfigError, LoadError) as error:
                assert str(error)
                continue
            json.loads(as_json(made))
            assert made.bytes_per_token >= 0 and made.block_bytes >= 0 and made.num_blocks >= 2
            assert made.context >= 1 and made.request_blocks >= 0


def test_a_latent_model_by_hand():
    """DeepSeek-V3: 61 layers, a latent vector of 512 + 64, or 128 heads of 192 and 128."""
    values = BASE | {
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "max_position_embeddings": 163_840,
    }  # fmt: skip
    latent = planned(values, latent_form="latent", block_size=64, activation_bytes=0)
    assert latent.bytes_per_token == (512 + 64) * 2 * 61 == 70_272
    assert latent.block_bytes == 64 * 70_272
    assert latent.request_blocks == 163_840 // 64 == 2560
    assert latent.num_blocks == (int(141 * GIB * 0.9) - GIB) // (64 * 70_272)
    expanded = planned(values, activation_bytes=0)
    assert expanded.bytes_per_token == 128 * (192 + 128) * 2 * 61 == 4_997_120
    halved = planned(values, activation_bytes=0, tensor_parallel_size=8)
    assert halved.bytes_per_token * 8 == expanded.bytes_per_token
    ranks = planned(values, latent_form="latent", activation_bytes=0, tensor_parallel_size=8)
    assert ranks.bytes_per_token == 70_272  # the latent vector is every rank's


def test_a_hybrid_model_by_hand():
    """Two attention layers of 4 heads of 64; six gated delta nets, each a state and a window."""
    made = planned(KINDS["delta"], context=4096, activation_bytes=0)
    assert made.bytes_per_token == 2 * 4 * 2 * 64 * 2 == 2048
    assert made.request_blocks == 256 and made.block_bytes == 16 * 2048
    recurrent = 8 * 32 * 32
    convolution = (2 * 4 * 32 + 8 * 32) * 4
    assert made.state_bytes_per_request == 6 * (recurrent + convolution) * 2 == 122_880
    free = int(141 * GIB * 0.9) - GIB - 4 * made.state_bytes_per_request
    assert made.num_blocks == free // made.block_bytes


def test_a_window_model_by_hand():
    """Full and windowed layers, four each: they share pages, a block costs four layers' worth."""
    made = planned(KINDS["window"], context=4096, activation_bytes=0)
    assert [(group.kind, group.num_layers) for group in made.groups] == [
        ("sliding_window", 4), ("full_attention", 4),
    ]  # fmt: skip
    assert made.block_bytes == 4 * 16 * 4 * 2 * 64 * 2
    window, full = made.groups
    assert full.blocks_per_request == 256
    assert window.blocks_per_request == 256 // 16 + 1  # it may begin inside a block
    assert made.request_blocks == 256 + 17

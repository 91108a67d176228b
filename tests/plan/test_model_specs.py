"""Configurations of model families become the specs their layers need."""

from collections import Counter

import pytest

from blocktable.core.errors import ConfigError
from blocktable.core.model_specs import (
    ModelConfig,
    group_model,
    kv_heads_per_rank,
    layer_kinds,
    model_layers,
    state_bytes,
)

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip


def shapes(config, **options):
    """(kind, layers, KV heads, K size, V size) of the groups, those of one kind together."""
    groups = group_model(model_layers(config, **options)).groups
    counts = Counter()
    for group in groups:
        s = group.kv_cache_spec
        counts[s.kind, s.num_kv_heads, s.head_size, s.head_size_v] += len(group.layer_names)
    return [(kind, count, *rest) for (kind, *rest), count in counts.items()]


def test_plain_models():
    assert shapes(LLAMA) == [("full_attention", 32, 8, 128, None)]
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12}
    assert shapes(gpt2) == [("full_attention", 12, 12, 64, None)]
    falcon = {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 2,
              "num_attention_heads": 71, "multi_query": True}  # fmt: skip
    assert shapes(falcon) == [("full_attention", 2, 1, 64, None)]
    falcon |= {"new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 64,
               "hidden_size": 4096}  # fmt: skip
    assert shapes(falcon) == [("full_attention", 2, 8, 64, None)]


def test_windows_are_found_however_they_are_spelled():
    assert shapes(LLAMA | {"sliding_window": 4096})[0][:2] == ("sliding_window", 32)
    assert shapes(LLAMA | {"sliding_window": 4096, "use_sliding_window": False})[0][1] == 32
    qwen2 = LLAMA | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 28}
    assert [s[:2] for s in shapes(qwen2)] == [("full_attention", 28), ("sliding_window", 4)]
    gemma = LLAMA | {"sliding_window": 1024, "sliding_window_pattern": 6}
    assert [s[:2] for s in shapes(gemma)] == [("sliding_window", 27), ("full_attention", 5)]
    listed = LLAMA | {"num_hidden_layers": 4, "sliding_window": 8,
                      "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
    assert [s[:2] for s in shapes(listed)] == [("sliding_window", 2), ("full_attention", 2)]
    llama4 = LLAMA | {"num_hidden_layers": 4, "attention_chunk_size": 8192,
                      "no_rope_layers": [1, 1, 1, 0]}  # fmt: skip
    assert [s[:2] for s in shapes(llama4)] == [
        ("chunked_local_attention", 3), ("full_attention", 1),
    ]  # fmt: skip


def test_latent_attention_in_both_forms():
    config = {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
              "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
              "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}  # fmt: skip
    assert shapes(config) == [("full_attention", 61, 128, 192, 128)]
    latent = group_model(model_layers(config, latent_form="latent", tensor_parallel_size=8)).groups
    spec = latent[0].kv_cache_spec
    assert (spec.kind, spec.head_size, spec.bytes_per_token) == ("mla_attention", 576, 1152)


def test_recurrent_layers_have_a_state_and_no_blocks():
    jamba = LLAMA | {"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 4,
                     "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}  # fmt: skip
    layers = model_layers(jamba)
    assert [layer.spec is not None for layer in layers] == [i % 8 == 4 for i in range(32)]
    assert state_bytes(layers) == 28 * (8192 * 4 + 8192 * 16) * 2
    hybrid = LLAMA | {"model_type": "falcon_h1", "mamba_n_heads": 8, "mamba_d_head": 64,
                      "mamba_d_state": 16, "mamba_n_groups": 2}  # fmt: skip
    both = model_layers(hybrid)[0]
    assert both.spec is not None and both.state.shapes == ((512 + 64, 4), (8, 64, 16))
    delta = LLAMA | {"full_attention_interval": 4, "linear_num_value_heads": 32,
                     "linear_num_key_heads": 16, "linear_key_head_dim": 128,
                     "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}  # fmt: skip
    assert layer_kinds(ModelConfig(delta)).count("full") == 8
    assert model_layers(delta, tensor_parallel_size=2)[0].state.shapes == (
        (4096, 4), (16, 128, 128),
    )  # fmt: skip
    conv = LLAMA | {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    assert model_layers(conv)[0].state.shapes == ((4096, 3),)


def test_text_part_of_a_multimodal_model_and_shared_layers():
    nested = {"model_type": "x_vl", "hidden_size": 1, "text_config": LLAMA}
    assert shapes(nested) == shapes(LLAMA)
    assert shapes(LLAMA | {"num_kv_shared_layers": 10})[0][1] == 22


def test_cross_attention_has_the_encoders_length():
    whisper = {"model_type": "whisper", "d_model": 384, "decoder_layers": 4, "num_hidden_layers": 4,
               "decoder_attention_heads": 6, "is_encoder_decoder": True,
               "max_source_positions": 1500, "max_target_positions": 448}  # fmt: skip
    groups = group_model(model_layers(whisper, block_size=32)).groups
    assert [g.kv_cache_spec.kind for g in groups] == ["full_attention", "cross_attention"]
    assert groups[1].kv_cache_spec.max_blocks_per_request(448) == 47


def test_heads_are_split_or_replicated_or_refused():
    assert [kv_heads_per_rank(8, n) for n in (1, 2, 8, 16)] == [8, 4, 1, 1]
    with pytest.raises(ConfigError, match="3 KV heads cannot be spread over 2 ranks"):
        kv_heads_per_rank(3, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"layer_types": ["hyperbolic"] * 32}, "hyperbolic"),
        ({"layer_types": ["mlp"] * 32}, "caches anything"),
    ],
)
def test_configurations_that_cannot_be_understood(change, message):
    with pytest.raises(ConfigError, match=message):
        model_layers(LLAMA | change)

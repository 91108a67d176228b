"""What a tensor-parallel plan leaves on a rank."""

import pytest

from blocktable.core.split_plan import is_split, splits_heads, style_of

LLAMA = {
    "layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "lm_head": "colwise_gather_output",
}  # fmt: skip
EXPERTS = {
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts": "moe_tp_experts",
}


@pytest.mark.parametrize(
    ("plan", "split"),
    [
        (LLAMA, True),
        ({"layers.*.attention.query_key_value": "colwise"}, True),
        ({"layers.*.self_attn.qkv_proj": "colwise_gather_output"}, False),
        ({"layers.*.self_attn.k_proj": "colwise_gather_output"}, False),
        ({"layers.*.self_attn.o_proj": "rowwise", "layers.*.mlp.up_proj": "colwise"}, False),
        (EXPERTS, False), ({}, False),
    ],
)  # fmt: skip
def test_heads_are_a_ranks_own_only_where_nothing_gathers_them(plan, split):
    assert splits_heads(plan) == split


@pytest.mark.parametrize(
    ("weight", "split"),
    [
        ("layers.7.self_attn.q_proj.weight", True), ("layers.7.self_attn.q_proj.bias", True),
        ("layers.7.self_attn.o_proj.weight", True), ("layers.7.self_attn.o_proj.bias", False),
        ("layers.7.self_attn.q_norm.weight", False), ("layers.7.input_layernorm.weight", False),
        ("lm_head.weight", True), ("embed_tokens.weight", False),
        ("layers.12.mlp.experts.gate_up_proj", True), ("layers.12.mlp.experts.scale", False),
    ],
)  # fmt: skip
def test_which_weights_are_split(weight, split):
    assert is_split(weight, LLAMA | EXPERTS) == split


def test_a_layers_index_is_any_number():
    assert style_of("layers.103.self_attn.o_proj", LLAMA) == "rowwise"
    assert style_of("layers.self_attn.o_proj", LLAMA) is None


@pytest.mark.parametrize("name", ["fc1", "fc2", "dense_h_to_4h", "w13"])
def test_digits_within_a_name_are_part_of_it(name):
    plan = {f"layers.*.mlp.{name}": "colwise"}
    assert style_of(f"layers.12.mlp.{name}", plan) == "colwise"
    assert is_split(f"layers.12.mlp.{name}.bias", plan)

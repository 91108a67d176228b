"""Tiny random models of many architectures, from their configs. Float32, 2 to 6 layers, 96 ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

VOCAB = 96
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
_MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN_MOE: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
}  # fmt: skip
_WINDOW: dict[str, Any] = {"sliding_window": 8}
_MIXED = ["sliding_attention", "full_attention"]
_MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_chunk_size": 8}  # fmt: skip


def _config(name: str, **fields: Any) -> Callable[[], Any]:
    return lambda: getattr(hf, name)(**{**_BASE, **fields})


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _config("LlamaConfig"),
    "mistral": _config("MistralConfig", **_WINDOW),
    "qwen2": _config("Qwen2Config"),
    "qwen3": _config("Qwen3Config", head_dim=12),
    "phi": _config("PhiConfig", partial_rotary_factor=0.5),
    "phi3": _config("Phi3Config", **_WINDOW),
    "gemma": _config("GemmaConfig", head_dim=8),
    "gemma2": _config(
        "Gemma2Config", head_dim=8, query_pre_attn_scalar=8, layer_types=_MIXED, **_WINDOW
    ),
    "gemma3": _config(
        "Gemma3TextConfig", head_dim=8, query_pre_attn_scalar=8, num_hidden_layers=3,
        layer_types=[*_MIXED, "sliding_attention"], **_WINDOW,
    ),
    "gpt_oss": _config("GptOssConfig", head_dim=8, layer_types=_MIXED, **_WINDOW, **_MOE),
    "mixtral": _config("MixtralConfig", **_MOE),
    "qwen3_moe": _config("Qwen3MoeConfig", head_dim=8, **_QWEN_MOE),
    "olmo2": _config("Olmo2Config"),
    "olmo3": _config("Olmo3Config", layer_types=_MIXED, **_WINDOW),
    "granite": _config("GraniteConfig", attention_multiplier=0.4),
    "cohere2": _config("Cohere2Config", layer_types=_MIXED, **_WINDOW),
    "smollm3": _config("SmolLM3Config", no_rope_layers=[1, 0]),
    "glm4": _config("Glm4Config", head_dim=8),
    "starcoder2": _config("Starcoder2Config", **_WINDOW),
    "exaone4": _config("Exaone4Config", layer_types=_MIXED, **_WINDOW),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCAB, n_positions=512, n_embd=32, n_layer=2, n_head=4, bos_token_id=1,
        eos_token_id=2, initializer_range=0.3,
    ),
    "gpt_neox": _config("GPTNeoXConfig"),
    "opt": lambda: hf.OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, word_embed_proj_dim=32, init_std=0.3,
    ),
    "deepseek_v3": _config(
        "DeepseekV3Config", num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, n_routed_experts=4, n_group=2,
        topk_group=1, num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1,
        n_shared_experts=1,
    ),
    "llama4": _config(
        "Llama4TextConfig", head_dim=8, num_hidden_layers=4, attention_chunk_size=8,
        intermediate_size_mlp=48, interleave_moe_layer_step=2, **_MOE,
    ),
}  # fmt: skip
"""Attention in every layer."""

HYBRID_CONFIGS: dict[str, Callable[[], Any]] = {
    "mamba2": lambda: hf.Mamba2Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8,
        state_size=8, expand=2, n_groups=1, chunk_size=8, eos_token_id=2, initializer_range=0.3,
    ),
    "mamba": lambda: hf.MambaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8, eos_token_id=2,
        initializer_range=0.3,
    ),
    "jamba": _config(
        "JambaConfig", attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1,
        expert_layer_period=2, num_experts=4, mamba_d_state=8, mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "bamba": _config("BambaConfig", attn_layer_indices=[1], **_MAMBA2),
    "falcon_h1": _config("FalconH1Config", head_dim=8, mamba_d_ssm=64, **_MAMBA2),
    "granitemoehybrid": _config(
        "GraniteMoeHybridConfig", layer_types=["mamba", "attention"], shared_intermediate_size=48,
        **_MOE, **_MAMBA2,
    ),
    "lfm2": _config("Lfm2Config", layer_types=["conv", "full_attention"], conv_L_cache=3),
    "qwen3_next": _config(
        "Qwen3NextConfig", head_dim=8, layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, shared_expert_intermediate_size=24, **_QWEN_MOE,
    ),
    "qwen3_5": _config(
        "Qwen3_5TextConfig", head_dim=8, layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
}  # fmt: skip
"""Layers with a state of their own, some beside attention."""

REFUSED_CONFIGS: dict[str, Callable[[], Any]] = {
    "falcon": _config("FalconConfig", alibi=False),
    "bloom": lambda: hf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=512,
    ),
    "stablelm": _config("StableLmConfig"),
    "doge": _config("DogeConfig"),
}  # fmt: skip
"""Attention that does not go through the interface, drops its arguments or has masks of its own."""


def tiny_model(name: str, seed: int = 0, **fields: Any) -> Any:
    """A random float32 model in eval mode, the same for the same seed; ``fields`` replace those of
    its config."""
    config = {**CONFIGS, **HYBRID_CONFIGS, **REFUSED_CONFIGS}[name]()
    config.update(fields)
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model

"""Shapes of real models, for benchmarks that make their weights at random."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "family": "Qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": True,
    },
    "llama3-8b": {
        "family": "Llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": False,
    },
    "tiny": {
        "family": "Llama", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 64, "tie_word_embeddings": False,
    },
}  # fmt: skip


def model_classes(fields: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """transformers' config class and model class of a shape, and the config's fields."""
    import transformers

    rest = dict(fields)
    family = rest.pop("family")
    config_class = getattr(transformers, f"{family}Config")
    return config_class, getattr(transformers, f"{family}ForCausalLM"), rest

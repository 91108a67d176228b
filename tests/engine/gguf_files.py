"""Writing small GGUF files from tiny models, as llama.cpp's converter would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray


def permuted(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """What the converter does to a llama's q and k: rotary pairs side by side."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_model(path: Path, arch: str, model: Any, quant: str = "F32") -> None:
    """A llama, qwen2, qwen3 or gemma2 model with a byte-level tokenizer of its size."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    if arch in ("gemma2", "qwen3"):
        writer.add_key_length(head_dim)
    if arch == "gemma2":
        writer.add_sliding_window(config.sliding_window)
    write_vocabulary(writer, config.vocab_size)
    _write_tensors(writer, arch, model, quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_vocabulary(writer: Any, size: int) -> None:
    """Printable bytes as tokens, one merge, three control tokens in front."""
    tokens = ["<unk>", "<s>", "</s>"] + [chr(c) for c in range(33, 33 + size - 4)] + ["ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (size - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _write_tensors(writer: Any, arch: str, model: Any, quant: str) -> None:
    config = model.config
    names = gguf.get_tensor_name_map(
        {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, leaf = name.rpartition(".")
        values = tensor.numpy().astype(np.float32)
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = permuted(values, heads)
        if arch == "gemma2" and name.endswith("norm.weight"):
            values = values + 1
        target = f"{names.get_name(stem)}.{leaf}"
        fits = values.ndim == 2 and values.shape[1] % 32 == 0
        kind = gguf.GGMLQuantizationType[quant if fits else "F32"]
        writer.add_tensor(target, gguf.quantize(values, kind), raw_dtype=kind)


def write_mamba(path: Path, model: Any) -> None:
    """A Mamba model, whose architecture the one-pass reader leaves to transformers."""
    config = model.config
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(1 << 10)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(config.time_step_rank)
    writer.add_ssm_inner_size(config.intermediate_size)
    writer.add_vocab_size(config.vocab_size)
    write_vocabulary(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MAMBA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        stem, dot, leaf = name.rpartition(".")
        values = tensor.numpy().astype(np.float32)
        if name.endswith("A_log"):
            values = -np.exp(values)
        if name.endswith("conv1d.weight"):
            values = values[:, 0]
        if leaf in ("weight", "bias"):
            target = f"{names.get_name(stem)}{dot}{leaf}"
        else:
            target = str(names.get_name(name))
        writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

"""From a GGUF file to a ready transformers model, in one pass.

The config comes from the file's metadata through transformers' own table of key names, the tensor
names through gguf-py's, and what llama.cpp's converter did to the values (rotary permutation, norms
stored as ``w + 1``) is undone here for the common architectures and by transformers' processors for
the others. Only the reading differs: each tensor is de-quantised once, straight into the state
dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import LoadError
from blocktable.engine.loader.gguf_dequant import dequantize
from blocktable.engine.loader.gguf_file import GGUFFile

if TYPE_CHECKING:
    import torch

_HF_TYPES = {
    "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "gemma3": "gemma3_text",
    "minimax-m2": "minimax_m2",
}  # fmt: skip
"""llama.cpp's architecture names that differ from transformers' model types."""

_UNCHANGED = {"qwen2", "qwen3", "phi3", "starcoder2"}
_PERMUTED = {"llama", "mistral"}
_NORM_OFFSET = {"gemma2", "gemma3", "nemotron"}

_KNOWN = _UNCHANGED | _PERMUTED | _NORM_OFFSET
"""Architectures whose changes are undone here."""

_READ_HERE = _KNOWN | {"qwen2moe", "qwen3moe", "gpt2"}
"""Those that are read here, with transformers' processors where they need one. The configs of all
others take more than renaming keys: they load through transformers, slower."""

_THREADS = 2


def gguf_config(file: GGUFFile) -> Any:
    """The transformers config of the file's model; LoadError for an architecture without one."""
    from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    arch = file.architecture
    model_type = _HF_TYPES.get(arch, arch)
    names = GGUF_CONFIG_MAPPING.get(model_type.removesuffix("_text")) or GGUF_CONFIG_MAPPING.get(
        arch
    )
    if names is None:
        raise LoadError(f"{file.path}: no model is known for GGUF architecture {arch!r}")
    fields: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(model_type, {}))
    for key, name in names.items():
        if name not in (None, -1) and f"{arch}.{key}" in file.metadata:
            fields[name] = file.metadata[f"{arch}.{key}"]
    for field, key in (
        ("bos_token_id", "bos"),
        ("eos_token_id", "eos"),
        ("pad_token_id", "padding"),
    ):
        fields[field] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise LoadError(f"{file.path} holds no tensor token_embd.weight")
    fields["vocab_size"] = embedding.shape[0]
    fields["tie_word_embeddings"] = "output.weight" not in file.tensors
    fields.update(_rope_scaling(file, arch))
    fields.update(_gemma_scale(arch, fields))
    return _build_config(model_type, fields, file)


def _rope_scaling(file: GGUFFile, arch: str) -> dict[str, Any]:
    """The linear or YaRN stretch the file states, in transformers' words."""
    prefix = f"{arch}.rope.scaling."
    kind, factor = file.metadata.get(prefix + "type"), file.metadata.get(prefix + "factor")
    if kind not in ("linear", "yarn") or not factor:
        return {}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    original = file.metadata.get(prefix + "original_context_length")
    if kind == "yarn" and original:
        scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}


def _gemma_scale(arch: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Gemma's query scale, which no file states: that of the head size, but for the 27B models
    (46 layers in Gemma 2, 62 in Gemma 3) that of hidden size over heads."""
    if arch not in ("gemma2", "gemma3") or "head_dim" not in fields:
        return {}
    largest = fields.get("num_hidden_layers") == (46 if arch == "gemma2" else 62)
    wide = fields["hidden_size"] // fields["num_attention_heads"]
    return {"query_pre_attn_scalar": wide if largest else fields["head_dim"]}


def _build_config(model_type: str, fields: dict[str, Any], file: GGUFFile) -> Any:
    if model_type == "llama":  # the auto tables cost 0.2 s of imports; the default needs none
        from transformers.models.llama.configuration_llama import LlamaConfig as config_class
    else:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        try:
            config_class = CONFIG_MAPPING[model_type]
        except KeyError:
            raise LoadError(f"{file.path}: transformers has no model {model_type!r}") from None
    head_dim = file.metadata.get(f"{file.architecture}.attention.key_length")
    if head_dim and "head_dim" not in fields and hasattr(config_class(), "head_dim"):
        fields["head_dim"] = head_dim
    try:
        return config_class(**fields)
    except (TypeError, ValueError) as error:
        raise LoadError(f"{file.path}: bad metadata for {model_type}: {error}") from error


def gguf_model(file: GGUFFile, dtype: torch.dtype) -> Any:
    """The model with its weights, in ``dtype``, on the CPU; LoadError where tensors are missing."""
    import torch

    if file.architecture not in _READ_HERE:
        return _read_by_transformers(file, dtype)
    config = gguf_config(file)
    model_class = _model_class(config, file)
    with torch.device("meta"):
        skeleton = model_class(config)
    state = _state_dict(file, skeleton, config, dtype)
    missing = set(skeleton.state_dict()) - set(state) - set(skeleton._tied_weights_keys or ())
    if missing:
        raise LoadError(f"{file.path} lacks {len(missing)} tensors, {min(missing)} first")
    model = _assembled(skeleton, state, dtype)
    if model is None:
        model = _by_transformers(model_class, config, state, dtype)
    _apply_rope_factors(model, file)
    return model.eval()


def _read_by_transformers(file: GGUFFile, dtype: torch.dtype) -> Any:
    """transformers' own GGUF loading, with its errors in one line."""
    from transformers import AutoModelForCausalLM

    from blocktable.engine.loader.hub import one_line

    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(file.path.parent), gguf_file=file.path.name, dtype=dtype, local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, NotImplementedError) as error:
        raise LoadError(
            f"{file.path}: architecture {file.architecture!r} cannot be loaded: {one_line(error)}"
        ) from error
    return model.eval()


def _assembled(skeleton: Any, state: dict[str, torch.Tensor], dtype: torch.dtype) -> Any | None:
    """The meta model with the state's tensors put in place; None where that is not all of it.

    ``from_pretrained`` does the same and compiles 1,184 patterns for renaming keys on the way
    (0.3 s). Buffers that no file holds are those of rotary embeddings, which are made anew.
    """
    skeleton.load_state_dict(state, strict=False, assign=True)
    skeleton.tie_weights()
    for name, module in list(skeleton.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            if "Rotary" not in type(module).__name__ or not hasattr(module, "config"):
                return None
            skeleton.set_submodule(name, type(module)(module.config))
    if any(parameter.is_meta for parameter in skeleton.parameters()):
        return None
    skeleton.config.dtype = dtype
    return skeleton


def _by_transformers(
    model_class: Any, config: Any, state: dict[str, torch.Tensor], dtype: torch.dtype
) -> Any:
    """transformers' own loading from a state dict, quietly."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return model_class.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    finally:
        if shown:
            logging.enable_progress_bar()


def _model_class(config: Any, file: GGUFFile) -> Any:
    if config.model_type == "llama":
        from transformers.models.llama.modeling_llama import LlamaForCausalLM

        return LlamaForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise LoadError(f"{file.path}: {config.model_type} is no causal language model") from None


def _apply_rope_factors(model: Any, file: GGUFFile) -> None:
    """Llama 3's stretched frequencies, which the file keeps as a tensor of divisors."""
    import torch

    factors = file.tensors.get("rope_freqs.weight")
    if factors is None:
        return
    divisor = torch.from_numpy(dequantize(factors))
    for module in model.modules():
        inv_freq = getattr(module, "inv_freq", None)
        if isinstance(inv_freq, torch.Tensor) and inv_freq.shape == divisor.shape:
            module.inv_freq = inv_freq / divisor


def _state_dict(
    file: GGUFFile, skeleton: Any, config: Any, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Every tensor under the model's own name, values as the model wants them."""
    import torch

    arch = file.architecture
    processor = _processor(arch, config)
    names = _name_map(arch, skeleton, config, processor)
    stacked: dict[str, Any] = {"tensors": {}}
    state: dict[str, torch.Tensor] = {}
    undo = _undo(arch, config)
    for name, values in _dequantized(file, dtype == torch.bfloat16 and arch in _KNOWN):
        if processor is not None:
            done = processor.process(
                values, name, tensor_key_mapping=names, parsed_parameters=stacked
            )
            values, target = done.weights, names.get(done.name) if done.name else None
        else:
            values, target = undo(name, values), names.get(name)
        if target is not None:
            state[target] = _tensor(values).to(dtype)
    state.update({name: tensor.to(dtype) for name, tensor in stacked["tensors"].items()})
    return state


def _tensor(values: NDArray[np.generic]) -> torch.Tensor:
    """An array as a tensor; uint16 ones are bfloat16 bit patterns."""
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.view(torch.bfloat16) if values.dtype == np.uint16 else tensor


def _dequantized(file: GGUFFile, rounded: bool) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Name and values of every tensor. ``rounded`` makes bfloat16 of quantised ones on the way
    (half the memory to write), where nothing needs doing to their values afterwards.

    Doing this on threads while torch and transformers are being imported was tried: it hides the
    0.2 s that it takes, but slows the imports by 0.45 s, which then wait for the GIL.
    """
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="gguf") as workers:
        ready = workers.map(
            lambda info: dequantize(info, to_bfloat16=rounded), file.tensors.values()
        )
        yield from zip(file.tensors, ready, strict=True)


def _processor(arch: str, config: Any) -> Any:
    """transformers' processor for an architecture whose changes are not undone here."""
    if arch in _KNOWN:
        return None
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    return TENSOR_PROCESSORS.get(arch, TensorProcessor)(config=config.to_dict())


def _name_map(arch: str, skeleton: Any, config: Any, processor: Any) -> dict[str, str]:
    """GGUF tensor name -> the model's parameter name."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    by_name = {value: key for key, value in MODEL_ARCH_NAMES.items()}
    if arch not in by_name:
        raise LoadError(f"gguf knows no tensor names for architecture {arch!r}")
    table = get_tensor_name_map(by_name[arch], config.num_hidden_layers)
    names: dict[str, str] = {}
    for full in skeleton.state_dict():
        wanted = full if processor is None else processor.preprocess_name(full)
        stem, suffix = wanted, ""
        if wanted.endswith((".weight", ".bias")):
            stem, _, leaf = wanted.rpartition(".")
            suffix = "." + leaf
        found = table.get_name(stem)
        if found is not None:
            names[found + suffix] = full
        elif processor is not None:
            processor.perform_fallback_tensor_mapping(names, suffix, "", full)
    return names


def _undo(arch: str, config: Any) -> Callable[[str, NDArray[np.generic]], NDArray[np.generic]]:
    """What brings a tensor of this architecture back to transformers' layout."""
    if arch in _PERMUTED:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

        def unpermute(name: str, values: NDArray[np.generic]) -> NDArray[np.generic]:
            if ".attn_q." not in name and ".attn_k." not in name:
                return values
            count = heads if ".attn_q." in name else kv_heads
            paired = values.reshape(count, -1, 2, *values.shape[1:])
            return paired.swapaxes(1, 2).reshape(values.shape)

        return unpermute
    if arch in _NORM_OFFSET:
        one = np.float32(1)
        return lambda name, values: (
            np.subtract(values, one) if name.endswith("norm.weight") else values
        )
    return lambda _, values: values

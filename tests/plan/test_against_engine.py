"""What the planner predicts from a configuration is what an engine builds from the model."""

import importlib.util
from pathlib import Path

import pytest
import torch

from blocktable import LLM, SamplingParams
from blocktable.core.model_specs import ModelConfig, group_model, model_layers, state_bytes
from blocktable.core.sizing import request_blocks
from blocktable.plan import plan

_FILE = Path(__file__).parent.parent / "engine" / "tiny_models.py"
_SPEC = importlib.util.spec_from_file_location("tiny_models_for_plan", _FILE)
tiny = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tiny)

NUM_BLOCKS, LENGTH = 120, 128
HYBRID = {"jamba", "bamba", "falcon_h1", "granitemoehybrid", "lfm2", "qwen3_next"}


def engine_of(model):
    return LLM(
        model, num_blocks=NUM_BLOCKS, max_model_len=LENGTH, max_num_seqs=2, block_size=8,
        accelerate=False, enable_prefix_caching=False,
    )  # fmt: skip


def shapes(groups):
    return [(group.kv_cache_spec, len(group.layer_names)) for group in groups]


@pytest.mark.parametrize("name", [*tiny.CONFIGS, *sorted(HYBRID)])
def test_groups_and_pool_bytes(name):
    model = tiny.tiny_model(name)
    llm = engine_of(model)
    layers = model_layers(model.config.to_dict(), block_size=8, dtype="float32")
    grouping = group_model(layers)
    layout = llm.engine.layout
    assert shapes(grouping.groups) == shapes(layout.groups)
    assert grouping.bytes_per_block == layout.bytes_per_block
    assert NUM_BLOCKS * grouping.bytes_per_block == llm.engine.runner.memory.nbytes
    made = plan(
        model.config.to_dict(), gpu="x", gpu_memory_bytes=1 << 30, weight_bytes=0,
        activation_bytes=0, block_size=8, kv_dtype="float32", context=LENGTH,
    )  # fmt: skip
    assert made.block_bytes == layout.bytes_per_block


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "cohere2", "mistral", "qwen3_next"])
def test_blocks_a_request_holds(name):
    """Decode step by step: never more blocks than predicted, and exactly as many where every block
    is kept."""
    llm = engine_of(tiny.tiny_model(name))
    engine, groups = llm.engine, llm.engine.layout.groups
    prompt = [5 + i % 50 for i in range(20)]
    engine.add_request("r", prompt, SamplingParams(max_tokens=90, ignore_eos=True))
    tokens, chunk = 20, 20
    while engine.has_unfinished:
        engine.step()
        used = engine.manager.pool.counts().used
        predicted = request_blocks(groups, tokens, step_tokens=chunk)
        assert used <= predicted or not engine.has_unfinished
        if name == "llama" and engine.has_unfinished:
            assert used == predicted
        tokens, chunk = tokens + 1, 1


def tensors_in(value, seen=None):
    """All distinct tensors reachable from a transformers cache."""
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        seen[id(value)] = value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            tensors_in(item, seen)
    elif type(value).__module__.startswith("transformers.cache") and hasattr(value, "__dict__"):
        tensors_in(vars(value), seen)
    return seen


@pytest.mark.parametrize("name", sorted(tiny.HYBRID_CONFIGS))
def test_state_bytes_of_a_request(name):
    model = tiny.tiny_model(name)
    cache = model(input_ids=torch.tensor([[3, 4, 5, 6]]), use_cache=True)
    cache = getattr(cache, "cache_params", None) or cache.past_key_values
    keys = {"keys", "values"}
    states = 0
    for layer in cache.layers:
        held = {k: v for k, v in vars(layer).items() if k not in keys}
        states += sum(t.nbytes for t in tensors_in(held).values() if t.dim() > 1)
    layers = model_layers(ModelConfig(model.config.to_dict()), dtype="float32")
    assert state_bytes(layers) == states

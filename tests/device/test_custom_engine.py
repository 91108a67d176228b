"""The example engine gives what its model gives without any cache, under every pressure."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

PATH = Path(__file__).resolve().parents[2] / "examples" / "custom_engine.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("custom_engine", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dense_continuation(toy: ModuleType, model: object, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens from a forward pass over the whole sequence each time: no blocks at all."""
    tokens = list(prompt)
    for _ in range(count):
        n = len(tokens)
        x = model.embed[torch.tensor(tokens)] + torch.sin(torch.arange(n)[:, None] / 10.0)
        for layer in range(toy.LAYERS):
            q, k, v = (
                (x @ model.weights[layer, i]).view(n, toy.HEADS, toy.SIZE).transpose(0, 1)
                for i in range(3)
            )
            scores = q @ k.transpose(1, 2) / toy.SIZE**0.5
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
            x = (
                x
                + (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1) @ model.weights[layer, 3]
            )
        tokens.append(int((x[-1] @ model.head.T).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("num_blocks, chunk, reqs", [(200, 64, 8), (40, 8, 8), (18, 3, 4)])
def test_equals_a_dense_forward_pass(num_blocks: int, chunk: int, reqs: int) -> None:
    toy = example()
    engine = toy.ToyEngine(num_blocks, reqs, 64, chunk, "cpu")
    prompts = [[(7 * i + 3 * j) % toy.VOCAB for j in range(1 + 5 * i)] for i in range(9)]
    answers = engine.generate(prompts, 12)
    assert answers == [dense_continuation(toy, engine.model, prompt, 12) for prompt in prompts]
    assert engine.pool.available == num_blocks - 1 and engine.batch.num_reqs == 0
    assert not engine.table[0].get_numpy_array().any()
    assert (engine.preemptions > 0) == (num_blocks < 100)
    assert not engine.model.kv[:, :, : toy.BLOCK].any(), "the null block was written"


def test_an_engine_is_a_hundred_lines() -> None:
    lines = [line.strip() for line in PATH.read_text().splitlines()]
    assert len([line for line in lines if line and not line.startswith(('"""', "#"))]) <= 100


def test_imports_only_core_and_device() -> None:
    lines = [
        line for line in PATH.read_text().splitlines() if "import" in line and "blocktable." in line
    ]
    assert lines and all("blocktable.core" in x or "blocktable.device" in x for x in lines)

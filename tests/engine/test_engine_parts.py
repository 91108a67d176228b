"""Pieces of the engine alone: inputs, memory, pool sizing, states, a step that fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_equal_tokens import check_everything_returned, generated_alone, make_engine, prompts
from tiny_models import tiny_model

from blocktable.attention import paged_attention, write_kv
from blocktable.core.errors import ConfigError, RequestError
from blocktable.core.types import StepId
from blocktable.engine.kv_layout import choose_num_blocks, plan_layout
from blocktable.engine.kv_memory import KVMemory
from blocktable.engine.params import SamplingParams
from blocktable.engine.probe import ProbeResult, probe_model
from blocktable.engine.runner import build_inputs
from blocktable.sched.output import SchedulerOutput

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, ProbeResult]:
    model = tiny_model("llama", seed=4)
    return model, probe_model(model, paged_attention, write_kv)


def drain(engine: Any) -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            found[output.request_id] = [c.token_ids for c in output.outputs]
    return found


def test_inputs_are_those_of_a_loop() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1000, (9, 64)).astype(np.int32)
    rows = np.array([4, 0, 7], np.int32)
    counts, computed = np.array([1, 5, 3], np.int32), np.array([17, 0, 30], np.int32)
    output = SchedulerOutput(
        StepId(1), rows, counts, computed, 9, rows[[0, 2, 2]], np.array([0, 2, 2], np.int32),
        np.zeros(3, np.int64),
    )  # fmt: skip
    made = build_inputs(output, tokens)
    ids, positions = [], []
    for row, count, start in zip(rows, counts, computed, strict=True):
        for position in range(start, start + count):
            ids.append(tokens[row, position])
            positions.append(position)
    assert made.input_ids.tolist() == ids and made.positions.tolist() == positions
    assert made.query_start_loc.tolist() == [0, 1, 6, 9]
    assert made.seq_lens.tolist() == [18, 5, 33]
    assert made.logits_at.tolist() == [0, 8, 8]


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_pages_are_copied_and_swapped_whole(name: str) -> None:
    probed = probe_model(tiny_model(name), paged_attention, write_kv)
    layout = plan_layout(probed, 4, torch.float32)
    memory = KVMemory(layout, probed.layers, 8, torch.device("cpu"), num_host_blocks=3)
    assert memory.nbytes == 8 * layout.bytes_per_block
    generator = torch.Generator().manual_seed(0)
    for page in memory.pages:
        page.copy_(torch.randn(page.shape, generator=generator))
    before = [page.clone() for page in memory.pages]
    memory.copy(np.array([[1, 4], [2, 5]], np.int32))
    memory.swap_out(np.array([[3, 0], [1, 2]], np.int32))
    memory.swap_in(np.array([[2, 6]], np.int32))
    for page, old in zip(memory.pages, before, strict=True):
        assert torch.equal(page[[4, 5, 6]], old[[1, 2, 1]])
        assert torch.equal(page[[0, 1, 2, 3, 7]], old[[0, 1, 2, 3, 7]])
    for layer in probed.layers:
        cache = memory.caches[id(layer.module)]
        heads, size = layer.call.num_kv_heads, layer.call.head_size
        assert cache.k_cache.shape == (8, heads, 4, size)
        assert cache.v_cache.shape == (8, heads, 4, layer.call.head_size_v)
        gap = cache.v_cache.data_ptr() - cache.k_cache.data_ptr()
        assert gap == heads * 4 * size * 4


def test_pool_size_from_memory(llama: tuple[Any, ProbeResult]) -> None:
    layout = plan_layout(llama[1], 16, torch.float32)
    per_block = layout.bytes_per_block
    assert per_block == 2 * 2 * 2 * 16 * 8 * 4  # layers, K and V, heads, positions, size, bytes

    def blocks(**options: Any) -> int:
        asked = {"num_blocks": None, "memory_bytes": None, "available": 1 << 30, "share": 0.5}
        return choose_num_blocks(layout, **{**asked, "max_useful_tokens": 1 << 30, **options})

    assert blocks(num_blocks=77) == 77
    assert blocks(memory_bytes=10 * per_block + 5) == 10
    assert blocks(available=40 * per_block) == 20
    assert blocks(max_useful_tokens=64) == 5
    with pytest.raises(ConfigError, match=f"need {per_block} more"):
        blocks(memory_bytes=per_block)


def test_a_failed_step_is_taken_back(llama: tuple[Any, ProbeResult]) -> None:
    """The device fails in the third step: no block is lost, and going on gives the same tokens."""
    model, probed = llama
    expected = [generated_alone(model, prompt) for prompt in prompts()]
    engine = make_engine(model, probed, block_size=4, num_blocks=60)
    for index, prompt in enumerate(prompts()):
        engine.add_request(str(index), prompt, GREEDY)
    run, calls = engine.runner.execute, []

    def failing(output: SchedulerOutput) -> Any:
        calls.append(output)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return run(output)

    engine.runner = SimpleNamespace(
        execute=failing, manager=engine.runner.manager, download=engine.runner.download
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        drain(engine)
    found = drain(engine)
    assert len(found) == len(expected)
    for index, tokens in enumerate(expected):
        assert found[str(index)] == [tokens]
    check_everything_returned(engine)


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "falcon_h1", "qwen3_next"])
def test_forks_take_their_states_along(name: str) -> None:
    model = tiny_model(name)
    probed = probe_model(model, paged_attention, write_kv)
    engine = make_engine(model, probed, block_size=4, num_blocks=120)
    expected = [generated_alone(model, prompt) for prompt in prompts()[:2]]
    for index, prompt in enumerate(prompts()[:2]):
        engine.add_request(str(index), prompt, GREEDY.replace(n=2))
    found = drain(engine)
    assert found == {str(i): [tokens, tokens] for i, tokens in enumerate(expected)}
    check_everything_returned(engine)
    probed.mixers.close()


def test_an_aborted_prompt_is_not_hit(llama: tuple[Any, ProbeResult]) -> None:
    """Case B21: only what was computed before the abort may be found."""
    model, probed = llama
    engine = make_engine(model, probed, block_size=4, num_blocks=60, max_num_batched_tokens=8)
    prompt = prompts()[2]
    engine.add_request("gone", prompt, GREEDY)
    engine.abort(["gone"])
    engine.step()
    engine.add_request("half", prompt, GREEDY)
    engine.step()
    engine.abort(["half"])
    while engine.has_unfinished:
        engine.step()
    engine.add_request("whole", prompt, GREEDY)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert outputs[-1].num_cached_tokens <= 8
    assert outputs[-1].outputs[0].token_ids == generated_alone(model, prompt)


def test_ids_in_use_and_reuse(llama: tuple[Any, ProbeResult]) -> None:
    engine = make_engine(*llama, block_size=4, num_blocks=60)
    engine.add_request("a", [5, 6], GREEDY)
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("a", [5], GREEDY)
    first = drain(engine)
    engine.add_request("a", [5, 6], GREEDY)
    assert drain(engine) == first


def test_a_request_larger_than_the_pool_does_not_block_the_next(
    llama: tuple[Any, ProbeResult],
) -> None:
    """Case B25: refused at once; the short one behind it completes."""
    engine = make_engine(*llama, block_size=4, num_blocks=13)
    with pytest.raises(RequestError, match="48"):
        engine.add_request("long", [5] * 48, GREEDY)
    engine.add_request("short", [5] * 10, GREEDY)
    assert len(drain(engine)["short"][0]) == 7

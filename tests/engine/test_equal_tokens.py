"""Greedy text equals transformers' own, token for token, however the cache is cut up and shared.

Every architecture runs under every combination of block size, prefix caching, chunked prefill and a
pool so small that requests are preempted and resumed. The reference is ``model.generate``, one
prompt at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import CONFIGS, HYBRID_CONFIGS, VOCAB, tiny_model

from blocktable.attention import paged_attention, write_kv
from blocktable.engine.build import build_engine
from blocktable.engine.engine import Engine
from blocktable.engine.kv_layout import plan_layout
from blocktable.engine.loader import LoadedModel
from blocktable.engine.options import EngineOptions
from blocktable.engine.params import SamplingParams
from blocktable.engine.probe import ProbeResult, probe_model

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZES = (1, 16, 17, 64)
NEW_TOKENS = 7
LONGEST = 48
COMBINATIONS = list(itertools.product(BLOCK_SIZES, (True, False), (True, False), (True, False)))


def prompts() -> list[list[int]]:
    """Lengths 1 to 39; three share 20 tokens, and the last is the second once more."""
    rng = np.random.default_rng(3)
    shared = rng.integers(3, VOCAB, 20).tolist()
    tails = [rng.integers(3, VOCAB, n).tolist() for n in (1, 19, 5)]
    made = [shared + tail for tail in tails]
    return [rng.integers(3, VOCAB, 1).tolist(), *made, rng.integers(3, VOCAB, 17).tolist(), made[1]]


def generated_alone(model: Any, prompt: list[int]) -> list[int]:
    """The next tokens by transformers' own loop."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
    return out[0, len(prompt) :].tolist()


def make_engine(model: Any, probed: ProbeResult, **options: Any) -> Engine:
    chosen = EngineOptions(
        dtype="float32", max_model_len=LONGEST, max_num_seqs=4, accelerate=False, **options
    )
    return build_engine(LoadedModel(model, None, "tiny", owned=False), chosen, probed=probed)


def run(engine: Engine, late: int = 1) -> list[list[int]]:
    """All prompts; the last ``late`` of them arrive when the others are under way."""
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    waiting = list(enumerate(prompts()))
    for index, prompt in waiting[:-late]:
        engine.add_request(str(index), prompt, params, streaming=False)
    done: dict[str, list[int]] = {}
    for step in itertools.count():
        if step == 6:
            for index, prompt in waiting[-late:]:
                engine.add_request(str(index), prompt, params, streaming=False)
        for output in engine.step():
            done[output.request_id] = output.outputs[0].token_ids
        if step > 6 and not engine.has_unfinished:
            break
    return [done[str(index)] for index, _ in waiting]


def check_everything_returned(engine: Engine) -> None:
    """No block is in use any more."""
    counts = engine.manager.pool.counts()
    assert counts.used == 0 and counts.fenced == 0, counts


@pytest.mark.parametrize("name", [*CONFIGS, *HYBRID_CONFIGS])
def test_equal_under_every_combination(name: str) -> None:
    model = tiny_model(name)
    expected = [generated_alone(model, prompt) for prompt in prompts()]
    probed = probe_model(model, paged_attention, write_kv)
    preempted = 0
    for block_size, caching, chunked, small in COMBINATIONS:
        layout = plan_layout(probed, block_size, torch.float32)
        blocks = 1 + layout.blocks_for(LONGEST) if small else 1 + 6 * layout.blocks_for(LONGEST)
        engine = make_engine(
            model, probed, block_size=block_size, num_blocks=blocks,
            enable_prefix_caching=caching, enable_chunked_prefill=chunked,
            max_num_batched_tokens=13,
        )  # fmt: skip
        what = f"{name}: block size {block_size}, {caching=}, {chunked=}, {small=}"
        assert run(engine) == expected, what
        check_everything_returned(engine)
        preempted += engine.scheduler.stats.preemptions if small else 0
    assert preempted > 0 or name in ("mamba", "mamba2")
    probed.mixers.close()


@pytest.fixture(scope="module")
def llama() -> Iterator[tuple[Any, ProbeResult]]:
    model = tiny_model("llama", seed=4)
    yield model, probe_model(model, paged_attention, write_kv)


def test_swapped_requests_go_on_where_they_were(llama: tuple[Any, ProbeResult]) -> None:
    model, probed = llama
    expected = [generated_alone(model, prompt) for prompt in prompts()]
    engine = make_engine(
        model, probed, block_size=4, num_blocks=13, preemption="swap", num_host_blocks=40,
        enable_prefix_caching=False,
    )  # fmt: skip
    assert run(engine) == expected
    assert engine.scheduler.stats.swapped_out_blocks > 0


def test_two_steps_in_flight(llama: tuple[Any, ProbeResult]) -> None:
    model, probed = llama
    expected = [generated_alone(model, prompt) for prompt in prompts()]
    for blocks in (13, 60):
        engine = make_engine(model, probed, block_size=4, num_blocks=blocks, async_steps=True)
        assert run(engine) == expected
        check_everything_returned(engine)


def test_prefix_hits_are_counted(llama: tuple[Any, ProbeResult]) -> None:
    model, probed = llama
    engine = make_engine(model, probed, block_size=4, num_blocks=60)
    params = SamplingParams(temperature=0.0, max_tokens=2)
    prompt = prompts()[2]
    found = []
    for name in ("first", "second"):
        engine.add_request(name, prompt, params)
        while engine.has_unfinished:
            outputs = engine.step()
        found.append((outputs[0].num_cached_tokens, outputs[0].outputs[0].token_ids))
    assert found[0][0] == 0 and found[1][0] == (len(prompt) - 1) // 4 * 4
    assert found[0][1] == found[1][1]

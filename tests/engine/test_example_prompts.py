"""The example prompts on the bundled model, under every way of cutting up and sharing the cache.

Float32 tokens equal ``model.generate`` of one prompt at a time, for any block size, with prefix
caching, chunked prefill and a pool that holds the prompts and not the answers. (All prompts at once
are in test_llm.py.)
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from blocktable import SamplingParams
from blocktable.attention import paged_attention, write_kv
from blocktable.engine.build import build_engine
from blocktable.engine.engine import Engine
from blocktable.engine.kv_layout import plan_layout
from blocktable.engine.loader import LoadedModel, begin
from blocktable.engine.options import EngineOptions
from blocktable.engine.probe import ProbeResult, probe_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "prompts.jsonl"
NEW_TOKENS = 14
COMBINATIONS = list(itertools.product((True, False), (True, False), (True, False)))


class Examples(NamedTuple):
    """The model, and some prompts with what ``model.generate`` makes of each."""

    model: Any
    probed: ProbeResult
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def examples() -> Examples:
    """Two of the questions behind the shared system prompt, of 390 and 437 tokens."""
    loaded = begin("smollm2").finish("float32")
    assert loaded.tokenizer is not None
    records = [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines()]
    system = next(record["system"] for record in records if "system" in record)
    asked = sorted((record["user"] for record in records if "user" in record), key=len)
    prompts = [
        loaded.tokenizer.apply_chat_template(
            [{"role": "system", "content": system}, {"role": "user", "content": question}],
            add_generation_prompt=True, return_dict=False,
        )
        for question in (asked[0], asked[13])
    ]  # fmt: skip
    expected = [generated_alone(loaded.model, prompt) for prompt in prompts]
    probed = probe_model(loaded.model, paged_attention, write_kv)
    return Examples(loaded.model, probed, prompts, expected)


def generated_alone(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def make_engine(examples: Examples, block_size: int, small: bool, **options: Any) -> Engine:
    lengths = [len(prompt) for prompt in examples.prompts]
    plan = plan_layout(examples.probed, block_size, torch.float32)
    usable = sum(plan.blocks_for(n if small else n + NEW_TOKENS) for n in lengths)
    chosen = EngineOptions(
        dtype="float32", block_size=block_size, num_blocks=1 + usable,
        max_model_len=max(lengths) + NEW_TOKENS, max_num_seqs=4,
        max_num_batched_tokens=150, accelerate=False,
        **options,
    )  # fmt: skip
    loaded = LoadedModel(examples.model, None, "smollm2", owned=False)
    return build_engine(loaded, chosen, probed=examples.probed)


@pytest.mark.parametrize("block_size", [1, 16, 17, 64])
def test_equal_under_every_combination(examples: Examples, block_size: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)
    preempted = 0
    for caching, chunked, small in COMBINATIONS:
        engine = make_engine(
            examples, block_size, small,
            enable_prefix_caching=caching, enable_chunked_prefill=chunked,
        )  # fmt: skip
        for index, prompt in enumerate(examples.prompts):
            engine.add_request(str(index), prompt, params, streaming=False)
        found: dict[str, list[int]] = {}
        while engine.has_unfinished:
            for output in engine.step():
                found[output.request_id] = output.outputs[0].token_ids
        what = f"block size {block_size}, {caching=}, {chunked=}, {small=}"
        assert [found["0"], found["1"]] == examples.expected, what
        counts = engine.manager.pool.counts()
        assert counts.used == 0 and counts.fenced == 0, what
        preempted += engine.scheduler.stats.preemptions if small else 0
    assert preempted > 0

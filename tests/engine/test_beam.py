"""Beam search equals a plain one that runs every hypothesis from its first token on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, tiny_model

from blocktable import LLM, SamplingParams
from blocktable.core.errors import RequestError
from blocktable.core.invariants import check

pytestmark = pytest.mark.usefixtures("one_thread")

Found = list[tuple[list[int], float]]


def reference(
    model: Any, prompt: list[int], width: int, limit: int, penalty: float, ends: tuple[int, ...]
) -> Found:
    """Every live hypothesis times every token of the vocabulary, the whole text computed anew."""
    live: Found = [([], 0.0)]
    ended: Found = []
    for _ in range(limit):
        with torch.inference_mode():
            batch = torch.tensor([prompt + ids for ids, _ in live])
            logprobs = model(batch, use_cache=False).logits[:, -1].log_softmax(-1).double()
        everything = [
            ([*ids, token], total + logprobs[i, token].item())
            for i, (ids, total) in enumerate(live)
            for token in range(VOCAB)
        ]
        everything.sort(key=lambda candidate: -candidate[1])
        ended += [c for c in everything[:width] if c[0][-1] in ends]
        live = [c for c in everything if c[0][-1] not in ends][:width]
    everyone = ended + live
    return sorted(everyone, key=lambda c: -c[1] / len(c[0]) ** penalty)[:width]


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    shared = rng.integers(3, VOCAB, 9).tolist()
    return [shared + rng.integers(3, VOCAB, n).tolist() for n in (1, 6, 12)] + [[5]]


def make(name: str = "llama", ends: tuple[int, ...] = (), **options: Any) -> LLM:
    model = tiny_model(name, seed=4)
    model.generation_config.eos_token_id = list(ends) or None
    model.config.eos_token_id = None
    chosen = {"block_size": 4, "num_blocks": 200, "max_model_len": 40, "max_num_seqs": 16}
    return LLM(model, **{"dtype": "float32", "accelerate": False, **chosen, **options})


def check_equal(llm: LLM, ends: tuple[int, ...], width: int, limit: int, penalty: float) -> int:
    """Runs both; returns how many blocks, at most, were held by more than one beam."""
    manager, shared = llm.engine.manager, [0]

    def count(output: Any) -> None:
        check(manager)
        rows = llm.engine.scheduler.running_rows
        held = sum(int(table.counts[rows].sum()) for table in manager.tables)
        shared.append(held - manager.pool.used)

    llm.engine.on_schedule = count
    outputs = llm.beam_search(prompts(), width, limit, penalty)
    for prompt, output in zip(prompts(), outputs, strict=True):
        expected = reference(llm.engine.runner.model, prompt, width, limit, penalty, ends)
        assert [c.token_ids for c in output.outputs] == [ids for ids, _ in expected]
        found = [c.cumulative_logprob for c in output.outputs]
        assert found == pytest.approx([total for _, total in expected], abs=1e-4)
        reasons = ["stop" if ids[-1] in ends else "length" for ids, _ in expected]
        assert [c.finish_reason for c in output.outputs] == reasons
        assert output.prompt_token_ids == prompt and output.finished
    counts = manager.pool.counts()
    assert counts.used == counts.fenced == 0
    assert not llm.engine.scheduler.has_work
    return max(shared)


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.5, -0.5])
@pytest.mark.parametrize("ends", [(17, 40, 41, 77), tuple(range(70, 96))])
def test_equal_to_the_plain_search(width: int, penalty: float, ends: tuple[int, ...]) -> None:
    shared = check_equal(make(ends=ends), ends, width, 7, penalty)
    assert shared > 0 or width == 1


def test_stops_once_nothing_better_can_come() -> None:
    ends = tuple(range(20, 96))
    llm = make(ends=ends)
    check_equal(llm, ends, 2, 12, 0.0)
    assert llm.engine.scheduler.stats.steps < 8


@pytest.mark.parametrize("options", [{}, {"preemption": "swap", "num_host_blocks": 90}])
def test_beams_that_are_preempted_come_back(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(**options)
    scheduler = llm.engine.scheduler
    schedule, calls = scheduler.schedule, []

    def preempting() -> Any:
        calls.append(0)
        rows = scheduler.running_rows.tolist()
        if len(calls) % 3 == 0:
            names = [scheduler.requests[row].request_id for row in rows]
            scheduler.preempt(names[1::2] if len(calls) % 2 else names)
        return schedule()

    monkeypatch.setattr(scheduler, "schedule", preempting)
    check_equal(llm, (), 3, 9, 1.0)
    assert scheduler.stats.preemptions > 8
    assert bool(scheduler.stats.swapped_out_blocks) == bool(options)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False}, {"block_size": 1}, {"max_num_batched_tokens": 5},
        {"num_draft_tokens": 3}, {"async_steps": True}, {"max_num_seqs": 4},
        {"num_blocks": 18}, {"num_blocks": 18, "preemption": "swap", "num_host_blocks": 60},
    ],
)  # fmt: skip
def test_equal_however_the_cache_is_cut(options: dict[str, Any]) -> None:
    assert check_equal(make(**options), (), 4, 9, 1.0) > 0


@pytest.mark.parametrize("name", ["gemma2", "mamba2", "jamba"])
def test_other_kinds_of_layers(name: str) -> None:
    check_equal(make(name, num_blocks=300), (), 3, 8, 1.0)


def test_common_blocks_are_held_once() -> None:
    """Four beams of a prompt of 20 tokens in blocks of 4: its 5 blocks exist once, not 4 times."""
    llm = make()
    most: list[int] = []
    llm.engine.on_schedule = lambda output: most.append(llm.engine.manager.pool.used)
    llm.beam_search([list(range(10, 30))], 4, 4)
    assert max(most) <= 5 + 4


def test_refused_and_nothing_held() -> None:
    llm = make(num_blocks=11)
    for width, tokens, prompt in ((0, 4, [5]), (17, 4, [5]), (2, 0, [5]), (2, 4, []), (2, 4, [96])):
        with pytest.raises(RequestError):
            llm.beam_search([prompt], width, tokens)
    with pytest.raises(RequestError, match="more blocks than the 10"):
        llm.beam_search([list(range(5, 10))], 16, 20)
    assert llm.engine.manager.pool.used == 0 and not llm.engine.scheduler.has_work
    llm.engine.add_request("other", [5, 6], SamplingParams(max_tokens=3))
    with pytest.raises(RequestError, match="unfinished"):
        llm.beam_search([[5]], 2, 4)
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert len(llm.beam_search([5, 6], 2, 4)[0].outputs) == 2


def test_text_of_the_bundled_model() -> None:
    llm = LLM("smollm2", dtype="float32", num_blocks=60, max_num_seqs=8)
    output = llm.beam_search("The capital of France is", 3, 6)[0]
    best = output.outputs[0]
    assert "Paris" in best.text
    assert best.text == llm.tokenizer.decode(best.token_ids, skip_special_tokens=True)
    greedy = llm.generate(
        "The capital of France is", SamplingParams(temperature=0, max_tokens=6, logprobs=0)
    )[0].outputs[0]
    assert best.cumulative_logprob is not None and greedy.cumulative_logprob is not None
    assert best.cumulative_logprob >= greedy.cumulative_logprob - 1e-4

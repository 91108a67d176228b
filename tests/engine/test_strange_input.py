"""Input of any type at the public border: served as what it means, or one RequestError; and an
engine that a failing step leaves as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, tiny_model

from blocktable import LLM, SamplingParams
from blocktable.core.errors import RequestError
from blocktable.engine import engine as engine_module

pytestmark = pytest.mark.usefixtures("one_thread")

NAN, INF = float("nan"), float("inf")
TWO = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    yield LLM(tiny_model("llama"), dtype="float32", num_blocks=20, block_size=4, max_num_seqs=4)


def check_idle(llm: LLM) -> None:
    """Nothing is queued, held or in flight, and the next request is served."""
    counts = llm.engine.manager.pool.counts()
    assert (counts.used, counts.fenced, llm.engine.has_unfinished) == (0, 0, False)
    assert len(llm.generate([[5, 6]], TWO)[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    "prompts",
    [
        [5, 6], (5, 6), range(5, 7), [[5, 6]], np.array([5, 6]), np.array([[5, 6]]),
        [np.int64(5), np.int32(6)], np.array([5, 6], np.uint8), torch.tensor([5, 6]),
        torch.tensor([[5, 6]]), [torch.tensor([5, 6])], {"prompt_token_ids": [5, 6]},
        [np.array([5, 6])],
    ],
    ids=repr,
)  # fmt: skip
def test_token_ids_come_in_many_forms(llm: LLM, prompts: Any) -> None:
    (found,) = llm.generate(prompts, TWO)
    assert found.outputs[0].token_ids == llm.generate([[5, 6]], TWO)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    "prompts",
    [
        None, 5, 1.5, True, np.int64(5), b"hi", object(), "no tokenizer", "", [[]], [None], [1.5],
        [True], [[True]], [[1.5]], [[NAN]], [[-1]], [[VOCAB]], [[10**30]], [[[5]]], [[5], []],
        [[5], "x"], np.array([5.0]), np.array([True]), np.zeros((2, 2, 2), int), torch.tensor(5),
        torch.ones(2, 2, 2, dtype=torch.int64), np.array([5, None], object),
        [np.zeros((2, 2), int)], np.array([2**63], np.uint64), {}, {"prompt": None},
        {"prompt_token_ids": "x"}, [[5] * 1000], torch.tensor([0.5]),
    ],
    ids=lambda prompts: "object" if type(prompts) is object else repr(prompts)[:60],
)  # fmt: skip
def test_what_are_no_prompts_is_one_line(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, TWO)
    assert "\n" not in str(caught.value)
    check_idle(llm)


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.beam_search([[5]], 2, 2, "x"),
        lambda llm: llm.beam_search([[5]], 2, 2, NAN),
        lambda llm: llm.beam_search([[5]], 2, 2, INF),
        lambda llm: llm.beam_search([[5]], 2, 2, 1e300),
        lambda llm: llm.beam_search([[5]], 2, 2, True),
        lambda llm: llm.beam_search([[5]], 2.0, 2),
        lambda llm: llm.beam_search([[5]], 2, NAN),
        lambda llm: llm.beam_search(5, 2, 2),
        lambda llm: llm.chat(5),
        lambda llm: llm.chat(None),
        lambda llm: llm.chat("hello"),
        lambda llm: llm.chat([5]),
        lambda llm: llm.chat({"role": "user", "content": "x"}),
        lambda llm: llm.engine.add_request(5, [5], TWO),
        lambda llm: llm.engine.add_request(None, [5], TWO),
        lambda llm: llm.engine.add_request([1], [5], TWO),
        lambda llm: llm.engine.add_request("a", [5], None),
        lambda llm: llm.engine.add_request("a", [5], {"max_tokens": 1}),
    ],
)
def test_what_no_call_can_mean_is_one_line(llm: LLM, call: Callable[[LLM], object]) -> None:
    with pytest.raises(RequestError) as caught:
        call(llm)
    assert "\n" not in str(caught.value)
    check_idle(llm)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_more_log_probabilities_than_tokens_are_all_of_them(llm: LLM, field: str) -> None:
    params = TWO.replace(**{field: 100})
    output = llm.generate([[5, 6, 7]], params)[0]
    found: Any = output.outputs[0].logprobs
    if field == "prompt_logprobs":
        found = (output.prompt_logprobs or [])[1:]
    assert [len(position.top) for position in found] == [VOCAB, VOCAB]
    check_idle(llm)


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-30, 1e-7])
def test_hardly_any_temperature_is_greedy(llm: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=2, ignore_eos=True, seed=3)
    found = llm.generate([[5, 6]], params)[0].outputs[0].token_ids
    assert found == llm.generate([[5, 6]], TWO)[0].outputs[0].token_ids


@pytest.mark.parametrize("where", ["place", "execute", "sample", "download", "logprobs", "tokens"])
@pytest.mark.parametrize("async_steps", [False, True])
def test_a_failing_step_is_taken_back(
    where: str, async_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part fails, in whatever step: the error comes out, the next call is served."""
    llm = LLM(
        tiny_model("llama"), dtype="float32", num_blocks=20, block_size=4, max_num_seqs=4,
        async_steps=async_steps,
    )  # fmt: skip
    engine, params = llm.engine, TWO.replace(logprobs=2, max_tokens=6)
    expected = [output.outputs[0].token_ids for output in llm.generate([[5, 6], [7, 8]], params)]

    def fail(*_: object, **__: object) -> Any:
        raise ArithmeticError("the device is gone")

    targets: dict[str, tuple[object, str]] = {
        "place": (engine.sampler, "add_row"), "execute": (engine.runner, "execute"),
        "sample": (engine.sampler, "sample"), "download": (engine.runner, "download"),
        "logprobs": (engine_module, "logprobs_by_line"),
        "tokens": (engine.runner, "download"),
    }  # fmt: skip
    for steps_before in (0, 2):
        for name in ("a", "b"):
            engine.add_request(name, [5, 6] if name == "a" else [7, 8], params)
        for _ in range(steps_before if where != "place" else 0):
            engine.step()
        with monkeypatch.context() as patched:
            target, name = targets[where]
            patched.setattr(target, name, (lambda *_: fail) if where == "tokens" else fail)
            with pytest.raises(ArithmeticError):
                for _ in range(3):
                    engine.step()
        done = {}
        while engine.has_unfinished:
            done.update({o.request_id: o.outputs[0].token_ids for o in engine.step()})
        assert [done["a"], done["b"]] == expected
        check_idle(llm)

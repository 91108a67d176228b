"""LLM on the bundled model: text, sampling, stopping, aborting, and refusing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktable import LLM, SamplingParams
from blocktable.core.errors import ConfigError, LoadError, RequestError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "prompts.jsonl"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
QUESTIONS = ["The capital of France is", "Once upon a time", "2 + 2 =", "A haiku:"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    yield LLM("smollm2", dtype="float32", num_blocks=400, max_num_seqs=32, accelerate=False)


def example_prompts(llm: LLM) -> list[list[int]]:
    """The example file as token ids: every question behind the shared system prompt."""
    system, ids = "", []
    for line in EXAMPLES.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        system = record.get("system", system)
        if "user" in record:
            messages = [{"role": "system", "content": system}]
            ids.append(llm.encode_chat([*messages, {"role": "user", "content": record["user"]}]))
    return ids


def idle(llm: LLM) -> bool:
    counts = llm.engine.manager.pool.counts()
    return counts.used == 0 and counts.fenced == 0


def test_example_prompts_equal_generate(llm: LLM) -> None:
    prompts = example_prompts(llm)
    assert len(prompts) >= 12
    params = SamplingParams(temperature=0.0, max_tokens=8)
    outputs = llm.generate(prompts, params)
    model = llm.engine.runner.model
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        found = output.outputs[0].token_ids
        with torch.inference_mode():  # each token is the choice after those before it
            whole = model(torch.tensor([prompt + found]), use_cache=False).logits[0]
            assert whole[len(prompt) - 1 : -1].argmax(-1).tolist() == found
            if index < 2:
                ids = torch.tensor([prompt])
                own = model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
                )
                assert own[0, len(prompt) :].tolist() == found
    assert sum(output.num_cached_tokens for output in outputs) > 300 * (len(prompts) - 1) // 2
    assert idle(llm)


def test_text_is_the_decoded_ids(llm: LLM) -> None:
    for output in llm.generate(QUESTIONS, GREEDY):
        completion = output.outputs[0]
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
        assert completion.finish_reason == "length" and len(completion.token_ids) == 12
        assert output.finished and output.metrics.time_to_first_token is not None


def test_streaming_grows_to_the_same_text(llm: LLM) -> None:
    whole = [output.outputs[0].text for output in llm.generate(QUESTIONS, GREEDY)]
    seen: dict[str, str] = {}
    for output in llm.stream(QUESTIONS, GREEDY):
        text = output.outputs[0].text
        assert text.startswith(seen.get(output.request_id, ""))
        seen[output.request_id] = text
    assert [seen[str(i)] for i in range(len(QUESTIONS))] == whole


def test_leaving_a_stream_frees_its_blocks(llm: LLM) -> None:
    for _ in llm.stream(QUESTIONS, GREEDY):
        break
    assert idle(llm) and not llm.engine.has_unfinished


def test_calls_within_a_stream_take_nothing_from_it(llm: LLM) -> None:
    whole = [output.outputs[0].text for output in llm.generate(QUESTIONS, GREEDY)]
    outer, texts = llm.stream(QUESTIONS[0], GREEDY), []
    next(outer)
    inner = llm.stream(QUESTIONS[1], GREEDY)
    next(inner)
    texts.append(llm.generate(QUESTIONS[2], GREEDY)[0].outputs[0].text)
    for _ in llm.stream(QUESTIONS, GREEDY):
        break
    with pytest.raises(RequestError):
        llm.generate([QUESTIONS[0], [-1]], GREEDY)
    for stream in (inner, outer):
        last = list(stream)[-1]
        assert last.finished and last.request_id == "0"
        texts.append(last.outputs[0].text)
    assert texts == [whole[2], whole[1], whole[0]]
    assert idle(llm) and not llm.engine.has_unfinished


@pytest.mark.parametrize("params", ["x", 5, [5, 5], [GREEDY, None], {"max_tokens": 5}, [GREEDY]])
def test_what_are_no_parameters_leave_nothing_queued(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(QUESTIONS[:2], params)
    assert idle(llm) and not llm.engine.has_unfinished


def test_a_seed_fixes_the_text_whatever_runs_beside_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=10, ignore_eos=True)
    alone = llm.generate(QUESTIONS[0], params)[0].outputs[0].token_ids
    others = [SamplingParams(temperature=1.1, max_tokens=9, ignore_eos=True)] * 3
    beside = llm.generate([*QUESTIONS[1:], QUESTIONS[0]], [*others, params])[-1]
    assert beside.outputs[0].token_ids == alone


def test_n_completions_share_their_prompt(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=9, ignore_eos=True)
    output = llm.generate(QUESTIONS[1], params)[0]
    texts = [completion.text for completion in output.outputs]
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len(set(texts)) > 1 and all(len(c.token_ids) == 9 for c in output.outputs)
    again = llm.generate(QUESTIONS[1], params)[0]
    assert [completion.text for completion in again.outputs] == texts
    assert idle(llm)


def test_greedy_completions_are_all_the_same(llm: LLM) -> None:
    one = llm.generate(QUESTIONS[2], GREEDY)[0].outputs[0].token_ids
    many = llm.generate(QUESTIONS[2], GREEDY.replace(n=3))[0]
    assert [completion.token_ids for completion in many.outputs] == [one] * 3


def test_stop_strings_and_stop_tokens(llm: LLM) -> None:
    free = llm.generate(QUESTIONS[1], GREEDY)[0].outputs[0]
    word = free.text[8:12]
    stopped = llm.generate(QUESTIONS[1], GREEDY.replace(stop=[word]))[0].outputs[0]
    assert stopped.text == free.text[: free.text.index(word)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", word)
    kept = GREEDY.replace(stop=[word], include_stop_str_in_output=True)
    assert llm.generate(QUESTIONS[1], kept)[0].outputs[0].text.endswith(word)
    token = free.token_ids[5]
    first = free.token_ids.index(token)
    by_id = llm.generate(QUESTIONS[1], GREEDY.replace(stop_token_ids=[token]))[0].outputs[0]
    assert by_id.token_ids == free.token_ids[: first + 1]
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", token)
    assert by_id.text == llm.tokenizer.decode(free.token_ids[:first])
    later = GREEDY.replace(stop_token_ids=[token], min_tokens=first + 2)
    assert token not in llm.generate(QUESTIONS[1], later)[0].outputs[0].token_ids[: first + 2]


def test_logprobs(llm: LLM) -> None:
    output = llm.generate(QUESTIONS[0], GREEDY.replace(logprobs=3))[0].outputs[0]
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    ids = torch.tensor([llm.encode(QUESTIONS[0])])
    with torch.inference_mode():
        row = llm.engine.runner.model(ids).logits[0, -1].log_softmax(-1)
    first = output.logprobs[0]
    assert first.chosen.token_id == int(row.argmax()) and first.chosen.rank == 1
    assert first.chosen.logprob == pytest.approx(float(row.max()), abs=1e-4)
    assert [top.token_id for top in first.top] == row.topk(3).indices.tolist()
    total = sum(item.chosen.logprob for item in output.logprobs)
    assert output.cumulative_logprob == pytest.approx(total)


def test_abort_in_the_middle(llm: LLM) -> None:
    engine = llm.engine
    for name in ("stays", "goes"):
        engine.add_request(name, QUESTIONS[1], GREEDY.replace(n=2))
    engine.step()
    engine.step()
    engine.abort(["goes", "unknown"])
    ends: dict[str, list[Any]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            ends[output.request_id] = [c.finish_reason for c in output.outputs]
    assert ends == {"stays": ["length", "length"], "goes": ["abort", "abort"]}
    assert idle(llm)


BAD_PROMPTS = [[], "", [-1], [49152], [2**63], [1.5], [True], [5] * 9000, {"wrong": 1}]


@pytest.mark.parametrize("prompt", BAD_PROMPTS)
def test_a_bad_prompt_is_one_line_and_holds_nothing(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate([QUESTIONS[0], prompt], GREEDY)
    assert "\n" not in str(caught.value)
    assert idle(llm) and not llm.engine.has_unfinished
    assert llm.generate([[49151]], GREEDY)[0].finished


def test_bad_parameters(llm: LLM) -> None:
    with pytest.raises(RequestError, match="stop_token_ids"):
        llm.generate(QUESTIONS[0], GREEDY.replace(stop_token_ids=[49152]))
    with pytest.raises(RequestError, match="3 prompts, but 2"):
        llm.generate(QUESTIONS[:3], [GREEDY, GREEDY])
    assert idle(llm)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"block_size": 0}, "block_size"), ({"num_blocks": 1}, "num_blocks"),
        ({"dtype": "int4"}, "int4"), ({"memory_bytes": 1000}, "1000 bytes"),
        ({"num_blocks": 65, "max_model_len": 1040}, "1040"), ({"max_model_len": 9000}, "9000"),
        ({"device": "tpu"}, "tpu"), ({"preemption": "swap"}, "host"),
    ],
)  # fmt: skip
def test_an_option_that_cannot_work(llm: LLM, options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        LLM(llm.engine.runner.model, **{"dtype": "float32", **options})


def test_one_block_is_reserved(llm: LLM) -> None:
    """Case B25: 64 blocks of 16 hold 1008 tokens, so 1024 needs 65."""
    with pytest.raises(ConfigError):
        LLM(llm.engine.runner.model, num_blocks=64, max_model_len=1024)
    small = LLM(llm.engine.runner.model, num_blocks=65, max_model_len=1024)
    assert small.engine.max_model_len == 1024
    lowered = LLM(llm.engine.runner.model, num_blocks=64)
    assert lowered.engine.max_model_len == 1008


def test_whole_prompt_cached_still_computes_its_last_token(llm: LLM) -> None:
    """Case B19: hits are whole blocks and never the whole prompt."""
    model = llm.engine.runner.model
    for block_size, length, cached in ((256, 512, 256), (16, 48, 32), (16, 16, 0)):
        own = LLM(model, block_size=block_size, num_blocks=20, tokenizer=llm.tokenizer)
        prompt = torch.arange(100, 100 + length).tolist()
        params = GREEDY.replace(max_tokens=4)
        first, second = (own.generate([prompt], params)[0] for _ in range(2))
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached)
        assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_missing_model() -> None:
    with pytest.raises(LoadError):
        LLM("/nowhere/at/all")


def test_an_interrupted_call_leaves_nothing_running(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = llm.engine.runner.execute, []

    def interrupted(output: Any) -> Any:
        calls.append(output)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(output)

    monkeypatch.setattr(llm.engine.runner, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(QUESTIONS, GREEDY)
    monkeypatch.undo()
    assert [o.finished for o in llm.generate(QUESTIONS[:1], GREEDY)] == [True]
    assert idle(llm)

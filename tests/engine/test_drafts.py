"""Draft and verify changes no token: greedy, sampled, under every way the cache is cut and shared.

Drafts come from n-gram look-up, from a proposer that knows the answer and is wrong now and then,
and from one that is always wrong. The invariants are recounted after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_equal_tokens import check_everything_returned, prompts
from tiny_models import VOCAB, tiny_model

from blocktable import LLM, SamplingParams
from blocktable.attention import cpu, paged_attention, write_kv
from blocktable.core.errors import ConfigError
from blocktable.core.invariants import check
from blocktable.core.types import Counts, RowIds, TokenIds
from blocktable.engine.build import assemble_engine, build_engine, prepare_engine
from blocktable.engine.engine import Engine
from blocktable.engine.gpu.runner import GraphRunner
from blocktable.engine.kv_layout import plan_layout
from blocktable.engine.loader import LoadedModel
from blocktable.engine.options import EngineOptions
from blocktable.engine.outputs import RequestOutput
from blocktable.engine.probe import ProbeResult, probe_model
from blocktable.sched.draft import Drafts
from blocktable.sched.output import SchedulerOutput

pytestmark = pytest.mark.usefixtures("one_thread")

Model = tuple[Any, ProbeResult]
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
DRAWN = GREEDY.replace(temperature=0.8, seed=11)


class Told:
    """Proposes the continuation of texts it was told, every ``wrong``-th token spoilt."""

    def __init__(self, texts: list[list[int]], wrong: int = 4) -> None:
        self.texts, self.wrong = texts, wrong

    def propose(
        self, rows: RowIds, tokens: TokenIds, num_tokens: Counts, max_drafts: Counts
    ) -> Drafts:
        found = []
        for row, known, most in zip(rows, num_tokens, max_drafts, strict=True):
            have = tokens[row, :known].tolist()
            text = next((t for t in self.texts if t[:known] == have), have)
            guess = text[known : known + most]
            found.append([(t + 1) % VOCAB if (known + k) % self.wrong == 0 else t
                          for k, t in enumerate(guess)])  # fmt: skip
        counts = np.array([len(guess) for guess in found], np.int32)
        return Drafts(counts, np.array([t for guess in found for t in guess], np.int32))


class Wrong(Told):
    """Always proposes as much as it may, and always what will not come."""

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__(texts, wrong=1)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    made = tiny_model(request.param, seed=4)
    yield made, probe_model(made, paged_attention, write_kv)


@pytest.fixture(scope="module")
def llama() -> Iterator[Model]:
    made = tiny_model("llama", seed=4)
    yield made, probe_model(made, paged_attention, write_kv)


def make(model: Model, **options: Any) -> Engine:
    chosen = {"max_model_len": 56, "max_num_seqs": 8, "block_size": 4, **options}
    layout = plan_layout(model[1], chosen["block_size"], torch.float32)
    requests = 1 if chosen.pop("small", False) else 7
    chosen.setdefault("num_blocks", 1 + requests * layout.blocks_for(56))
    made = EngineOptions(dtype="float32", accelerate=False, **chosen)
    engine = build_engine(LoadedModel(model[0], None, "tiny", owned=False), made, probed=model[1])
    engine.on_schedule = check_output
    return engine


def check_output(output: SchedulerOutput) -> None:
    assert output.num_total == output.num_scheduled.sum()


def serve(
    engine: Engine, params: SamplingParams | list[SamplingParams], asked: list[list[int]]
) -> list[RequestOutput]:
    """All prompts, the last one late; counts every block after each step."""
    each = params if isinstance(params, list) else [params] * len(asked)
    done: dict[str, RequestOutput] = {}
    for i, prompt in enumerate(asked[:-1]):
        engine.add_request(str(i), prompt, each[i], streaming=i % 2 == 0)
    for step in range(1000):
        if step == 3:
            engine.add_request(str(len(asked) - 1), asked[-1], each[-1])
        for output in engine.step():
            done[output.request_id] = output
        check(engine.manager)
        if step > 3 and not engine.has_unfinished:
            break
    check_everything_returned(engine)
    return [done[str(i)] for i in range(len(asked))]


def answers(outputs: list[RequestOutput]) -> list[list[tuple[list[int], Any, Any]]]:
    return [
        [(c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs]
        for output in outputs
    ]


def texts(outputs: list[RequestOutput]) -> list[list[int]]:
    return [o.prompt_token_ids + c.token_ids for o in outputs for c in o.outputs]


WAYS: list[dict[str, Any]] = [
    {},
    {"block_size": 1},
    {"enable_prefix_caching": False},
    {"max_num_batched_tokens": 13},
    {"small": True},
    {"small": True, "preemption": "swap", "num_host_blocks": 60},
]


@pytest.mark.parametrize("params", [GREEDY, DRAWN, DRAWN.replace(top_k=20, top_p=0.9)])
def test_no_token_changes(model: Model, params: SamplingParams) -> None:
    plain = serve(make(model), params, prompts())
    preempted = 0
    for way in WAYS:
        for proposer in (None, Told(texts(plain)), Wrong(texts(plain))):
            engine = make(model, num_draft_tokens=3, draft_ngram_min=1, proposer=proposer, **way)
            assert answers(serve(engine, params, prompts())) == answers(plain), (way, proposer)
            stats = engine.scheduler.stats
            preempted += stats.preemptions
            if isinstance(proposer, Wrong):
                assert stats.drafted_tokens > 0 == stats.accepted_tokens
            elif proposer is not None:
                assert 0.3 < stats.acceptance_rate < 1.0
    assert preempted > 0


def test_accepted_drafts_save_steps(llama: Model) -> None:
    plain = make(llama)
    told = Told(texts(serve(plain, GREEDY, prompts())), wrong=1000)
    engine = make(llama, num_draft_tokens=3, proposer=told)
    serve(engine, GREEDY, prompts())
    assert engine.scheduler.stats.acceptance_rate == 1.0
    assert engine.scheduler.stats.steps <= plain.scheduler.stats.steps // 2


def test_cached_blocks_hold_no_rejected_token(llama: Model) -> None:
    """A second round hits the blocks of prompts and answers alike, and goes on as without any."""
    first = serve(make(llama), GREEDY, prompts())
    longer = [*texts(first)]
    params = GREEDY.replace(max_tokens=6)
    expected = answers(serve(make(llama, enable_prefix_caching=False), params, longer))
    for proposer in (Wrong(texts(first)), Told(texts(first), wrong=3)):
        engine = make(llama, num_draft_tokens=4, proposer=proposer)
        serve(engine, GREEDY, prompts())
        second = serve(engine, params, longer)
        assert answers(second) == expected
        for output in second:
            assert output.num_cached_tokens >= (len(output.prompt_token_ids) - 2) // 4 * 4


MIXED = [
    GREEDY.replace(repetition_penalty=1.3, frequency_penalty=0.2),
    GREEDY.replace(logprobs=2),
    DRAWN.replace(logprobs=0, min_p=0.02),
    DRAWN.replace(n=3),
    GREEDY.replace(logit_bias={5: 4.0}, bad_token_ids=[7]),
    GREEDY.replace(n=2, max_tokens=3),
]


def test_every_kind_of_request(llama: Model) -> None:
    """Penalised rows get no drafts; log probabilities belong to their tokens."""
    plain = serve(make(llama), MIXED, prompts())
    engine = make(llama, num_draft_tokens=3, proposer=Told(texts(plain)))
    found = serve(engine, MIXED, prompts())
    assert answers(found) == answers(plain)
    assert engine.scheduler.stats.accepted_tokens > 0
    for index in (1, 2):
        ours, theirs = found[index].outputs[0], plain[index].outputs[0]
        assert ours.logprobs and theirs.logprobs
        assert [p.chosen.token_id for p in ours.logprobs] == ours.token_ids
        assert [p.chosen.logprob for p in ours.logprobs] == pytest.approx(
            [p.chosen.logprob for p in theirs.logprobs], abs=1e-4
        )
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
    alone = make(llama, num_draft_tokens=3, proposer=Told(texts(plain)))
    serve(alone, MIXED[0], prompts())
    assert alone.scheduler.stats.drafted_tokens == 0


@pytest.mark.parametrize("min_tokens", [0, 6])
def test_stop_ids_and_limits_among_accepted_tokens(llama: Model, min_tokens: int) -> None:
    free = serve(make(llama), GREEDY, prompts())
    ends = [output.outputs[0].token_ids[5] for output in free]
    each = [
        GREEDY.replace(stop_token_ids=[end], min_tokens=min_tokens, max_tokens=8 + i)
        for i, end in enumerate(ends)
    ]
    plain = serve(make(llama), each, prompts())
    told = Told(texts(free) + texts(plain), wrong=1000)
    engine = make(llama, num_draft_tokens=5, proposer=told)
    assert answers(serve(engine, each, prompts())) == answers(plain)
    assert engine.scheduler.stats.accepted_tokens > 0


REPEATS = [
    "one two three, one two three, one two",
    "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return",
    "A B C D. A B C D. A B",
]


def test_stop_strings_in_the_middle_of_accepted_tokens() -> None:
    """On the bundled model, whose drafts the n-gram look-up finds; text, ids and log
    probabilities end where they end without drafts."""
    plain = LLM("smollm2", dtype="float32", num_blocks=100, max_num_seqs=8)
    drafting = LLM(
        plain.engine.runner.model, tokenizer=plain.tokenizer, num_blocks=100, max_num_seqs=8,
        dtype="float32", num_draft_tokens=5, accelerate=False,
    )  # fmt: skip
    asked = [plain.encode(text) for text in REPEATS]
    base = GREEDY.replace(max_tokens=14)
    kinds = [
        base.replace(stop=["three, one", "a + b\n", "C D. A"], logprobs=1),
        base.replace(stop=[" two"], min_tokens=7), DRAWN.replace(temperature=0.3, max_tokens=8),
        base.replace(stop=["B C"], include_stop_str_in_output=True, max_tokens=5),
    ]  # fmt: skip
    for params in kinds:
        expected, found = (llm.generate(asked, params) for llm in (plain, drafting))
        assert answers(found) == answers(expected)
        for ours, theirs in zip(found, expected, strict=True):
            for one, other in zip(ours.outputs, theirs.outputs, strict=True):
                assert one.text == other.text
                assert one.logprobs is None or len(one.logprobs) == len(one.token_ids)
        if len(params.stop_strings) > 1:
            streamed = {o.request_id: o for o in drafting.stream(asked, params)}
            assert answers([streamed[str(i)] for i in range(len(asked))]) == answers(expected)
            assert any(c.finish_reason == "stop" for o in expected for c in o.outputs)
    stats = drafting.stats()["scheduler"]
    assert stats.acceptance_rate > 0.25
    check_everything_returned(drafting.engine)


class DraftModel:
    """The hook as a user would fill it: a model that continues each row greedily."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.inference_mode()
    def propose(
        self, rows: RowIds, tokens: TokenIds, num_tokens: Counts, max_drafts: Counts
    ) -> Drafts:
        made: list[int] = []
        for row, known, most in zip(rows, num_tokens, max_drafts, strict=True):
            text = tokens[row, :known].tolist()
            for _ in range(most):
                logits = self.model(torch.tensor([text]), use_cache=False).logits
                text.append(int(logits[0, -1].argmax()))
            made += text[known:]
        return Drafts(max_drafts, np.array(made, np.int32))


@pytest.mark.parametrize("params", [GREEDY, DRAWN])
def test_a_draft_model(llama: Model, params: SamplingParams) -> None:
    asked = prompts()[:4]
    expected = answers(serve(make(llama), params, asked))
    for draft_model in (tiny_model("llama", seed=4), tiny_model("qwen2", seed=5)):
        engine = make(llama, num_draft_tokens=2, proposer=DraftModel(draft_model))
        assert answers(serve(engine, params, asked)) == expected
        if params is GREEDY and draft_model.config.model_type == "llama":
            assert engine.scheduler.stats.acceptance_rate == 1.0


def test_the_gpu_runner_launches_steps_with_drafts(llama: Model) -> None:
    """On a CPU, with a stand-in for its attention: inputs, tables and the lines of the logits."""
    plain = serve(make(llama), GREEDY, prompts())
    steps: list[SchedulerOutput] = []

    def attend(query: Any, k: Any, v: Any, table: Any, starts: Any, lens: Any, **rest: Any) -> Any:
        kept = {name: rest[name] for name in rest if name not in ("plan", "out")}
        count, rows = int(starts[-1]), torch.from_numpy(steps[-1].rows).long()
        made: Any = cpu.paged_attention(query[:count], k, v, table[rows], starts, lens, **kept)
        out = torch.zeros(*query.shape[:2], v.shape[-1])  # a single token is padded to two
        out[:count] = made
        return rest["out"].copy_(out) if rest.get("out") is not None else out

    for proposer in (Told(texts(plain)), Wrong(texts(plain))):
        engine = with_gpu_runner(llama, proposer, attend)
        engine.on_schedule = steps.append
        assert answers(serve(engine, GREEDY, prompts())) == answers(plain)
        assert engine.scheduler.stats.drafted_tokens > 0


def with_gpu_runner(model: Model, proposer: Told, attend: Callable[..., Any]) -> Engine:
    options = EngineOptions(
        dtype="float32", accelerate=False, max_model_len=56, max_num_seqs=8, block_size=4,
        num_blocks=120, num_draft_tokens=3, proposer=proposer,
    )  # fmt: skip
    loaded = LoadedModel(model[0], None, "tiny", owned=False)
    prepared = prepare_engine(loaded, options, probed=model[1])
    parts = (*model, prepared.layout, prepared.config)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 2048, "compile": False}

    def wrap(inner: Any) -> GraphRunner:
        return GraphRunner(*parts, inner.manager, attend=attend, write=cpu.write_kv, **limits)

    return assemble_engine(prepared, wrap=wrap)


def test_refusals(llama: Model) -> None:
    for options, word in (
        ({"num_draft_tokens": -1}, "num_draft_tokens"),
        ({"proposer": Told([])}, "proposer needs"),
        ({"num_draft_tokens": 2, "async_steps": True}, "async_steps"),
        ({"num_draft_tokens": 2, "tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"num_draft_tokens": 2, "draft_ngram_min": 5}, "draft_ngram_min 5"),
    ):
        with pytest.raises(ConfigError, match=word):
            make(llama, **options)
    with pytest.raises(ConfigError, match="keeps states"):
        LLM(tiny_model("mamba2"), num_blocks=40, num_draft_tokens=2)


def test_a_proposer_that_answers_nonsense_is_named(llama: Model) -> None:
    texts = [prompts()[0] + [VOCAB + 5] * 20]
    engine = make(llama, num_draft_tokens=2, proposer=Nonsense(texts))
    engine.add_request("a", prompts()[0], GREEDY)
    with pytest.raises(ConfigError, match="vocabulary has 96"):
        while engine.has_unfinished:
            engine.step()
    engine.abort(["a"])
    check(engine.manager)


class Nonsense(Told):
    def propose(
        self, rows: RowIds, tokens: TokenIds, num_tokens: Counts, max_drafts: Counts
    ) -> Drafts:
        ones = np.minimum(max_drafts, 1)
        return Drafts(ones, np.full(int(ones.sum()), VOCAB, np.int32))

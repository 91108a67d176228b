"""The engine's steps by libraries, on stand-ins: which steps go to them, through which tables.

The runner is the GPU's, on a CPU: its graphs then run as they are, on the same fixed buffers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tiny_models import VOCAB

sys.path.insert(0, str(Path(__file__).parent.parent / "attention"))
import library_stand_ins as libraries

from blocktable import SamplingParams
from blocktable.attention import cpu, paged_attention, write_kv
from blocktable.attention.adapters import ADAPTERS, LayerKind, Tables
from blocktable.attention.adapters.choose import Choice
from blocktable.attention.plan import AttentionPlan, PlanConfig
from blocktable.attention.reference import paged_attention_reference
from blocktable.core.errors import ConfigError
from blocktable.core.table import HostTable
from blocktable.engine.build import assemble_engine, prepare_engine
from blocktable.engine.gpu import libraries as serving
from blocktable.engine.gpu.libraries import ChosenPlanner, step_of
from blocktable.engine.gpu.plans import GroupPlanner, GroupShape
from blocktable.engine.gpu.runner import GraphRunner
from blocktable.engine.loader import LoadedModel
from blocktable.engine.options import EngineOptions
from blocktable.engine.probe import probe_model
from blocktable.engine.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

INSTALLED = {"flashinfer": "flashinfer", "flash_attn": "flash_attn_interface"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def model_of(**fields: Any) -> Any:
    """A random model in bfloat16 with heads that the libraries take."""
    config = hf.AutoConfig.for_model(
        fields.pop("kind", "llama"), vocab_size=VOCAB, hidden_size=64, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=512, initializer_range=0.3, **fields,
    )  # fmt: skip
    torch.manual_seed(1)
    return hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def by_reference(query: torch.Tensor, *arrays: torch.Tensor, plan: Any = None, **options: Any):
    """Attention of the plain runner: the stand-ins' arithmetic without their tables."""
    found = paged_attention_reference(query, *arrays, **options)
    return torch.from_numpy(found.out).to(query.dtype)


def run(model: Any, prompts: list[list[int]], wanted: str | None, *, graphs: bool = False,
        chunk: int = 2048) -> list[list[int]]:  # fmt: skip
    """Greedy tokens: by the plain runner (None), or by the GPU's with this attention_backend."""
    options = EngineOptions(
        dtype="bfloat16", accelerate=False, max_model_len=96, max_num_seqs=6, num_blocks=60,
        max_num_batched_tokens=chunk,
    )  # fmt: skip
    probed = probe_model(model, paged_attention, write_kv)
    prepared = prepare_engine(LoadedModel(model, None, "tiny", owned=False), options, probed=probed)
    parts = (model, probed, prepared.layout, prepared.config)

    def wrap(inner: Any) -> ModelRunner:
        if wanted is None:
            return ModelRunner(*parts, inner.manager, attend=by_reference, write=cpu.write_kv)
        runner = GraphRunner(
            *parts, inner.manager, attend=paged_attention, write=cpu.write_kv, max_num_seqs=6,
            max_num_batched_tokens=chunk, compile=False, attention_backend=wanted,
        )  # fmt: skip
        runner._use_graphs = graphs
        runner.warm_up()
        return runner

    engine = assemble_engine(prepared, wrap=wrap)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, GREEDY)
    found: dict[str, list[int]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
    return [found[str(number)] for number in range(len(prompts))]


def some_prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    shared = rng.integers(3, VOCAB, 35).tolist()
    lengths = (1, 16, 40, 7)
    return [rng.integers(3, VOCAB, n).tolist() for n in lengths] + [shared + [5], shared + [9, 11]]


@pytest.fixture
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is asked for is taken without being measured, which needs a GPU."""
    monkeypatch.setattr(serving, "choose", lambda wanted, *_, **__: Choice(*[wanted] * 3))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("chunk", [24, 2048])
@pytest.mark.parametrize("fields", [
    {}, {"kind": "mistral", "sliding_window": 20},
    {"kind": "gemma2", "sliding_window": 20, "query_pre_attn_scalar": 50,
     "layer_types": ["sliding_attention", "full_attention"], "attn_logit_softcapping": 9.0},
], ids=["llama", "mistral", "gemma2"])  # fmt: skip
@pytest.mark.parametrize("name", INSTALLED)
def test_a_forced_library_gives_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, no_timing: None, name: str, fields: dict[str, Any],
    chunk: int, graphs: bool,
) -> None:  # fmt: skip
    libraries.install(monkeypatch, INSTALLED[name])
    model = model_of(**fields)
    calls = count_calls(monkeypatch)
    want = run(model, some_prompts(), None, chunk=chunk)
    assert run(model, some_prompts(), name, graphs=graphs, chunk=chunk) == want
    assert calls and len({tuple(tokens) for tokens in want}) > 3


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    inner = libraries.attend

    def counted(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        calls.append(query.shape[0])
        return inner(query, *args, **options)

    monkeypatch.setattr(libraries, "attend", counted)
    return calls


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"kind": "llama", "attn_implementation": "eager"}, None),
     ({"kind": "gpt_oss", "sliding_window": 20, "num_local_experts": 2, "num_experts_per_tok": 1,
       "layer_types": ["sliding_attention", "full_attention"]}, "self_attn.*attention sinks")],
)  # fmt: skip
def test_a_forced_library_that_cannot_serve_a_layer_is_refused(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], reason: str | None
) -> None:
    libraries.install(monkeypatch, *([] if reason is None else ["flashinfer"]))
    with pytest.raises(ConfigError, match=reason or "FlashInfer is not installed"):
        run(model_of(**fields), [[3, 4]], "flashinfer")


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="one of auto, triton, flashinfer, flash_attn, got 'fa'"):
        EngineOptions(device="cuda", attention_backend="fa")
    with pytest.raises(ConfigError, match="'flashinfer' needs device cuda, got 'cpu'"):
        EngineOptions(attention_backend="flashinfer")
    assert EngineOptions(device="cuda").attention_backend == "auto"


# -- which steps go where -------------------------------------------------------------------------


KIND = LayerKind(
    num_heads=4, num_kv_heads=2, head_size=64, head_size_v=64, block_size=4,
    dtype=torch.float16, cache_dtype=torch.float16, scale=0.125,
)  # fmt: skip


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> HostTable:
    """Rows 0 to 3 begin with the same 10 blocks, rows 4 to 7 share nothing."""
    libraries.install(monkeypatch, "flashinfer")
    host = HostTable(8, 32)
    for row in range(8):
        first = 1 if row < 4 else 40 * row
        blocks = [*range(first, first + 10), *range(400 + 8 * row, 408 + 8 * row)]
        host.append([row], [18], np.array(blocks, np.int32))
    return host


def planner_over(
    table: HostTable, *steps: str, forced: bool = False, window: int | None = None
) -> ChosenPlanner:
    config = PlanConfig(num_q_heads=4, num_kv_heads=2, block_size=4, min_shared_tokens=8,
                        min_saved_tokens=8, sliding_window=window)  # fmt: skip
    ours = GroupPlanner(GroupShape(config, 64), table, torch.device("cpu"), 8)
    device = torch.from_numpy(table.rows)
    library = ADAPTERS["flashinfer"].planner(KIND, Tables(table.rows, device), 8, {})
    return ChosenPlanner(ours, dict.fromkeys(steps, library), forced=forced)


def rows_of(*rows: int) -> np.ndarray:
    return np.array(rows, np.int32)


def step(planner: ChosenPlanner, rows: np.ndarray, queries: list[int]) -> str:
    """Who serves a step outside the graphs: "library" or "ours"."""
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    lens = np.full(len(rows), 50, np.int32)
    plan = planner.upload(planner.host_plan(rows, starts, lens, num_tokens=int(starts[-1])))
    return "library" if hasattr(plan, "attend") else "ours"


@pytest.mark.parametrize(
    ("queries", "name"),
    [([1, 1], "decode"), ([7, 9], "prefill"), ([1, 9], "mixed"), ([1], "decode"), ([2], "prefill")],
)
def test_each_kind_of_step_goes_to_its_own(table: HostTable, queries: list[int], name: str) -> None:
    rows = rows_of(4, 5)[: len(queries)]
    for steps in (("decode",), ("prefill",), ("mixed",), ("decode", "mixed", "prefill")):
        want = "library" if name in steps else "ours"
        assert step(planner_over(table, *steps), rows, queries) == want


def test_shared_prefixes_stay_with_ours_unless_forced(table: HostTable) -> None:
    every = ("decode", "prefill", "mixed")
    assert step(planner_over(table, *every), rows_of(0, 1, 2), [1, 1, 1]) == "ours"
    assert step(planner_over(table, *every), rows_of(0, 1, 2, 5), [1, 1, 1, 9]) == "ours"
    assert step(planner_over(table, *every), rows_of(0, 1), [8, 9]) == "library"
    assert step(planner_over(table, *every), rows_of(0, 5), [1, 1]) == "library"
    for queries in ([1, 1, 1], [1, 1, 9]):
        forced = planner_over(table, *every, forced=True)
        assert step(forced, rows_of(0, 1, 2), queries) == "library"


def test_a_graph_is_served_by_one_of_both_for_good(table: HostTable) -> None:
    """The variant for shared prefixes is ours, the other the library's, at fixed addresses; either
    takes the plan of every step, because another group's sharing may choose the variant."""
    planner = planner_over(table, "decode")
    alone = planner.decode_plan(rows_of(4, 5), np.array([50, 9], np.int32), 4)
    together = planner.decode_plan(rows_of(0, 1, 2), np.array([50, 51, 52], np.int32), 4)
    assert (alone.shares, together.shares) == (False, True)
    for plan in (alone, together):
        for level in range(len(planner.tile_rooms)):
            held = planner.buffers(4, level)
            assert held is planner.buffers(4, level)
            assert held.fits(plan) or level < planner.level(plan)
            held.load(plan)
            assert hasattr(held.plan, "attend") == (not level)
    for never in (planner_over(table, "decode", forced=True),
                  planner_over(table, "decode", window=6)):  # fmt: skip
        assert never.buffers(4, 2) is never.buffers(4, 0)
        assert never.tile_rooms == (0,) and len(planner.tile_rooms) > 1


def test_room_for_tiles_comes_in_levels(table: HostTable) -> None:
    """A graph launches all the tiles it has room for: most plans must not pay for the largest. A
    level takes every plan that is said to be its own, also where a library serves other steps."""
    for planner in (planner_over(table, "prefill"), planner_over(table, "prefill").ours):
        assert planner.tile_rooms == tuple(sorted(set(planner.tile_rooms)))
        plans = [planner.decode_plan(rows_of(*rows), np.array(lens, np.int32), 4)
                 for rows, lens in (((4, 5), [50, 9]), ((0, 1, 2), [50, 51, 52]))]  # fmt: skip
        assert [planner.level(plan) for plan in plans] == [0, 1]
        for plan in plans:
            for level in range(planner.level(plan), len(planner.tile_rooms)):
                assert planner.buffers(4, level).fits(plan)
        assert not planner.buffers(4, 0).fits(plans[1])
    ours = planner_over(table, "prefill").ours
    plan = ours.decode_plan(rows_of(0, 1, 2), np.array([50, 51, 52], np.int32), 4)
    many = plan._replace(tile=np.repeat(plan.tile, ours.tile_rooms[1] + 1, axis=0))
    assert ours.level(many) == len(ours.tile_rooms) - 1 > 1
    assert ours.level(many._replace(tile=np.repeat(plan.tile, 10**4, axis=0))) == 2


def test_ours_is_planned_only_where_it_may_be_needed(
    table: HostTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    inner: Callable[..., AttentionPlan] = GroupPlanner.host_plan

    def counted(self: GroupPlanner, *args: Any, **options: Any) -> AttentionPlan:
        asked.append(1)
        return inner(self, *args, **options)

    monkeypatch.setattr(GroupPlanner, "host_plan", counted)
    forced = planner_over(table, "decode", "prefill", "mixed", forced=True)
    step(forced, rows_of(0, 1), [1, 1])
    forced.decode_plan(rows_of(0, 1), np.array([3, 4], np.int32), 2)
    assert asked == []
    step(planner_over(table, "decode"), rows_of(0, 1), [1, 1])
    assert asked == [1]


def test_nothing_chosen_leaves_our_planner_in_place(table: HostTable) -> None:
    ours = planner_over(table, "decode").ours
    assert serving.with_libraries("triton", [ours, None], [], {}, [], torch.float16, 8) == [
        ours, None,
    ]  # fmt: skip


def test_step_of_counts_padding_as_nothing() -> None:
    from blocktable.attention.adapters import Batch

    rows = rows_of(3, 1)
    assert step_of(Batch.decode(rows, np.array([5, 6], np.int32), 4)) == "decode"
    assert step_of(Batch(rows, np.array([0, 1, 3], np.int32), np.array([5, 6]), 4)) == "mixed"

"""FlashInfer and FlashAttention through the adapters: right, safe in CUDA graphs, how fast.

    python bench/gpu_adapters.py [--kinds plain,window,...] [--parts steps,graphs,...]

For each installed library: every kind of step against float64, with NaN in the null block and in
unused slots; decode buffers captured as padding, then loaded and replayed; times beside ours; what
"auto" decides; and greedy tokens of small random models by each back end. FlashInfer compiles its
kernels the first time: two modules a kind, a minute or so each, at once where there are cores.
A part that fails prints its traceback and the others go on; exit code 1 if any did.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from gpu_attention import ours as our_run
from gpu_cases import DECODE, PREFILL, build, error_against_float64

from blocktable import LLM, SamplingParams
from blocktable.attention.adapters import ADAPTERS, Batch, LayerKind, Tables
from blocktable.attention.adapters.choose import choose, library_attend, our_attend, try_out
from blocktable.attention.adapters.decisions import DecisionFile
from blocktable.attention.adapters.problems import (
    Problem,
    difference,
    make_problems,
    microseconds,
)

CUDA = torch.device("cuda")
PLAIN = LayerKind(
    num_heads=32, num_kv_heads=8, head_size=128, head_size_v=128, block_size=16,
    dtype=torch.bfloat16, cache_dtype=torch.bfloat16, scale=128**-0.5,
)  # fmt: skip
KINDS = {
    "plain": PLAIN,
    "window": replace(PLAIN, sliding_window=1000),
    "softcap": replace(PLAIN, softcap=30.0),
    "both": replace(PLAIN, sliding_window=1000, softcap=30.0),
    "half": replace(PLAIN, dtype=torch.float16, cache_dtype=torch.float16),
    "mha": replace(PLAIN, num_kv_heads=32),
    "page 128": replace(PLAIN, block_size=128),
    "page 544": replace(PLAIN, block_size=544),
    "head 64": replace(PLAIN, head_size=64, head_size_v=64, scale=0.125),
    "head 256": replace(PLAIN, num_heads=8, num_kv_heads=4, head_size=256, head_size_v=256),
}
LIMIT = 1e-2
NEW_TOKENS = 32
FAILED: list[str] = []
RECORD: dict[str, Any] = {}


def guarded(title: str, part: Callable[[], Any]) -> Any:
    """Run a part; its failure is printed and counted, and the rest goes on."""
    start = time.perf_counter()
    try:
        return part()
    except Exception:
        FAILED.append(title)
        print(f"FAILED {title}", flush=True)
        traceback.print_exc()
        return None
    finally:
        took = time.perf_counter() - start
        if took > 5:
            print(f"  ({title}: {took:.0f} s)", flush=True)


def note(title: str, passed: bool, text: str) -> None:
    """One result."""
    if not passed:
        FAILED.append(title)
    RECORD[title] = text
    print(f"{'ok    ' if passed else 'FAILED'} {title}: {text}", flush=True)


def float64_error(kind: LayerKind, problem: Problem, out: torch.Tensor) -> float:
    """Largest relative error over some rows and tokens; NaN and wrong padding count as infinite."""
    batch, worst = problem.batch, 0.0
    group = kind.num_heads // kind.num_kv_heads
    for row in sorted({0, min(1, len(batch.rows) - 1), len(batch.rows) // 2, len(batch.rows) - 1}):
        first, end, length = int(batch.starts[row]), int(batch.starts[row + 1]), batch.lens[row]
        at = torch.arange(int(length), device=CUDA)
        blocks = problem.tables.device[int(batch.rows[row])].long()[at // kind.block_size]
        keys = problem.k_cache[blocks, :, at % kind.block_size].double()
        values = problem.v_cache[blocks, :, at % kind.block_size].double()
        for token in sorted({first, (first + end - 1) // 2, end - 1}):
            position = int(length) - (end - token)
            low = 0 if kind.sliding_window is None else max(0, position - kind.sliding_window + 1)
            q = problem.query[token].double().view(kind.num_kv_heads, group, -1)
            seen = keys[low : position + 1]
            scores = torch.einsum("hgd,lhd->hgl", q, seen) * kind.scale
            if kind.softcap is not None:
                scores = kind.softcap * torch.tanh(scores / kind.softcap)
            weights = torch.softmax(scores, -1)
            want = torch.einsum("hgl,lhd->hgd", weights, values[low : position + 1])
            got = out[token].double().view_as(want)
            error = float((got - want).norm() / want.norm())
            worst = max(worst, error if error == error else float("inf"))
    dead = out[int(batch.starts[-1]) :]
    return worst if not dead.numel() or bool((dead == 0).all()) else float("inf")


def without_nan(problem: Problem) -> Problem:
    """The same step with numbers in the null block and in unused slots."""
    k, v = (cache.clone().nan_to_num_(nan=0.5) for cache in (problem.k_cache, problem.v_cache))
    both = torch.stack([k, v], dim=1)
    return problem._replace(k_cache=both[:, 0], v_cache=both[:, 1])


def steps(kind_name: str, name: str) -> None:
    """Every kind of step, planned for one call; decoding also through graph buffers."""
    kind = KINDS[kind_name]
    for step, problem in make_problems(kind, CUDA).items():
        for in_graph in (False, True) if step == "decode" else (False,):
            title = f"{name} | {kind_name} | {step}{' | buffers' if in_graph else ''}"

            def part(problem: Problem = problem, in_graph: bool = in_graph,
                     step: str = step, title: str = title) -> None:  # fmt: skip
                attend = library_attend(ADAPTERS[name], kind, problem, in_graph=in_graph)
                args = (problem.query, problem.k_cache, problem.v_cache)
                error = float64_error(kind, problem, attend(*args))
                mine = our_attend(kind, problem, in_graph=in_graph)
                apart = difference(attend(*args), mine(*args))
                theirs_us = microseconds(lambda: attend(*args))
                ours_us = microseconds(lambda: mine(*args))
                ours_error = float64_error(kind, problem, mine(*args))
                text = (
                    f"error {error:.1e}, ours {ours_error:.1e}, apart {apart:.1e}; "
                    f"{theirs_us:.1f} us, ours {ours_us:.1f} us"
                )
                if not error < LIMIT:
                    clean = without_nan(problem)
                    args = (clean.query, clean.k_cache, clean.v_cache)
                    out = attend(*args)
                    rows = (~torch.isfinite(out).flatten(1).all(1)).nonzero().flatten().tolist()
                    text += (f"; without NaN in unused slots {float64_error(kind, clean, out):.1e}"
                             f", tokens not finite then {rows[:8]}")  # fmt: skip
                note(title, error < LIMIT, text)

            guarded(title, part)


def graphs(kind_name: str, name: str) -> None:
    """Captured with padding alone, as the engine's warm-up does, then loaded and replayed for
    batches of other lengths, rows and counts; two sizes whose memory is shared take turns."""
    kind = KINDS[kind_name]
    problem = make_problems(kind, CUDA)["decode"]
    rows, lens = problem.batch.rows, problem.batch.lens[: len(problem.batch.rows)]
    planner = ADAPTERS[name].planner(kind, problem.tables, 32, {})
    captured = {}
    for size in (32, 8):
        buffers = planner.buffers(size)
        buffers.load(Batch.decode(rows[:0], lens[:0], size))
        query = torch.randn((size, kind.num_heads, kind.head_size), device=CUDA).to(kind.dtype)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            buffers.plan.attend(query, problem.k_cache, problem.v_cache)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = buffers.plan.attend(query, problem.k_cache, problem.v_cache)
        captured[size] = (buffers, query, graph, out)
        graph.replay()
        empty = bool((out == 0).all())
        note(f"{name} | {kind_name} | graph of {size}, padding alone", empty, "zeros wanted")
    rng = np.random.default_rng(5)
    for turn in range(6):
        size = 32 if turn % 2 else 8
        buffers, query, graph, out = captured[size]
        count = int(rng.integers(1, size + 1)) if turn < 4 else min(size, len(rows))
        picked = rng.permutation(len(rows))[: min(count, len(rows))].astype(np.int32)
        shorter = np.maximum(lens[picked] - rng.integers(0, 40, len(picked)), 1).astype(np.int32)
        batch = Batch.decode(rows[picked], shorter, size)
        query.copy_(torch.randn_like(query))
        start = time.perf_counter()
        buffers.load(batch)
        host_us = (time.perf_counter() - start) * 1e6
        graph.replay()
        used = problem._replace(query=query, batch=batch)
        # keys behind a shortened length are numbers, not NaN: they must not be seen either
        error = float64_error(kind, used, out)
        title = f"{name} | {kind_name} | graph of {size}, turn {turn}, {len(picked)} rows"
        note(title, error < LIMIT, f"error {error:.1e}, loading took the host {host_us:.0f} us")
    many = Batch.decode(rows, lens, 32)
    buffers, _, graph, _ = captured[32]
    for _ in range(20):  # no step waits for the one before it
        buffers.load(many)
        graph.replay()
    start = time.perf_counter()
    for _ in range(50):
        buffers.load(many)
    waits = (time.perf_counter() - start) * 2e4
    torch.cuda.synchronize()
    print(
        f"       {name} | {kind_name}: load() of 31 rows takes the host {waits:.0f} us", flush=True
    )


def large(name: str) -> None:
    """Full-size cases beside ours, in one run."""
    for case in (DECODE[0], DECODE[1], DECODE[4], DECODE[7], *PREFILL):
        title = f"{name} | {case.name}"

        def part(case: Any = case, title: str = title) -> None:
            built = build(case)[0]
            kind = replace(PLAIN, num_heads=case.heads, num_kv_heads=case.kv_heads)
            rows = np.arange(len(built.lens), dtype=np.int32)
            batch = Batch(rows, built.starts, built.lens, built.query.shape[0])
            tables = Tables(built.host_table, built.table)
            problem = Problem(built.query, built.k_cache, built.v_cache, tables, batch)
            attend = library_attend(ADAPTERS[name], kind, problem, in_graph=case.queries == 1)
            args = (built.query, built.k_cache, built.v_cache)
            error = error_against_float64(built, attend(*args))
            theirs, mine = microseconds(lambda: attend(*args)), microseconds(our_run(built))
            text = f"error {error:.1e}; {theirs:.1f} us, ours {mine:.1f} us ({mine / theirs:.2f}x)"
            note(title, error < LIMIT, text)

        guarded(title, part)
        torch.cuda.empty_cache()


def auto(kind_name: str) -> None:
    """What is measured and decided, and what it costs the first time and later."""
    with tempfile.TemporaryDirectory() as folder:
        file = DecisionFile(Path(folder) / "attention.json")
        start = time.perf_counter()
        choice = choose("auto", KINDS[kind_name], CUDA, decisions=file)
        first = time.perf_counter() - start
        start = time.perf_counter()
        again = choose("auto", KINDS[kind_name], CUDA, decisions=file)
        later = time.perf_counter() - start
        names = [n for n, a in ADAPTERS.items()
                 if a.reason_against(KINDS[kind_name], CUDA) is None]  # fmt: skip
        trials = try_out(KINDS[kind_name], CUDA, names)
    for name, trial in trials.items():
        shown = {step: round(us, 1) for step, us in trial.times.items()}
        print(f"       auto | {kind_name} | {name}: {trial.fault or shown}", flush=True)
    note(f"auto | {kind_name}", choice == again, f"{choice}, {first:.2f} s, then {later:.4f} s")


def small_model(kind: str, dtype: torch.dtype, **fields: Any) -> Any:
    """A random model of 64 ids; the same weights, rounded to bfloat16, in every dtype."""
    config = hf.AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=512, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=128, max_position_embeddings=2048,
        initializer_range=0.04, tie_word_embeddings=False, **fields,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.to(torch.bfloat16).to(dtype).eval().to(CUDA)


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 100},
    "gemma2": {
        "sliding_window": 100, "attn_logit_softcapping": 30.0, "query_pre_attn_scalar": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}  # fmt: skip


def tokens_of(kind: str, dtype: torch.dtype, backend: str, prompts: list[list[int]],
              **options: Any) -> list[list[int]]:  # fmt: skip
    model = small_model(kind, dtype, **MODELS[kind])
    llm = LLM(
        model, device="cuda", dtype=str(dtype).removeprefix("torch."), attention_backend=backend,
        max_model_len=1024, num_blocks=2000, max_num_seqs=24, max_num_batched_tokens=512,
        compile=False, **options,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    runner: Any = llm.engine.runner
    planners = runner._planners
    print(
        f"       {kind} {backend}: {[type(planner).__name__ for planner in planners]}", flush=True
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def agreed(texts: list[list[int]], exact: list[list[int]]) -> float:
    """Tokens that agree before texts part, on average. In 16 bits a random model's texts do part
    from float32, by any back end; by one that read a wrong page, at once."""
    first = [
        next((i for i, (a, b) in enumerate(zip(text, want, strict=True)) if a != b), len(want))
        for text, want in zip(texts, exact, strict=True)
    ]
    return float(np.mean(first))


def engine(name: str, kind: str, dtype: torch.dtype) -> None:
    """Greedy tokens by a library, in graphs and without, beside ours."""
    rng = np.random.default_rng(2)
    lengths = (1, 15, 16, 17, 100, 257, 600, 900, *rng.integers(2, 300, 10).tolist())
    prompts = [rng.integers(3, 64, int(n)).tolist() for n in lengths]
    head = rng.integers(3, 64, 200).tolist()
    prompts += [head + rng.integers(3, 64, 7).tolist() for _ in range(4)]
    exact = tokens_of(kind, torch.float32, "triton", prompts)
    ours = agreed(tokens_of(kind, dtype, "triton", prompts), exact)
    for graphs_on in (True, False):
        title = f"LLM | {name} | {kind} | {str(dtype)[6:]}{'' if graphs_on else ' | no graphs'}"
        theirs = agreed(tokens_of(kind, dtype, name, prompts, cuda_graphs=graphs_on), exact)
        text = f"{theirs:.1f} of {NEW_TOKENS} tokens as in float32, then apart; ours {ours:.1f}"
        note(title, theirs > 0.8 * ours, text)


def compile_all(names: list[str], kinds: list[str]) -> None:
    """Have FlashInfer compile what the kinds need, at once: its compilers are processes."""

    def one(kind_name: str, step: str) -> str:
        start = time.perf_counter()
        problem = make_problems(KINDS[kind_name], CUDA, key_bytes=1 << 20)[step]
        library_attend(ADAPTERS["flashinfer"], KINDS[kind_name], problem, in_graph=step == "decode")
        return f"       compiled {kind_name} {step}: {time.perf_counter() - start:.0f} s"

    if "flashinfer" in names:
        with ThreadPoolExecutor(3) as pool:  # each starts several compilers
            jobs = [
                pool.submit(one, kind, step) for kind in kinds for step in ("decode", "prefill")
            ]
            for job in jobs:
                guarded("compile", lambda job=job: print(job.result(), flush=True))


def main() -> None:
    """Run the parts, the plain kind first, and print what failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="plain,window,softcap,both,half")
    parser.add_argument("--parts", default="steps,graphs,large,auto,engine")
    parser.add_argument("--out", type=Path, default=Path("bench/results/gpu_adapters.json"))
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    kinds, parts = chosen.kinds.split(","), chosen.parts.split(",")
    reasons = {name: adapter.reason_against(PLAIN, CUDA) for name, adapter in ADAPTERS.items()}
    for name, adapter in ADAPTERS.items():
        print(f"{name}: {adapter.versions()}; {reasons[name] or 'able'}", flush=True)
    names = [name for name, reason in reasons.items() if reason is None]
    others = [kind for kind in kinds if kind != "plain"]
    for group in ([["plain"]] if "plain" in kinds else []) + [others]:
        guarded("compile", lambda group=group: compile_all(names, group))
        for kind in group:
            for name in names:
                if "steps" in parts:
                    guarded(f"{name} steps", lambda k=kind, n=name: steps(k, n))
                if "graphs" in parts:
                    guarded(f"{name} graphs", lambda k=kind, n=name: graphs(k, n))
            if "auto" in parts and names:
                guarded(f"auto {kind}", lambda k=kind: auto(k))
        for name in names:
            if "plain" in group and "large" in parts:
                large(name)
            if "engine" in parts:
                run_engine(name, group)
    print(f"\n{len(FAILED)} failed: {FAILED}" if FAILED else "\nall passed", flush=True)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"),
              "versions": {name: adapter.versions() for name, adapter in ADAPTERS.items()},
              "failed": FAILED, "results": RECORD}  # fmt: skip
    chosen.out.write_text(json.dumps(record, indent=1) + "\n")
    raise SystemExit(bool(FAILED))


def run_engine(name: str, kinds: list[str]) -> None:
    """The models whose kernels these kinds have compiled."""
    wanted = {
        "plain": ("llama", torch.bfloat16),
        "half": ("llama", torch.float16),
        "window": ("mistral", torch.bfloat16),
        "both": ("gemma2", torch.bfloat16),
    }
    for kind_name in kinds:
        if kind_name in wanted:
            model, dtype = wanted[kind_name]
            guarded(f"LLM {name} {model}", lambda m=model, d=dtype: engine(name, m, d))


if __name__ == "__main__":
    main()

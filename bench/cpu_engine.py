"""Whole-engine speed on a CPU beside transformers' own generation, SmolLM2-135M, greedy.

    python bench/cpu_engine.py decode --dtype float32          batch 1, 8, 32 beside model.generate
    python bench/cpu_engine.py mixed --dtype float32           64 mixed requests
    python bench/cpu_engine.py shared --requests 16            one 512-token prefix
    python bench/cpu_engine.py first                           command to first token
    python bench/cpu_engine.py outside --requests 32           a decode step outside the model

Each prints one line a case: ours, the peer's and the ratio, measured in one run. ``--peer none``
leaves the peer out; ``--requests`` makes a workload smaller (its peer runs the same). Prompts are
random token ids from seed 0; outputs run to their full length (end-of-sequence ignored). The last
two have no peer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Any

import numpy as np

PREFIX, VOCAB = 512, 49152


def mixed_requests(count: int) -> list[tuple[list[int], int]]:
    """Prompts of 16..512 tokens and outputs of 16..128, uniform, seed 0."""
    rng = np.random.default_rng(0)
    return [
        (rng.integers(10, VOCAB, int(rng.integers(16, 513))).tolist(), int(rng.integers(16, 129)))
        for _ in range(count)
    ]


def shared_requests(count: int) -> list[tuple[list[int], int]]:
    """One prefix of 512 tokens, 16..48 own tokens, 32 outputs."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(10, VOCAB, PREFIX).tolist()
    return [
        (prefix + rng.integers(10, VOCAB, int(rng.integers(16, 49))).tolist(), 32)
        for _ in range(count)
    ]


def run_ours(llm: Any, requests: list[tuple[list[int], int]]) -> float:
    """Seconds to serve all requests at once."""
    from blocktable import SamplingParams

    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for _, n in requests]
    start = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in requests], params)
    took = time.perf_counter() - start
    for output, (_, n) in zip(outputs, requests, strict=True):
        if len(output.outputs[0].token_ids) != n:
            raise SystemExit(f"{output.request_id} gave {len(output.outputs[0].token_ids)} of {n}")
    return took


def peer_model(dtype: str) -> Any:
    """The same weights as transformers serves them, attention by SDPA."""
    from blocktable.engine.loader import begin

    return begin("smollm2").finish(dtype).model


def run_generate_batch(model: Any, requests: list[tuple[list[int], int]]) -> float:
    """Seconds of transformers' continuous batching; outputs of their own length each."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    config.max_new_tokens = max(n for _, n in requests)
    start = time.perf_counter()
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=ContinuousBatchingConfig()
    ) as manager:
        for index, (prompt, n) in enumerate(requests):
            manager.add_request(prompt, request_id=f"r{index}", max_new_tokens=n)
        left = len(requests)
        while left:
            result = manager.get_result(timeout=1)
            left -= result is not None and result.is_finished()
    return time.perf_counter() - start


def run_generate(model: Any, batch: int, prompt: int, tokens: int) -> tuple[float, float]:
    """Seconds of prefill and of decode of one padded batch through ``model.generate``."""
    import torch

    rng = np.random.default_rng(1)
    ids = torch.from_numpy(rng.integers(10, VOCAB, (batch, prompt)))
    times = []
    for count in (1, tokens + 1):
        start = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
            min_new_tokens=count,
        )  # fmt: skip
        times.append(time.perf_counter() - start)
    return times[0], times[1] - times[0]


def run_decode(llm: Any, batch: int, prompt: int, tokens: int) -> tuple[float, float]:
    """Ours: seconds of the steps with prompt tokens, and of those without."""
    from blocktable import SamplingParams

    rng = np.random.default_rng(1)
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=tokens + 1, ignore_eos=True)
    for index, ids in enumerate(rng.integers(10, VOCAB, (batch, prompt)).tolist()):
        engine.add_request(f"d{index}", ids, params, streaming=False)
    start = time.perf_counter()
    engine.step()
    first = time.perf_counter()
    while engine.has_unfinished:
        engine.step()
    done = time.perf_counter()
    if not engine.scheduler.reset_prefix_cache():
        raise SystemExit("blocks are still in use after the last request")
    return first - start, done - first


def decode(args: argparse.Namespace) -> None:
    """Batch 1, 8 and 32; prompts of 16 tokens, and one prefill of 512."""
    llm = make_llm(args)
    model = None if args.peer == "none" else peer_model(args.dtype)
    cases = [(1, 16, args.tokens), (8, 16, args.tokens), (32, 16, args.tokens), (1, 512, 1)]
    for batch, prompt, tokens in cases:
        runs = [run_decode(llm, batch, prompt, tokens) for _ in range(2)]
        best = [min(x) for x in zip(*runs, strict=True)]
        theirs = (float("nan"), float("nan"))
        if model is not None:
            theirs = run_generate(model, batch, prompt, tokens)
        which, work = (0, prompt) if prompt == 512 else (1, batch * tokens)
        name = "prefill 512" if prompt == 512 else f"decode batch {batch}"
        report(f"{name}, {args.dtype}", work / best[which], work / theirs[which], "tokens/s")


def served(args: argparse.Namespace, requests: list[tuple[list[int], int]]) -> None:
    """One workload of many requests, beside generate_batch."""
    tokens = sum(n for _, n in requests)
    seconds = run_ours(make_llm(args), requests)
    theirs = float("nan")
    if args.peer != "none":
        theirs = run_generate_batch(peer_model(args.dtype), requests)
    name = f"{args.workload}: {len(requests)} requests, {args.dtype}, {tokens} output tokens"
    report(f"{name}, {seconds:.1f} s against {theirs:.1f} s", tokens / seconds, tokens / theirs)


def first_token(_: argparse.Namespace) -> None:
    """Command to first token in a fresh process, weights in the page cache; best of 5."""
    code = (
        "from blocktable import LLM, SamplingParams; "
        "llm = LLM('smollm2'); params = SamplingParams(max_tokens=1, temperature=0); "
        "print(llm.generate(['Hello'], params)[0].outputs[0].token_ids, flush=True)"
    )
    times, ends = [], []
    for _attempt in range(5):
        start = time.perf_counter()
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
            if child.stdout is None or not child.stdout.readline():
                raise SystemExit("the process ended without a token")
            times.append(time.perf_counter() - start)
        ends.append(time.perf_counter() - start)
    print(
        f"command to first token: {min(times):.2f} s (all: {[round(t, 2) for t in times]}), "
        f"to the end of the process: {min(ends):.2f} s"
    )


def outside(args: argparse.Namespace) -> None:
    """Share of a decode step that is not the model's forward pass: scheduling, tables, sampling,
    outputs. Least of three rounds; the goal is 5% at 32 requests."""
    llm, requests = make_llm(args), args.requests or 32
    rounds = [decode_times(llm.engine, requests, args.tokens) for _ in range(3)]
    whole, inside = min(rounds, key=lambda times: (times[0] - times[1]) / times[0])
    step, rest = whole / args.tokens * 1e3, (whole - inside) / args.tokens * 1e3
    print(
        f"outside the forward pass: {requests} requests, {args.dtype}: {rest:.2f} of {step:.2f} ms "
        f"a decode step, {100 * rest / step:.1f}%",
        flush=True,
    )


def decode_times(engine: Any, requests: int, tokens: int) -> tuple[float, float]:
    """Seconds of ``tokens`` decode steps, and of the model's forward passes in them."""
    from blocktable import SamplingParams

    model, inside = engine.runner.model, 0.0
    forward = model.forward

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        start = time.perf_counter()
        try:
            return forward(*args, **kwargs)
        finally:
            inside += time.perf_counter() - start

    params = SamplingParams(temperature=0.0, max_tokens=tokens + 1, ignore_eos=True)
    for index, ids in enumerate(np.random.default_rng(1).integers(10, VOCAB, (requests, 16))):
        engine.add_request(f"o{index}", ids.tolist(), params)
    engine.step()
    model.forward = timed
    try:
        start = time.perf_counter()
        while engine.has_unfinished:
            engine.step()
        return time.perf_counter() - start, inside
    finally:
        del model.forward


def make_llm(args: argparse.Namespace) -> Any:
    from blocktable import LLM

    return LLM("smollm2", dtype=args.dtype, max_num_seqs=64)


def report(name: str, ours: float, theirs: float, unit: str = "output tokens/s") -> None:
    print(f"{name}: {ours:.1f} {unit}, peer {theirs:.1f}, ratio {ours / theirs:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU engine speed beside transformers")
    parser.add_argument("workload", choices=["decode", "mixed", "shared", "first", "outside"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--peer", default="transformers", choices=["transformers", "none"])
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    if args.workload == "decode":
        decode(args)
    elif args.workload == "mixed":
        served(args, mixed_requests(args.requests or 64))
    elif args.workload == "shared":
        served(args, shared_requests(args.requests or 16))
    elif args.workload == "outside":
        outside(args)
    else:
        first_token(args)


if __name__ == "__main__":
    main()

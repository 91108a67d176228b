"""The whole engine on one GPU: random weights of real shapes, token ids in, nothing decoded.

    python bench/gpu_engine.py --shape qwen3-0.6b --out bench/results/gpu_engine_qwen3.json
    python bench/gpu_engine.py --shape llama3-8b --workloads mixed,decode,prefix

Workloads (all with ignore_eos):
    mixed   256 requests, prompt and output lengths uniform in 100..1024, temperature 0.6: the very
            requests the peer's figure was measured with (Python's random, seed 0; 133,966 outputs)
    decode  steady decode steps at batch 1, 16, 64 and 256, prompts of 1,024 tokens, 128 outputs
    prefix  256 requests, 4,096 shared and 128 own prompt tokens, 128 outputs

The peer's figures (vLLM 0.25.1 on the same kind of GPU, measured 2026-11-29: FlashAttention 3,
torch.compile, CUDA graphs, asynchronous scheduling, prefix caching, block 16) are printed beside.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from shapes import SHAPES, model_classes  # noqa: E402

from blocktable import LLM, SamplingParams  # noqa: E402

VLLM = {
    ("qwen3-0.6b", "mixed"): {"tok_s": 17658, "tok_s_own_process": 21793},
    ("llama3-8b", "mixed"): {"tok_s": 9438},
    ("qwen3-0.6b", "decode"): {"step_ms": {1: 2.5, 16: 2.6, 64: 4.4, 256: 10.7}},
    ("llama3-8b", "decode"): {"step_ms": {1: 4.96, 16: 5.6, 64: 7.7, 256: 18.1}},
    ("llama3-8b", "prefix"): {"seconds": 5.37, "tok_s": 6097},
}


def build_model(shape: str, device: str, dtype: torch.dtype) -> Any:
    """A transformers model of the shape with random weights, made on the device."""
    config_class, model_class, fields = model_classes(SHAPES[shape])
    config = config_class(**fields, max_position_embeddings=8192, dtype=dtype)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = model_class(config)
        model = model.to_empty(device=device).eval()
    finally:
        torch.set_default_dtype(default)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0) if "norm" in name else weight.normal_(0.0, 0.02)
        model.tie_weights()
        rotary = model.model.rotary_emb
        inverse, _ = rotary.compute_default_rope_parameters(config, device=device)
        rotary.inv_freq = inverse
        rotary.original_inv_freq = inverse
    return model


def run_all(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """Seconds until every request is done; tokens are checked to have all arrived."""
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    for output, wanted in zip(outputs, params, strict=True):
        got = len(output.outputs[0].token_ids)
        if got != wanted.max_tokens:
            raise SystemExit(f"request {output.request_id} gave {got} of {wanted.max_tokens}")
    return seconds


def mixed(llm: LLM, vocab: int, scale: float, repeats: int) -> dict[str, Any]:
    draw = random.Random(0)
    prompts = [
        [draw.randint(0, 10000) % vocab for _ in range(draw.randint(100, 1024))] for _ in range(256)
    ]
    lengths = [max(1, int(draw.randint(100, 1024) * scale)) for _ in prompts]
    prompts = [prompt[: max(1, int(len(prompt) * scale))] for prompt in prompts]
    params = [SamplingParams(max_tokens=n, temperature=0.6, ignore_eos=True) for n in lengths]
    seconds = []
    for _ in range(repeats):
        llm.engine.manager.reset_prefix_cache()
        seconds.append(run_all(llm, prompts, params))
    best = statistics.median(seconds[1:])
    return {"output_tokens": sum(lengths), "seconds": seconds, "tok_s": sum(lengths) / best}


def decode(llm: LLM, vocab: int, batch: int, prompt_len: int, steps: int) -> dict[str, Any]:
    """Mean wall time of a decode step, and the share of it in which the GPU does nothing. (Two
    steps are in flight, so single calls of ``step`` may be short and long in turn.)"""
    rng = np.random.default_rng(batch)
    engine = llm.engine
    engine.manager.reset_prefix_cache()
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
    for i in range(batch):
        engine.add_request(f"d{batch}-{i}", rng.integers(0, vocab, prompt_len).tolist(), params,
                           streaming=False)  # fmt: skip
    times: list[float] = []
    busy = None
    while engine.has_unfinished:
        if len(times) == steps // 2 and busy is None and torch.cuda.is_available():
            busy = _device_ms(engine, 8)
            continue
        before = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - before)
    steady = times[-(steps // 2) + 10 : -4]
    step_ms = 1e3 * statistics.fmean(steady)
    result = {
        "step_ms": step_ms,
        "p10_p90_ms": [1e3 * float(q) for q in np.quantile(steady, (0.1, 0.9))],
    }
    if busy is not None:
        result["device_ms"], result["gpu_idle_share"] = busy, max(0.0, 1 - busy / step_ms)
    return result


def _device_ms(engine: Any, steps: int) -> float:
    """Time of a step's kernels and copies, added up by the profiler."""
    return sum(_kernels(engine, steps).values())


def _kernels(engine: Any, steps: int) -> dict[str, float]:
    """Milliseconds of each kernel in a step, the largest first."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
    return {f"{row.count / steps:g} x {row.key[:90]}": row.self_device_time_total / 1e3 / steps
            for row in rows}  # fmt: skip


def show_kernels(llm: LLM, prompts: list[list[int]], title: str) -> None:
    """What the time of decode steps over these prompts goes to."""
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(f"{title}{i}", prompt, params, streaming=False)
    while llm.engine.scheduler.num_waiting:
        llm.engine.step()
    for _ in range(6):  # the last prompts' prefill
        llm.engine.step()
    kernels = _kernels(llm.engine, 8)
    print(f"{title}: {sum(kernels.values()):.2f} ms a decode step of {len(prompts)}")
    for name, ms in list(kernels.items())[:14]:
        print(f"    {ms:8.3f} ms  {name}")
    while llm.engine.has_unfinished:
        llm.engine.step()


def prefix(llm: LLM, vocab: int, scale: float) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    shared, own, out = int(4096 * scale), int(128 * scale) or 1, int(128 * scale) or 1
    params = SamplingParams(max_tokens=out, temperature=0.0, ignore_eos=True)
    seconds, scheduled = [], []
    llm.engine.on_schedule = lambda output: scheduled.append(
        (time.perf_counter(), output.num_total > len(output.rows))
    )
    for _ in range(3):
        scheduled.clear()
        llm.engine.manager.reset_prefix_cache()
        head = rng.integers(0, vocab, shared).tolist()
        prompts = [head + rng.integers(0, vocab, own).tolist() for _ in range(256)]
        seconds.append(run_all(llm, prompts, [params] * 256))
    llm.engine.on_schedule = None
    times = [at for at, _ in scheduled]
    prefills = sum(prefill for _, prefill in scheduled)
    steps = np.diff(times)[prefills + 2 : -4]  # two steps are in flight
    best = statistics.median(seconds[1:])
    return {"seconds": seconds, "tok_s": 256 * out / best, "prefill_steps": prefills,
            "decode_step_ms": 1e3 * float(steps.mean()) if len(steps) else None}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--workloads", default="mixed,decode,prefix")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink lengths (smoke test)")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=4, help="of mixed; the first warms up")
    parser.add_argument("--start-only", action="store_true", help="stop at the first token")
    parser.add_argument("--profile", action="store_true", help="print a decode step's kernels")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device != "cpu" else torch.float32
    began = time.perf_counter()
    model = build_model(args.shape, args.device, dtype)
    built = time.perf_counter()
    extra = {"num_blocks": 4000} if args.device == "cpu" else {}
    llm = LLM(model, device=args.device, max_num_seqs=256, max_model_len=8192,
              max_num_batched_tokens=8192, accelerate=True,
              compile=not args.no_compile, **extra)  # fmt: skip
    vocab = SHAPES[args.shape]["vocab_size"]
    ready = time.perf_counter()
    llm.generate([list(range(100))], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    first = time.perf_counter()
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": torch.cuda.get_device_name() if args.device != "cpu" else "cpu",
        "command": " ".join(["python", *sys.argv]), "torch": torch.__version__,
        "shape": args.shape, "num_blocks": llm.engine.manager.pool.num_blocks,
        "start_s": {"imports": began - STARTED, "weights": built - began, "engine": ready - built,
                    "first_token": first - ready, "all": first - STARTED},
    }  # fmt: skip
    print(json.dumps(record["start_s"]), flush=True)
    if args.start_only:
        return
    warm = getattr(llm.engine.runner, "warm_up", None)
    if warm is not None:
        before = time.perf_counter()
        warm()
        record["capture_all_s"] = time.perf_counter() - before
        print("capture", record["capture_all_s"], flush=True)
    for name in filter(None, args.workloads.split(",")):
        peer = VLLM.get((args.shape, name))
        if name == "decode":
            found: Any = {}
            for batch in map(int, args.batches.split(",")):
                found[batch] = decode(llm, vocab, batch, max(1, int(1024 * args.scale)),
                                      max(16, int(128 * args.scale)))  # fmt: skip
                print(name, batch, json.dumps(found[batch]), flush=True)
        else:
            found = (
                mixed(llm, vocab, args.scale, args.repeats)
                if name == "mixed"
                else prefix(llm, vocab, args.scale)
            )
            print(name, json.dumps(found), flush=True)
        record[name] = {"ours": found, "vllm 0.25.1": peer}
        print("  vllm 0.25.1", json.dumps(peer), flush=True)
        if args.out:
            args.out.write_text(json.dumps(record, indent=1))
    if args.profile:
        rng = np.random.default_rng(9)
        head = rng.integers(0, vocab, int(4096 * args.scale)).tolist()
        own = [rng.integers(0, vocab, max(1, int(1024 * args.scale))).tolist() for _ in range(256)]
        show_kernels(llm, own[:1], "one request")
        show_kernels(llm, own, "alone")
        show_kernels(llm, [head + one[: len(one) // 8 + 1] for one in own], "behind a prefix")


if __name__ == "__main__":
    main()

"""One model on one rank and on several: equal tokens in float32, and the speed of decoding.

    python bench/ranks.py                       # two GPUs, NCCL; about six minutes
    python bench/ranks.py --device cpu --shape tiny --batches 1,8 --prompt 64 --steps 24

Weights are random and written to a temporary directory, since each rank loads its own part. Every
run is a process of its own; one that fails is reported with its last line and the others go on.

    equal    a small float32 model: greedy tokens of every kind of engine are those of one rank
    decode   the shape in bfloat16 (float32 on a CPU): median wall time of a decode step
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shapes import SHAPES, model_classes

# What NVLink multicast does to shared hosts is not worth its speed; see NCCL's own documentation.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

EAGER = {"compile": False, "cuda_graphs": False}
GRAPHS = {"compile": False, "cuda_graphs": True}
COMPILED = {"compile": True, "cuda_graphs": True}


def kinds(ranks: int, wanted: str = "") -> dict[str, dict[str, Any]]:
    """Engine options of every run whose name matches, by name. A model split by its tensor-parallel
    plan is never compiled."""
    tensor, context = {"tensor_parallel_size": ranks}, {"context_parallel_size": ranks}
    every = {
        "one rank, eager": EAGER,
        "one rank, graphs": GRAPHS,
        "one rank, graphs and compiler": COMPILED,
        f"tensor parallel {ranks}, eager": EAGER | tensor,
        f"tensor parallel {ranks}, graphs": GRAPHS | tensor,
        f"context parallel {ranks}, eager": EAGER | context,
        f"context parallel {ranks}, graphs": GRAPHS | context | {"context_parallel_interleave": 4},
        f"context parallel {ranks}, graphs and compiler": COMPILED | context,
    }
    return {name: options for name, options in every.items() if re.search(wanted, name)}


def write_model(path: Path, shape: str, dtype: str, device: str) -> None:
    """Random weights of a shape, as a Hugging Face directory."""
    import torch

    config_class, model_class, fields = model_classes(SHAPES[shape])
    config = config_class(**fields, max_position_embeddings=32768)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device(device):
        model = model_class(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)


def equal(options: dict[str, Any], model: str, device: str) -> dict[str, Any]:
    """Greedy tokens of prompts in chunks, with shared prefixes, in a pool where some wait."""
    from blocktable import LLM, SamplingParams

    llm = LLM(
        model, device=device, dtype="float32", block_size=16, num_blocks=64, max_model_len=512,
        max_num_seqs=16, max_num_batched_tokens=256, seed=0, **options,
    )  # fmt: skip
    shared = [7 + i % 90 for i in range(140)]
    prompts = [shared + [200 + i, *range(3, 3 + 11 * i)] for i in range(8)] + [[5, 6], [9] * 300]
    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    tokens = []
    for _ in range(2):
        tokens += [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    return {"tokens": tokens, "captured": _captured(llm)}


def decode(
    options: dict[str, Any], model: str, device: str, batches: list[int], prompt: int, steps: int
) -> dict[str, Any]:
    """Median wall time of a steady decode step, at each batch size."""
    from blocktable import LLM

    dtype, most = "float32" if device == "cpu" else "bfloat16", max(batches)
    llm = LLM(
        model, device=device, dtype=dtype, num_blocks=most * ((prompt + steps) // 16 + 2) + 64,
        max_num_seqs=max(most, 2), max_model_len=prompt + steps + 16, max_num_batched_tokens=4096,
        enable_prefix_caching=False, seed=0, rank_timeout=100.0, **options,
    )  # fmt: skip
    found: dict[str, Any] = {}
    for batch in batches:
        step = _step_seconds(llm, batch, prompt, steps)
        found[f"batch {batch}"] = {"step_ms": round(1e3 * step, 4), "tok_s": round(batch / step, 1)}
    return found | {"captured": _captured(llm)}


def _step_seconds(llm: Any, batch: int, prompt: int, steps: int) -> float:
    import numpy as np

    from blocktable import SamplingParams

    rng = np.random.default_rng(batch)
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
    for i in range(batch):
        ids = rng.integers(3, 900, prompt).tolist()
        llm.engine.add_request(f"{batch}-{i}", ids, params, streaming=False)
    times = []
    while llm.engine.has_unfinished:
        before = time.perf_counter()
        llm.engine.step()
        times.append(time.perf_counter() - before)
    return statistics.median(times[-(steps // 2) : -3])


def _captured(llm: Any) -> int:
    captured = getattr(llm.engine.runner, "captured", None)
    return 0 if captured is None else sum(map(len, captured()))


def in_process(work: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run one piece of work in a process of its own; its answer, or what it died of."""
    command = [sys.executable, __file__, "--one", json.dumps(work)]
    root = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1"},
    )  # fmt: skip
    try:
        out, errors = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGABRT)  # every rank writes down where it stands
        _, errors = run.communicate()
        return {"error": f"took more than {seconds:g} s", "stderr": errors[-8000:]}
    answers = [line for line in out.splitlines() if line.startswith("RESULT ")]
    if run.returncode or not answers:
        lines = [line for line in errors.splitlines() if line.strip()] or [f"{run.returncode}"]
        return {"error": lines[-1][:400], "stderr": "\n".join(lines[-40:])}
    return json.loads(answers[-1].removeprefix("RESULT "))


def written(answer: dict[str, Any]) -> None:
    """Without a model there is nothing to compare."""
    if "error" in answer:
        raise SystemExit(
            f"the model could not be written:\n{answer.get('stderr', answer['error'])}"
        )


def one(work: dict[str, Any]) -> None:
    name = work.pop("do")
    if name == "write":
        write_model(Path(work["path"]), work["shape"], work["dtype"], work["device"])
        print("RESULT {}", flush=True)
        return
    answer = {"equal": equal, "decode": decode}[name](**work)
    print("RESULT " + json.dumps(answer), flush=True)


def compare(ranks: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Every kind's tokens beside those of one rank."""
    model = str(folder / "small")
    written(in_process({"do": "write", "path": model, "shape": "tiny", "dtype": "float32",
                        "device": options.device}, 300))  # fmt: skip
    found: dict[str, Any] = {}
    expected = None
    for name, chosen in kinds(ranks, options.kinds).items():
        answer = in_process(
            {"do": "equal", "options": chosen, "model": model, "device": options.device},
            options.limit,
        )
        tokens = answer.pop("tokens", None)
        expected = expected or tokens
        answer["equal"] = tokens is not None and tokens == expected
        if tokens is not None and expected is not None:
            pairs = zip(tokens, expected, strict=True)
            answer["requests_that_differ"] = sum(a != b for a, b in pairs)
        found[name] = answer
        show(name, answer)
    return found


def show(name: str, answer: dict[str, Any]) -> None:
    print(
        f"{name:<42} {json.dumps({k: v for k, v in answer.items() if k != 'stderr'})}", flush=True
    )
    if "stderr" in answer:
        print(answer["stderr"], flush=True)


def measure(ranks: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    model = str(folder / "model")
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    written(in_process({"do": "write", "path": model, "shape": options.shape, "dtype": dtype,
                        "device": options.device}, 300))  # fmt: skip
    found: dict[str, Any] = {}
    for name, chosen in kinds(ranks, options.kinds).items():
        answer = in_process(
            {"do": "decode", "options": chosen, "model": model, "device": options.device,
             "batches": options.batches, "prompt": options.prompt, "steps": options.steps},
            options.limit,
        )  # fmt: skip
        found[name] = answer
        show(name, answer)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--batches", default="1,64", type=lambda s: [int(b) for b in s.split(",")])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of one run")
    parser.add_argument("--kinds", default="", help="a regular expression over the runs' names")
    parser.add_argument("--only", choices=("equal", "decode"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(json.loads(options.one))
        return
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "device": options.device,
        "shape": options.shape, "ranks": options.ranks, "prompt": options.prompt,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "decode":
            results["equal"] = compare(options.ranks, Path(folder), options)
        if options.only != "equal":
            results["decode"] = measure(options.ranks, Path(folder), options)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    if not all(answer["equal"] for answer in results.get("equal", {}).values()):
        raise SystemExit("some tokens differ from those of one rank")


if __name__ == "__main__":
    main()

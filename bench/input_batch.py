"""Removing a quarter of a batch and closing the gaps, beside vLLM's InputBatch where importable.

    python bench/input_batch.py [--rows 1024] [--tokens 1000]

Each round builds both batches anew, removes the same random quarter from each and condenses; the
rounds alternate, so that a slower moment slows both. Prints medians in microseconds.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from blocktable.device.block_table import MultiGroupBlockTable
from blocktable.device.input_batch import BatchRequest, InputBatch

BLOCK = 16


def ours(rows: int, tokens: int, gone: list[int]) -> Callable[[], None]:
    """A full batch of ours, and the work to time."""
    table = MultiGroupBlockTable(rows, 4096, 8192, "cpu", [BLOCK])
    batch = InputBatch(rows, 4096, table)
    prompt, blocks = np.zeros(tokens, np.int32), np.arange(1, -(-tokens // BLOCK) + 1)
    ids = [f"request-{i}" for i in range(rows)]
    batch.add([BatchRequest(name, prompt, [blocks]) for name in ids])
    table.commit_block_table(rows)
    names = [ids[i] for i in gone]

    def work() -> None:
        batch.remove(names)
        batch.condense()

    return work


def theirs(rows: int, tokens: int, gone: list[int]) -> Callable[[], None]:
    """The same with vLLM's classes."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_input_batch import InputBatch as Theirs

    batch = Theirs(rows, 4096, 8192, torch.device("cpu"), 32000, [BLOCK], [BLOCK])
    blocks = list(range(1, -(-tokens // BLOCK) + 1))
    ids = [f"request-{i}" for i in range(rows)]
    for name in ids:
        batch.add_request(
            CachedRequestState(
                name, [0] * tokens, [], SamplingParams(temperature=0.5), None, (blocks,), 0, []
            )
        )
    names = [ids[i] for i in gone]

    def work() -> None:
        for name in names:
            batch.remove_request(name)
        batch.condense()

    return work


def timed(work: Callable[[], None]) -> float:
    """Microseconds of one call, with the garbage collector held off."""
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    work()
    stop = time.perf_counter()
    gc.enable()
    return 1e6 * (stop - start)


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    contenders = {"ours_us": ours}
    if importlib.util.find_spec("vllm") is not None:
        contenders["vllm_us"] = theirs
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        gone = rng.choice(options.rows, options.rows // 4, replace=False).tolist()
        for name, make in contenders.items():
            times[name].append(timed(make(options.rows, options.tokens, gone)))
    found = {name: round(statistics.median(values), 1) for name, values in times.items()}
    print(json.dumps({"rows": options.rows, "tokens": options.tokens, **found}))


if __name__ == "__main__":
    main()

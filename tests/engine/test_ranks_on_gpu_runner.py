"""The GPU runner on several ranks, on a CPU: kernels in Triton's interpreter, ranks as threads.

Runs in a process of its own (the interpreter's switch is read at import).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter import needs_interpreter

SCRIPT = """
import queue, sys, threading
import numpy as np, torch
sys.path[:0] = sys.argv[1:3]
from thread_ranks import ThreadCommunicator, ThreadWorld
from tiny_models import tiny_model
from blocktable import SamplingParams
from blocktable.attention import cpu, paged_attention, write_kv
from blocktable.attention.triton import paged_attention as kernel
from blocktable.engine.build import assemble_engine, prepare_engine
from blocktable.engine.gpu.runner import GraphRunner
from blocktable.engine.loader import LoadedModel
from blocktable.engine.options import EngineOptions
from blocktable.engine.probe import probe_model
from blocktable.parallel.context import ContextRank
from blocktable.parallel.driver import StepWriter
from blocktable.parallel.rank import RankState
from blocktable.parallel.wire import decode_step
from blocktable.ranks.steps import FollowingRunner, LeadingRunner


name, ranks, interleave, depth = sys.argv[3], *map(int, sys.argv[4:])
torch.set_num_threads(1)
one_at_a_time = threading.Lock()  # the interpreter is not for threads

def attend(*args, **kwargs):
    with one_at_a_time:
        return kernel(*args, **kwargs)

def options(size):
    return EngineOptions(
        dtype="float32", accelerate=False, max_model_len=96, max_num_seqs=4, block_size=4,
        num_blocks=60 // size, max_num_batched_tokens=24, context_parallel_size=size,
        context_parallel_interleave=interleave, async_steps=depth > 1, seed=0,
    )

models = [tiny_model(name) for _ in range(ranks + 1)]  # drawn before the threads start

def prepare(size, share):
    model = models.pop()
    probed = probe_model(model, paged_attention, write_kv)
    loaded = LoadedModel(model, None, name, owned=False)
    return prepare_engine(loaded, options(size), probed=probed, share=share)

def gpu_runner(prepared, manager):
    parts = (prepared.loaded.model, prepared.probed, prepared.layout, prepared.config, manager)
    made = GraphRunner(
        *parts, max_num_seqs=4, max_num_batched_tokens=24, compile=False, attend=attend,
        write=cpu.write_kv, share=prepared.share,
    )
    made._use_graphs = True  # without CUDA a graph is its function, called: padding and all
    return made

class Road:  # of messages, in one process
    def __init__(self, roads): self.roads = roads
    def publish(self, data): [road.put(data) for road in self.roads]
    def confirm(self, *about): pass
    def check(self, step): pass

def serve(engine):
    told = {}
    prompts = [[7, 8, 9] * 6 + [11 + i] for i in range(3)] + [[5], list(range(3, 40))]
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=6 + i, temperature=0.0, ignore_eos=True)
        engine.add_request(str(i), prompt, params, streaming=False)
    while engine.has_unfinished:
        for output in engine.step():
            told[output.request_id] = output.outputs[0].token_ids
    return told

def follow(rank, world, road, width):
    communicator = ThreadCommunicator(world, rank)
    prepared = prepare(ranks, ContextRank(communicator, interleave))
    state = RankState(prepared.config, rank=rank, max_num_rows=4, max_model_len=96,
                      free_ids=np.random.default_rng(rank).permutation(
                          np.arange(1, prepared.config.num_blocks)), widths=width.get())
    runner = FollowingRunner(gpu_runner(prepared, state), communicator, depth)
    while (data := road.get()) is not None:
        message = decode_step(data)
        runner.run(state.apply(message))

world, roads, width = ThreadWorld(ranks), [queue.Queue() for _ in range(1, ranks)], queue.Queue()
threads = [
    threading.Thread(target=follow, args=(r, world, roads[r - 1], width), daemon=True)
    for r in range(1, ranks)
]
for thread in threads: thread.start()
communicator = ThreadCommunicator(world, 0)
prepared = prepare(ranks, ContextRank(communicator, interleave))

def wrap(inner):
    runner = gpu_runner(prepared, inner.manager)
    for _ in threads: width.put([t.max_blocks_per_row for t in inner.manager.tables])
    writer = StepWriter(inner.manager.tables, [prepared.config.num_blocks] * ranks, drains=False)
    return LeadingRunner(runner, writer, Road(roads), communicator)

engine = assemble_engine(prepared, wrap=wrap)
steps = {"replayed": 0, "carried on": 0}
_replay = GraphRunner._replay

def replay(self, *step):
    made = _replay(self, *step)
    steps["replayed"] += made is not None
    standing = self._planners[-1]._standing
    steps["carried on"] += standing is not None and standing.age > 0
    return made

GraphRunner._replay = replay
found = serve(engine)
for road in roads: road.put(None)
expected = serve(assemble_engine(prepare(1, None)))
if found != expected:
    raise SystemExit(f"{found} instead of {expected}")
if not steps["replayed"] or (name == "llama" and not steps["carried on"]):
    raise SystemExit("no step went the way of the graphs")
"""


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "ranks", "interleave", "depth"),
    [("llama", 2, 1, 1), ("llama", 3, 2, 2), ("gpt_oss", 2, 4, 2)],
)
def test_text_equals_one_rank_s(name: str, ranks: int, interleave: int, depth: int) -> None:
    tests = Path(__file__).parent.parent
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tests / "parallel"), str(tests / "engine"), name,
         str(ranks), str(interleave), str(depth)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]

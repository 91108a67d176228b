"""Decode plans that are carried on from step to step give what fresh ones give.

Runs in Triton's interpreter, in a process of its own (the switch is read at import).
"""

import os
import subprocess
import sys

from tests.interpreter import needs_interpreter

SCRIPT = """
import numpy as np, torch
from blocktable.attention.reference import paged_attention_reference as reference
from blocktable.attention.triton import paged_attention
from blocktable.attention.plan import PlanConfig
from blocktable.core.table import HostTable
from blocktable.engine.gpu.plans import GroupPlanner, GroupShape


rng = np.random.default_rng(5)
heads, kv_heads, dim, bs, size = 4, 2, 16, 4, 6
config = PlanConfig(num_q_heads=heads, num_kv_heads=kv_heads, block_size=bs, num_workers=16,
                    num_tile_workers=8, min_piece=64, min_tile_piece=16, min_shared_tokens=8,
                    min_saved_tokens=8)
for prefix in (0, 24):
    rows = np.array([5, 0, 3, 2], np.int32)
    lens = np.array([prefix + 3, prefix + 130, prefix + 64, prefix + 16], np.int32)
    table = HostTable(8, 64)
    free = iter(rng.permutation(np.arange(1, 400)).astype(np.int32).tolist())
    shared = [next(free) for _ in range(prefix // bs)]
    for row in rows:
        table.append([row], [50], shared + [next(free) for _ in range(50 - len(shared))])
    caches = torch.randn(2, 400, kv_heads, bs, dim)
    planner = GroupPlanner(GroupShape(config, dim), table, torch.device("cpu"), size)
    standing = 0
    for step in range(5):
        plan = planner.decode_plan(rows, lens, size)
        standing += planner._standing is not None and planner._standing.age == step
        query = torch.randn(size, heads, dim)
        starts = np.minimum(np.arange(size + 1), len(rows)).astype(np.int32)
        padded = np.zeros(size, np.int32)
        padded[: len(rows)] = lens
        device_table = torch.from_numpy(table.rows)
        out = paged_attention(query, caches[0], caches[1], device_table, torch.from_numpy(starts),
                              torch.from_numpy(padded), scale=0.3, plan=planner.upload(plan))
        wide = np.zeros((size, 64), np.int32)
        wide[: len(rows)] = table.rows[rows]
        want = reference(query, caches[0], caches[1], torch.from_numpy(wide),
                         torch.from_numpy(starts), torch.from_numpy(padded), scale=0.3)
        np.testing.assert_allclose(np.asarray(out), np.asarray(want.out), atol=2e-5)
        lens = lens + 1
    if standing != 5:
        raise SystemExit(f"the plan was made anew: {standing}")
    if prefix and not plan.shares:
        raise SystemExit("the shared prefix was not found")
    other = planner.decode_plan(rows[:2], lens[:2], size)
    if planner._standing is None or planner._standing.age:
        raise SystemExit("a changed batch was carried on")
"""


@needs_interpreter
def test_carried_plans_equal_the_reference() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr[-2000:] + run.stdout

"""The one-kernel draw against the tensor form of the same inverse CDF, in Triton's interpreter."""

import json
import os
import subprocess
import sys

from tests.interpreter import needs_interpreter

SCRIPT = """
import json, sys, torch
from blocktable.engine.sampling.draw import draw_plain
from blocktable.engine.sampling.triton_draw import draw_rows

found = []
for vocab in (1, 127, 4096, 4097, 9000):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn((12, vocab), generator=generator) * 3
    uniform = torch.rand(12, generator=generator, dtype=torch.float64)
    uniform[0], uniform[1] = 0.0, 1.0 - 2.0**-53
    temperature = torch.rand(12, generator=generator) * 1.5 + 0.1
    temperature[2] = 0.0
    logits[3, : vocab // 2] = -torch.inf
    min_p = torch.zeros(12)
    min_p[4:8] = torch.tensor([1e-3, 0.05, 0.3, 1.0])
    ours = draw_rows(logits, temperature, min_p, uniform)
    safe = torch.where(temperature == 0, 1.0, temperature)
    theirs = draw_plain(logits.clone() / safe[:, None], uniform, min_p)
    theirs[2] = logits[2].argmax()
    edge = ours[1]  # at the very end of the CDF rounding decides between the last live tokens
    if not (0 <= edge < vocab and torch.isfinite(logits[1, edge])):
        raise SystemExit(f"vocab {vocab}: token {edge} at the end of the CDF")
    ours[1] = theirs[1] = 0
    found.append([ours.tolist(), theirs.tolist()])
print(json.dumps(found))
"""


@needs_interpreter
def test_draws_equal_the_tensor_form() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    for ours, theirs in json.loads(run.stdout):
        assert ours == theirs


SAMPLER = """
import numpy as np, torch
from blocktable import SamplingParams
from blocktable.engine.sampling import Sampler

def draw(kinds, fused):
    sampler = Sampler(len(kinds), 5000, seed=1)
    sampler._fused = fused
    for row, params in enumerate(kinds):
        sampler.add_row(row, SamplingParams(seed=row, **params), [1, 2, 3])
    logits = torch.randn((len(kinds), 5000), generator=torch.Generator().manual_seed(7)) * 3
    rows = np.arange(len(kinds), dtype=np.int32)
    return sampler.sample(logits, rows, np.full(len(kinds), 3)).token_ids.tolist()

plain = [dict(temperature=t, min_p=p) for t in (0.0, 0.3, 1.0) for p in (0.0, 0.1)]
filtered = [dict(temperature=1.0, top_k=20), dict(temperature=0.7, top_p=0.5)]
penalised = [dict(temperature=1.0, presence_penalty=0.5)]
calls = []
import blocktable.engine.sampling.triton_draw as one
real = one.draw_rows
one.draw_rows = lambda *a: calls.append(len(a[0])) or real(*a)
alone = draw(plain, True)
assert calls == [len(plain)], calls  # all rows in one launch, no tensor form of the draw
assert alone == draw(plain, False)
assert draw(plain + filtered + penalised, True) == draw(plain + filtered + penalised, False)
assert draw(plain + filtered, True)[: len(plain)] == alone  # whoever else is in the batch
assert len(calls) == 3, calls
"""


@needs_interpreter
def test_a_gpu_sampler_draws_in_one_launch_and_as_on_a_cpu() -> None:
    subprocess.run(
        [sys.executable, "-c", SAMPLER], text=True, check=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip

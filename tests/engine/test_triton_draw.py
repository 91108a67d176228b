"""The one-kernel draw against the tensor form of the same inverse CDF, in Triton's interpreter."""

import json
import os
import subprocess
import sys

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
    ours = draw_rows(logits, temperature, uniform)
    safe = torch.where(temperature == 0, 1.0, temperature)
    theirs = draw_plain(logits.clone() / safe[:, None], uniform, None)
    theirs[2] = logits[2].argmax()
    edge = ours[1]  # at the very end of the CDF rounding decides between the last live tokens
    if not (0 <= edge < vocab and torch.isfinite(logits[1, edge])):
        raise SystemExit(f"vocab {vocab}: token {edge} at the end of the CDF")
    ours[1] = theirs[1] = 0
    found.append([ours.tolist(), theirs.tolist()])
print(json.dumps(found))
"""


def test_draws_equal_the_tensor_form() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    for ours, theirs in json.loads(run.stdout):
        assert ours == theirs

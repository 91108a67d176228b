"""Layers of one KV cache group that have unequal numbers of query heads, on the GPU runner.

No plan serves such a group, so its rows are gathered. In Triton's interpreter, in a process of its
own; requests come and go, so that table rows are not in the batch's order.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.interpreter import needs_interpreter

SCRIPT = """
import copy, sys
import torch
sys.path.insert(0, sys.argv[1])
from tiny_models import tiny_model
from transformers.models.llama.modeling_llama import LlamaAttention
from blocktable import SamplingParams
from blocktable.attention import cpu, paged_attention, write_kv
from blocktable.attention.triton import paged_attention as kernel
from blocktable.engine.build import assemble_engine, prepare_engine
from blocktable.engine.gpu.runner import GraphRunner
from blocktable.engine.loader import LoadedModel
from blocktable.engine.options import EngineOptions
from blocktable.engine.probe import probe_model

torch.set_num_threads(1)
model = tiny_model("llama")
config = copy.deepcopy(model.config)
config.head_dim, config.num_attention_heads = 8, 8
torch.manual_seed(3)
attention = LlamaAttention(config, 1).eval()
for weight in attention.parameters():
    torch.nn.init.normal_(weight, std=0.3)
model.model.layers[1].self_attn, attention.config = attention, model.config

def serve(on_gpu_runner):
    probed = probe_model(model, paged_attention, write_kv)
    options = EngineOptions(dtype="float32", accelerate=False, max_model_len=64, max_num_seqs=3,
                            num_blocks=40, block_size=4, seed=0)
    prepared = prepare_engine(LoadedModel(model, None, "unequal", owned=False), options,
                              probed=probed)
    parts = (model, prepared.probed, prepared.layout, prepared.config)
    calls = [layer.call.num_heads for layer in probed.layers]
    if calls != [4, 8]:
        raise SystemExit(f"the layers have {calls} query heads")

    def wrap(inner):
        runner = GraphRunner(*parts, inner.manager, max_num_seqs=3, max_num_batched_tokens=64,
                             compile=False, attend=kernel, write=cpu.write_kv)
        if runner._planners != [None]:
            raise SystemExit("a plan serves both layers")
        return runner

    engine = assemble_engine(prepared, wrap=wrap if on_gpu_runner else None)
    told = {}
    for i, (prompt, new) in enumerate([([5, 6, 7], 3), ([9] * 13, 9), ([11, 12] * 8, 7),
                                       ([20] * 6, 8), ([4], 5)]):
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        engine.add_request(str(i), prompt, params, streaming=False)
    while engine.has_unfinished:
        for output in engine.step():
            told[output.request_id] = output.outputs[0].token_ids
    return told

expected, found = serve(False), serve(True)
if found != expected:
    raise SystemExit(f"{found} instead of {expected}")
"""


@needs_interpreter
def test_rows_are_gathered_where_no_plan_names_them() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]

"""`LLM(..., tensor_parallel_size=n)`: the text of one rank, from several; and ranks that fail."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blocktable import LLM, SamplingParams
from blocktable.core.errors import BlocktableError, ConfigError, RankError
from blocktable.engine.options import EngineOptions
from blocktable.parallel.event_stream import EventSubscriber
from blocktable.parallel.events import BlockCounter
from blocktable.plan import plan
from blocktable.ranks import launch, same_model

sys.path.append(str(Path(__file__).parent / "engine"))

from gguf_files import write_model
from tiny_models import tiny_model

ROOT = Path(__file__).parent.parent
OPTIONS = {
    "dtype": "float32", "num_blocks": 24, "max_model_len": 160, "max_num_seqs": 8, "block_size": 8,
    "max_num_batched_tokens": 64, "seed": 0, "rank_timeout": 30.0,
}  # fmt: skip
SHARED = [7, 8, 9, 10] * 5
PROMPTS = [
    SHARED + [i + 20 for i in range(n)] for n in (1, 9, 30, 3)
] + [[11, 12], list(range(3, 90))]  # fmt: skip
PARAMS = [SamplingParams(max_tokens=24 + i, temperature=0.0, ignore_eos=True) for i in range(6)]


def model_directory(path: Path, kv_heads: int, family: str) -> Path:
    import transformers as hf
    from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3Config

    shape = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": kv_heads, "head_dim": 16,
        "max_position_embeddings": 256, "tie_word_embeddings": family == "tied",
    }  # fmt: skip
    more = {
        "biased": {"attention_bias": True, "mlp_bias": True},
        "mixtral": {"num_local_experts": 4},
        "olmo2": {"head_dim": 8},
        "phi": {"head_dim": 8},
        "jamba": {
            "head_dim": 8,
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "pad_token_id": 0,
        },
    }
    kinds = {
        "qwen3": Qwen3Config,
        "tied": Qwen3Config,
        "mixtral": MixtralConfig,
        "olmo2": hf.Olmo2Config,
        "jamba": hf.JambaConfig,
        "phi": hf.PhiConfig,
    }
    torch.manual_seed(0)
    config = kinds.get(family, LlamaConfig)(**shape | more.get(family, {}))
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(path)
    return path


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS)
    again = llm.generate(PROMPTS[:2], PARAMS[:2])  # through the prefix cache
    forks = llm.generate([PROMPTS[1]], SamplingParams(n=3, max_tokens=9, seed=5, ignore_eos=True))
    texts = [output.outputs[0].token_ids for output in [*outputs, *again]]
    return texts + [one.token_ids for one in forks[0].outputs]


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "family", "more"),
    [
        (2, 2, "llama", {}), (4, 2, "llama", {}), (2, 4, "qwen3", {}),
        (2, 2, "llama", {"async_steps": True}), (2, 2, "biased", {}), (2, 4, "tied", {}),
        (2, 2, "mixtral", {}), (4, 2, "olmo2", {}), (4, 2, "jamba", {}),
        (2, 8, "phi", {}),
    ],
    ids=["split", "replicated", "qwen3", "two in flight", "biased", "tied", "experts",
         "heads gathered", "heads not split", "digits in names"],
)  # fmt: skip
def test_text_equals_the_single_rank_run(tmp_path, ranks, kv_heads, family, more):
    """Float32 over gloo, in a pool so small that requests are preempted and recomputed."""
    directory = model_directory(tmp_path, kv_heads, family)
    expected = answers(LLM(str(directory), **OPTIONS))
    llm = LLM(str(directory), tensor_parallel_size=ranks, **OPTIONS, **more)
    try:
        assert answers(llm) == expected
        assert llm.engine.scheduler.stats.preemptions > 0
        made = plan(
            str(directory), gpu="h200", requests=1, context=160, block_size=8, kv_dtype="float32",
            tensor_parallel_size=ranks, weight_bytes=0, activation_bytes=0,
        )  # fmt: skip
        assert made.block_bytes == llm.engine.layout.bytes_per_block
        weights = llm.engine.runner.model.parameters()
        by_plan = any(hasattr(weight, "placements") for weight in weights)
        assert by_plan == (family in ("mixtral", "olmo2", "jamba"))
    finally:
        llm.engine.runner.close_ranks()


def test_a_rank_killed_in_mid_decode_ends_the_engine_with_its_name(tmp_path):
    directory = model_directory(tmp_path, 2, "llama")
    llm = LLM(str(directory), tensor_parallel_size=2, **(OPTIONS | {"rank_timeout": 8.0}))
    children = torch.multiprocessing.active_children()
    try:
        stream = llm.stream([[5, 6, 7]], SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        os.kill(children[0].pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RankError, match=r"rank 1 (died|did not confirm)"):
            llm.engine.step()
            while True:
                llm.engine.step()
        assert time.monotonic() - began < 10.0
    finally:
        llm.engine.runner.close_ranks()


def test_of_four_ranks_the_killed_one_is_named(tmp_path):
    """The collectives of the others fail too, and they say so first."""
    directory = model_directory(tmp_path, 4, "llama")
    llm = LLM(str(directory), tensor_parallel_size=4, **(OPTIONS | {"rank_timeout": 8.0}))
    children = sorted(torch.multiprocessing.active_children(), key=lambda child: child.pid)
    next(llm.stream([[5, 6, 7]], SamplingParams(max_tokens=100, ignore_eos=True)))
    os.kill(children[1].pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RankError, match=r"^rank 2 died at step"):
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=100, ignore_eos=True))
    llm.close()


def test_an_engine_is_closed_once_for_all_and_another_may_follow(tmp_path):
    """A second at the same time is refused and leaves the first as it was; a closed one says so."""
    directory, params = model_directory(tmp_path, 2, "llama"), PARAMS[0]
    first = LLM(str(directory), tensor_parallel_size=2, **OPTIONS)
    expected = first.generate(PROMPTS[0], params)[0].outputs[0].token_ids
    with pytest.raises(ConfigError, match=r"another engine .* is alive .* LLM.close"):
        LLM(str(directory), tensor_parallel_size=2, **OPTIONS)
    assert first.generate(PROMPTS[0], params)[0].outputs[0].token_ids == expected
    first.close()
    first.close()
    with pytest.raises(RankError, match="this engine was closed"):
        first.generate(PROMPTS[0], params)
    options = OPTIONS | {"kv_events": "tcp://127.0.0.1:*"}
    second = LLM(str(directory), tensor_parallel_size=2, **options)
    assert second.generate(PROMPTS[0], params)[0].outputs[0].token_ids == expected
    second.close()
    second.close()
    assert not torch.distributed.is_initialized()
    assert not torch.multiprocessing.active_children()


def test_a_stalled_rank_ends_the_engine_within_its_time(tmp_path):
    """Stopped, not dead: nothing but silence tells. Start-up waits longer than a step may."""
    directory = model_directory(tmp_path, 2, "llama")
    llm = LLM(str(directory), tensor_parallel_size=2, **(OPTIONS | {"rank_timeout": 3.0}))
    children = torch.multiprocessing.active_children()
    try:
        next(llm.stream([[5, 6, 7]], SamplingParams(max_tokens=100, ignore_eos=True)))
        os.kill(children[0].pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RankError, match="rank 1 did not confirm step"):
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=100, ignore_eos=True))
        assert time.monotonic() - began < 20.0
    finally:
        os.kill(children[0].pid, signal.SIGCONT)
        llm.engine.runner.close_ranks()


def test_a_rank_that_cannot_start_is_an_error_of_the_constructor(tmp_path):
    began = time.monotonic()
    with pytest.raises(BlocktableError):
        LLM(str(tmp_path), tensor_parallel_size=2, **(OPTIONS | {"rank_timeout": 8.0}))
    assert time.monotonic() - began < 30.0
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (object(), {}, "not a model object"),
        ("x", {"kv_events": "tcp://*:5557", "enable_prefix_caching": False}, "the prefix cache"),
        ("x", {"num_draft_tokens": 1}, "num_draft_tokens 1 cannot be used"),
        ("x", {"tensor_parallel_size": 0}, "tensor_parallel_size must be in \\[1, "),
    ],
)
def test_what_cannot_be_split_is_refused_before_anything_starts(model, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(model, **({"tensor_parallel_size": 2} | options))


def test_a_gguf_file_is_split_and_its_events_are_published(tmp_path):
    path = str(tmp_path / "tiny.gguf")
    write_model(Path(path), "llama", tiny_model("llama"), "Q8_0")
    options = OPTIONS | {"num_blocks": 40, "kv_events": "tcp://127.0.0.1:*"}
    texts = ["abABCDEFGHIJ" * 3, "abABCDEFGHIJ" * 4]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    expected = [o.outputs[0].text for o in LLM(path, **OPTIONS).generate(texts, params)]
    before = set(Path(tempfile.gettempdir()).glob("blocktable-*"))
    llm = LLM(path, tensor_parallel_size=2, **options)
    try:
        assert set(Path(tempfile.gettempdir()).glob("blocktable-*")) == before
        subscriber = EventSubscriber(llm.engine.publisher.endpoint)
        time.sleep(0.3)
        assert [o.outputs[0].text for o in llm.generate(texts, params)] == expected
        held = BlockCounter()
        while (received := subscriber.receive(1.0)) is not None:
            held.apply(received.batch.events)
        assert len(held) == len(llm.engine.manager.index) > 0
        subscriber.close()
    finally:
        llm.engine.runner.close_ranks()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "torchrun does, but MASTER_PORT is not"),
        ({"MASTER_PORT": "29500"}, "torchrun does, but MASTER_ADDR is not"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT is 'x', no integer"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', no integer"),
        ({"WORLD_SIZE": "1", "MASTER_PORT": "1"}, "torchrun started 1 ranks .WORLD_SIZE., but"),
        ({"RANK": "2", "MASTER_PORT": "1"}, "RANK must be in .0, 1., since WORLD_SIZE is 2, got 2"),
    ],
)
def test_torchruns_variables_left_over_or_wrong_are_named(monkeypatch, variables, message):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"RANK": "0", "WORLD_SIZE": "2"} | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        LLM("x", tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("alive", "message"),
    [(False, "rank 1 died at start-up: .* code -9"), (True, "rank 1 did not join within 0.3 s")],
)
def test_a_process_that_never_joins_is_named(monkeypatch, alive, message):
    """Entering the world waits for everyone: a dead one would be waited for to the end."""
    monkeypatch.setattr(launch, "START_SECONDS", 0.3)
    options = EngineOptions(tensor_parallel_size=2, rank_timeout=0.1)
    worker = SimpleNamespace(is_alive=lambda: alive, exitcode=-9)
    began = time.monotonic()
    with pytest.raises(RankError, match=message):
        launch.wait_for_processes(launch.meet(options), [worker], options)
    assert time.monotonic() - began < 5.0


PLAIN_SCRIPT = """
import sys
from blocktable import LLM, SamplingParams
llm = LLM({model!r}, tensor_parallel_size=2, dtype="float32", num_blocks=20, max_model_len=64)
out = llm.generate([[3, 4, 5]], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
print("tokens", out[0].outputs[0].token_ids)
"""


@pytest.mark.parametrize("place", ["file", "standard input"])
def test_a_script_needs_no_guard_and_no_end(tmp_path, place):
    """Its ranks do not run it again, wherever it came from; what a torchrun long gone has left
    behind is not looked at; and nothing is left for Python to complain of at the end."""
    text = PLAIN_SCRIPT.format(model=str(model_directory(tmp_path / "model", 2, "llama")))
    (tmp_path / "plain.py").write_text(text)
    run = subprocess.run(
        [sys.executable, str(tmp_path / "plain.py") if place == "file" else "-"],
        input=None if place == "file" else text, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "no.such.host"}, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count("tokens [") == 1
    assert "leaked" not in run.stderr


class TwoRanks:
    """Rank 0's communicator where rank 1 always tells the same."""

    def __init__(self, other):
        self.other = other

    def gather_objects(self, value):
        return [value, json.loads(json.dumps(self.other(value)))]


def test_another_configuration_on_a_rank_is_named_with_what_differs():
    config = tiny_model("llama").config
    elsewhere = {"_name_or_path": "/elsewhere", "transformers_version": "5.0", "dtype": "float16"}
    told = []
    same_model.check_config(config, TwoRanks(lambda value: told.append(value) or value))
    moved = tiny_model("llama").config
    moved.update(elsewhere)
    same_model.check_config(moved, TwoRanks(lambda value: told[0]))
    for change, message in [
        ({"intermediate_size": 50}, "intermediate_size is 48 on rank 0 and 50 on rank 1$"),
        ({"a": 1, "model_type": "x"}, "model_type is llama on rank 0 and x on rank 1; a is None"),
        (dict.fromkeys("abcde", 1), "; and 2 more$"),
        ({"long": "y" * 900}, "long is None on rank 0 and y{60}[.]{3} on rank 1$"),
    ]:
        with pytest.raises(ConfigError, match=f"rank 1 has another model than rank 0: .*{message}"):
            same_model.check_config(config, TwoRanks(lambda told, change=change: told | change))


def test_other_weights_under_the_same_configuration_are_told():
    model, other = tiny_model("llama"), tiny_model("llama")
    other.model.layers[1].input_layernorm.weight.data[3] += 1e-3
    told = []
    same_model.check_weights(other, TwoRanks(lambda value: told.append(value) or value))
    same_model.check_weights(model, TwoRanks(lambda value: value))
    with pytest.raises(ConfigError, match="rank 1 has other weights than rank 0"):
        same_model.check_weights(model, TwoRanks(lambda value: told[0]))


SCRIPT = """
import sys
from blocktable import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2, dtype="float32", num_blocks=20, max_model_len=64)
out = llm.generate([[3, 4, 5]], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
print("tokens", out[0].outputs[0].token_ids)
llm.engine.runner.close_ranks()
"""


def torchrun(script: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         str(script), *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_a_rank_with_another_model_ends_the_start_on_all(tmp_path):
    """Its KV cache is of the same geometry, so that nothing else would tell."""
    first = model_directory(tmp_path / "first", 2, "llama")
    second = model_directory(tmp_path / "second", 2, "biased")
    script = tmp_path / "serve.py"
    script.write_text(SCRIPT.replace("sys.argv[1]", "sys.argv[1 + int(os.environ['RANK'])]")
                      .replace("import sys", "import os, sys"))  # fmt: skip
    run = torchrun(script, first, second)
    assert run.returncode != 0 and "tokens" not in run.stdout
    assert run.stderr.count("rank 1 has another model than rank 0: attention_bias is False") == 2


def test_torchrun(tmp_path):
    directory = model_directory(tmp_path / "model", 2, "llama")
    script = tmp_path / "serve.py"
    script.write_text(SCRIPT)
    single = LLM(str(directory), dtype="float32", num_blocks=20, max_model_len=64)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    expected = single.generate([[3, 4, 5]], params)[0].outputs[0].token_ids
    run = torchrun(script, directory)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count("tokens") == 1 and f"tokens {expected}" in run.stdout

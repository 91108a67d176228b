"""`LLM(..., context_parallel_size=n)`: the text of one rank, from ranks that share its KV cache."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from blocktable import LLM, SamplingParams
from blocktable.core.errors import ConfigError, RankError
from blocktable.core.specs import FullAttentionSpec

sys.path.append(str(Path(__file__).parent / "engine"))

from tiny_models import tiny_model

OPTIONS = {
    "dtype": "float32", "max_model_len": 160, "max_num_seqs": 8, "block_size": 8,
    "max_num_batched_tokens": 64, "seed": 0, "rank_timeout": 30.0,
}  # fmt: skip
SHARED = [7, 8, 9, 10] * 9  # more than one block on four ranks
PROMPTS = [
    SHARED + [i + 20 for i in range(n)] for n in (1, 9, 30, 3)
] + [[11, 12], list(range(3, 93))]  # fmt: skip
PARAMS = [SamplingParams(max_tokens=24 + i, temperature=0.0, ignore_eos=True) for i in range(6)]


def saved(path: Path, name: str) -> str:
    tiny_model(name).save_pretrained(path)
    return str(path)


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS)
    again = llm.generate(PROMPTS[:2], PARAMS[:2])  # through the prefix cache
    forks = llm.generate([PROMPTS[1]], SamplingParams(n=3, max_tokens=9, seed=5, ignore_eos=True))
    texts = [output.outputs[0].token_ids for output in [*outputs, *again]]
    return texts + [one.token_ids for one in forks[0].outputs]


@pytest.mark.parametrize(
    ("name", "ranks", "more"),
    [
        ("llama", 2, {"num_blocks": 12}),
        ("llama", 4, {"num_blocks": 7, "context_parallel_interleave": 4}),
        ("llama", 2, {"num_blocks": 12, "preemption": "swap", "num_host_blocks": 40}),
        ("gpt_oss", 2, {"num_blocks": 34, "context_parallel_interleave": 8}),
        ("bamba", 2, {"num_blocks": 12, "async_steps": True}),
    ],
    ids=["two", "four", "swap", "window-and-sinks", "states-async"],
)
def test_text_equals_the_single_rank_run(tmp_path, name, ranks, more):
    """Float32 over gloo: prompts in chunks, shared prefixes, forks, and a pool so small that
    requests are preempted."""
    directory = saved(tmp_path, name)
    expected = answers(LLM(directory, **OPTIONS, num_blocks=200))
    llm = LLM(directory, context_parallel_size=ranks, **OPTIONS, **more)
    try:
        assert answers(llm) == expected
        assert llm.engine.scheduler.stats.preemptions > 0
        for cache in llm.engine.runner.memory.caches.values():
            assert cache.k_cache.shape[2] == OPTIONS["block_size"]  # positions of one rank
    finally:
        llm.engine.runner.close_ranks()


def test_twice_the_ranks_hold_twice_the_tokens(tmp_path):
    directory = saved(tmp_path, "llama")
    options = OPTIONS | {"max_model_len": None, "num_blocks": 9}
    alone = LLM(directory, **options)
    assert alone.engine.max_model_len == 64
    prompt, params = list(range(3, 93)), SamplingParams(max_tokens=30, temperature=0.0)
    expected = LLM(directory, **options | {"num_blocks": 40}).generate([prompt], params)
    llm = LLM(directory, context_parallel_size=2, **options)
    try:
        assert llm.engine.max_model_len == 128 and llm.engine.block_size == 16
        assert llm.engine.block_bytes == alone.engine.block_bytes  # of one rank's memory
        found = llm.generate([prompt], params)
        assert found[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    finally:
        llm.engine.runner.close_ranks()


def test_a_rank_killed_in_mid_decode_ends_the_engine_with_its_name(tmp_path):
    directory = saved(tmp_path, "llama")
    llm = LLM(directory, context_parallel_size=2, **OPTIONS | {"num_blocks": 20, "rank_timeout": 8})
    children = torch.multiprocessing.active_children()
    try:
        stream = llm.stream([[5, 6, 7]], SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        os.kill(children[0].pid, signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 1 (died|did not confirm)"):
            while True:
                llm.engine.step()
    finally:
        llm.engine.runner.close_ranks()


@pytest.mark.parametrize("name", ["mistral", "mamba2"])
def test_a_model_without_full_attention_has_nothing_to_share_out(tmp_path, name):
    directory = saved(tmp_path, name)
    with pytest.raises(ConfigError, match="needs a layer with full attention"):
        LLM(directory, context_parallel_size=2, **OPTIONS, num_blocks=20)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "cannot be combined"),
        ({"context_parallel_interleave": 3}, "interleave 3 does not divide block_size 16"),
        ({"context_parallel_interleave": 0}, "must be in \\[1, "),
        ({"context_parallel_size": -1}, "must be in \\[1, "),
        ({"num_draft_tokens": 2}, "num_draft_tokens 2 cannot be used"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM("x", **({"context_parallel_size": 2} | options))


def test_only_full_attention_is_dealt_out():
    from blocktable.attention import paged_attention, write_kv
    from blocktable.engine.kv_layout import plan_layout
    from blocktable.engine.probe import probe_model

    model = tiny_model("gemma3")
    layout = plan_layout(probe_model(model, paged_attention, write_kv), 8, torch.float32)
    wide = layout.dealt_out(4)
    for before, after in zip(layout.groups, wide.groups, strict=True):
        full = isinstance(before.kv_cache_spec, FullAttentionSpec)
        assert after.kv_cache_spec.block_size == (32 if full else 8)
    assert wide.bytes_per_block == layout.bytes_per_block and layout.dealt_out(1) is layout
    assert wide.blocks_for(64) == sum(
        2 if isinstance(g.kv_cache_spec, FullAttentionSpec) else 8 for g in layout.groups
    )

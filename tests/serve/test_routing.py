"""Routing by prefix: the policy alone, and the hit rate it keeps on a production trace."""

import json

import numpy as np
import pytest

from blocktable.core.errors import ConfigError
from blocktable.core.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from blocktable.manager import KVCacheManager
from blocktable.parallel.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventRecorder,
    external_hashes,
)
from blocktable.serve.routing import PrefixRouter


def stored(*hashes):
    return BlockStored(list(hashes), None, [], 16, None, "GPU", None)


def test_the_longest_prefix_wins_until_its_replica_is_busy():
    router = PrefixRouter(3)
    router.apply(1, [stored(1, 2, 3)])
    router.apply(2, [stored(1)])
    assert router.choose([1, 2, 3, 4]) == (1, 3)
    assert router.choose([1, 9]).replica == 1
    work = [router.begin(router.choose([1, 2, 3, 4 + i]), [1, 2, 3, 4 + i]) for i in range(2)]
    assert work == [1, 1]
    assert router.choose([1, 50]) == (2, 1)
    for one in work:
        router.end(1, one)
    assert router.choose([1, 2, 60]).replica == 1


def test_new_conversations_spread_out():
    router = PrefixRouter(3)
    taken = []
    for first in range(0, 300, 10):
        hashes = list(range(first, first + 10))
        choice = router.choose(hashes)
        router.end(choice.replica, router.begin(choice, hashes))
        taken.append(choice.replica)
    assert [taken.count(r) for r in range(3)] == [10, 10, 10]


def test_what_was_sent_is_expected_until_told_otherwise():
    router = PrefixRouter(2)
    choice = router.choose([1, 2])
    router.end(choice.replica, router.begin(choice, [1, 2]))
    assert router.matched(choice.replica, [1, 2, 3]) == 2
    router.apply(choice.replica, [stored(1, 2), BlockRemoved([2], "GPU")])
    assert router.matched(choice.replica, [1, 2, 3]) == 1
    router.apply(choice.replica, [AllBlocksCleared()])
    assert router.matched(choice.replica, [1, 2, 3]) == 0


def test_a_lost_replica_gets_nothing_more():
    router = PrefixRouter(2)
    router.apply(0, [stored(1, 2)])
    router.lose(0)
    assert router.choose([1, 2]) == (1, 0) and router.alive == [1]
    router.lose(1)
    with pytest.raises(ConfigError, match="no replica"):
        router.choose([1])


def cache(num_blocks):
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8)
    config = KVCacheConfig(num_blocks, (KVCacheGroupSpec(("a",), spec),))
    recorder = EventRecorder(config)
    manager = KVCacheManager(config, max_num_rows=1, max_model_len=8192, seed=0, sink=recorder)
    return manager, recorder


def run_prompt(manager, tokens):
    """Tokens of the prompt that were cached."""
    sequence = manager.sequence(tokens)
    hit = manager.find_hit(sequence)
    manager.admit(0, hit, len(tokens) - hit.num_tokens)
    manager.release(np.array([0], np.int32))
    return hit.num_tokens


def prompts(path, count):
    """The trace's prompts, one block of 16 tokens for each of its blocks of 512."""
    rng = np.random.default_rng(0)
    blocks = {}
    with open(path) as file:
        for _, line in zip(range(count), file, strict=False):
            ids = json.loads(line)["hash_ids"]
            yield np.concatenate(
                [blocks.setdefault(i, rng.integers(3, 30_000, 16)) for i in ids]
                + [rng.integers(3, 30_000, 5)]
            )


@pytest.mark.parametrize("blocks", [1000, 3000], ids=["crowded", "roomy"])
def test_three_replicas_keep_nine_tenths_of_one_big_caches_hits(shared_dir, blocks):
    trace = list(prompts(shared_dir / "traces" / "conversation_trace.jsonl", 600))
    total = sum(len(tokens) for tokens in trace)
    big, _ = cache(3 * blocks + 1)
    whole = sum(run_prompt(big, tokens) for tokens in trace) / total
    rates = {}
    for policy in ("prefix", "round robin"):
        replicas = [cache(blocks + 1) for _ in range(3)]
        router, hits = PrefixRouter(3), 0
        for number, tokens in enumerate(trace):
            manager, recorder = replicas[number % 3]
            if policy == "prefix":
                hashes = external_hashes(replicas[0][0].sequence(tokens).keys())
                choice = router.choose(hashes)
                manager, recorder = replicas[choice.replica]
                work = router.begin(choice, hashes)
            hits += run_prompt(manager, tokens)
            batch = recorder.take()
            if policy == "prefix":
                router.end(choice.replica, work)
                if batch is not None:
                    router.apply(choice.replica, batch.events)
        rates[policy] = hits / total
    print(f"one cache {whole:.3f}, {rates}")
    assert rates["prefix"] >= 0.9 * whole
    assert rates["prefix"] > rates["round robin"]

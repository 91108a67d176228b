"""One scheduler decides, every rank follows with its own blocks, through the bytes of messages."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktable.core.errors import ConfigError, OutOfBlocks, RankError
from blocktable.core.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from blocktable.manager import KVCacheManager
from blocktable.parallel.driver import StepWriter
from blocktable.parallel.handshake import RankGeometry, agree, kv_head_map
from blocktable.parallel.rank import RankState, apply_on_all
from blocktable.parallel.wire import GroupDelta, StepMessage, decode_step, encode_step
from blocktable.sched.config import SchedulerConfig
from blocktable.sched.request import Request
from blocktable.sched.scheduler import Scheduler

HEADS = {"num_kv_heads": 2, "head_size": 4}


def config(num_blocks, *, window=None, block_size=16):
    groups = [KVCacheGroupSpec(("a",), FullAttentionSpec(block_size=block_size, **HEADS))]
    if window:
        spec = SlidingWindowSpec(block_size=block_size, sliding_window=window, **HEADS)
        groups.append(KVCacheGroupSpec(("b",), spec))
    return KVCacheConfig(num_blocks, tuple(groups))


def ints(*values):
    return np.array(values, np.int32)


class World:
    """A scheduler and the ranks that follow it."""

    def __init__(self, cache, *, ranks=4, rows=8, length=512, seed=0, **scheduling):
        rng = np.random.default_rng(seed)
        self.manager = KVCacheManager(cache, max_num_rows=rows, max_model_len=length, seed=0)
        scheduling = {"max_num_seqs": rows, "max_num_batched_tokens": 256} | scheduling
        self.scheduler = Scheduler(SchedulerConfig(**scheduling), self.manager)
        self.states = [
            RankState(
                cache, rank=rank, max_num_rows=rows, max_model_len=length, check_entries=10**6,
                widths=[t.max_blocks_per_row for t in self.manager.tables],
                free_ids=1 + rng.permutation(cache.num_blocks - 1),
            )
            for rank in range(ranks)
        ]  # fmt: skip
        self.writer = StepWriter(self.manager.tables, [cache.num_blocks] * ranks)
        self.rng = rng

    def step(self):
        output = self.scheduler.schedule()
        message = decode_step(encode_step(self.writer.write(output, self.manager.tokens)))
        steps = apply_on_all(self.states, message)
        for state, step in zip(self.states, steps, strict=True):
            self.compare(output, state, step)
        sampled = self.rng.integers(2, 90, len(output.sample_rows)).astype(np.int32)
        return output, self.scheduler.update(output, sampled)

    def compare(self, output, state, step):
        assert np.array_equal(step.rows, output.rows)
        assert np.array_equal(step.num_scheduled, output.num_scheduled)
        assert np.array_equal(step.num_computed, output.num_computed)
        assert np.array_equal(step.sample_index, output.sample_index)
        for mine, theirs in zip(state.tables, self.manager.tables, strict=True):
            assert np.array_equal(mine.rows, state.blocks[theirs.rows])
            assert np.array_equal(mine.counts, theirs.counts)
        for row, first, n in zip(
            output.rows, output.num_computed, output.num_scheduled, strict=True
        ):
            scheduled = slice(first, first + n)
            assert np.array_equal(state.tokens[row, scheduled], self.manager.tokens[row, scheduled])
        assert np.array_equal(step.copies, state.blocks[output.copies])


def request(name, length, *, tokens=20, n=1, base=0):
    ids = (np.arange(length) * 7 + base) % 89 + 2
    return Request(
        request_id=name, prompt_token_ids=ids.astype(np.int32), max_tokens=tokens, n=n,
        ignore_eos=True,
    )  # fmt: skip


def test_four_ranks_of_fifty_blocks():
    """256 tokens take 16 blocks on each rank, other ids on each, equal tables underneath."""
    world = World(config(50))
    world.scheduler.add(request("a", 256))
    world.step()
    taken = [state.tables[0].rows[0, :16].tolist() for state in world.states]
    assert all(len(set(ids)) == 16 and 0 not in ids for ids in taken)
    assert len({tuple(ids) for ids in taken}) == 4
    assert [state.blocks.available for state in world.states] == [33] * 4
    assert len({state.digest for state in world.states}) == 1
    assert len({state.blocks.digest for state in world.states}) == 4


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_follow_a_crowded_schedule(window, seed):
    """Admission, chunked prefill, growth, preemption, forks, shared prefixes, ends, windows."""
    blocks = 19 if window is None else 34
    world = World(config(blocks, window=window), ranks=2, seed=seed, length=256)
    rng = np.random.default_rng(seed)
    for number in range(24):
        length = int(rng.integers(1, 150))
        world.scheduler.add(
            request(f"r{number}", length, tokens=int(rng.integers(1, 60)),
                    n=2 if number % 7 == 3 else 1, base=int(rng.integers(2)))
        )  # fmt: skip
    preempted = 0
    for _ in range(2000):
        if not world.scheduler.has_work:
            break
        output, _ = world.step()
        preempted += len(output.preempted)
        if rng.random() < 0.02:
            world.scheduler.finish([f"r{int(rng.integers(24))}"], "abort")
    assert not world.scheduler.has_work
    assert preempted > 0


def test_smallest_rank_decides_and_its_ids_end_there():
    made = [
        RankGeometry.of(config(n), max_num_rows=4, max_model_len=64).as_dict() for n in (2111, 2055)
    ]
    assert agree(made) == 2055
    manager = KVCacheManager(config(agree(made)), max_num_rows=1, max_model_len=1 << 16, seed=0)
    tokens = np.ones(2054 * 16 + 1, np.int32)
    sequence = manager.sequence(tokens[:-1])
    manager.admit(0, manager.find_hit(sequence), len(tokens) - 1)
    ids = manager.tables[0].rows[0, : manager.tables[0].counts[0]]
    assert (ids.min(), ids.max(), len(set(ids.tolist()))) == (1, 2054, 2054)
    manager.append_tokens(ints(0), ints(5))
    with pytest.raises(OutOfBlocks):
        manager.allocate(ints(0), 1)


def test_other_geometry_is_refused_with_the_ranks_named():
    def geometry(**change):
        spec = FullAttentionSpec(**({"block_size": 16} | HEADS | change))
        cache = KVCacheConfig(9, (KVCacheGroupSpec(("a",), spec),))
        return RankGeometry.of(cache, max_num_rows=4, max_model_len=64).as_dict()

    for change, message in [
        ({"block_size": 32}, "block_size is 16 on rank 0 and 32 on rank 2"),
        ({"num_kv_heads": 1}, "kv_heads is 2 on rank 0 and 1 on rank 2"),
        ({"dtype": "float16"}, "dtype is float32 on rank 0 and float16 on rank 2"),
    ]:
        with pytest.raises(ConfigError, match=message):
            agree([geometry(), geometry(), geometry(**change)])


def append_message(ids, *, sequence=0, row=0, digest=0):
    delta = GroupDelta(
        append_rows=ints(row), append_counts=ints(len(ids)), append_ids=np.array(ids, np.int32)
    )
    return StepMessage(sequence, sequence, digest, (delta,))


def states(*free):
    return [
        RankState(config(50), rank=r, max_num_rows=4, max_model_len=512, free_ids=np.arange(1, n))
        for r, n in enumerate(free)
    ]


def test_all_ranks_are_checked_before_any_takes_a_block():
    ranks = states(50, 50, 12, 50)
    with pytest.raises(RankError, match="rank 2 needs 16 blocks for step 0, but 11 are available"):
        apply_on_all(ranks, append_message(range(1, 17)))
    assert [state.blocks.available for state in ranks] == [49, 49, 11, 49]
    assert all(state.tables[0].counts.sum() == 0 for state in ranks)


def test_the_driver_knows_of_a_short_rank_without_asking():
    world = World(config(50))
    world.writer = StepWriter(world.manager.tables, [50, 50, 50, 12])
    world.scheduler.add(request("a", 256))
    output = world.scheduler.schedule()
    with pytest.raises(RankError, match=r"uses block \d+, but the smallest rank has 12 blocks"):
        world.writer.write(output, world.manager.tokens)


def digest_after(ids):
    rank = states(50)[0]
    rank.blocks.take(np.unique(np.array(ids, np.int32)))
    rank.mirrors[0].apply(append_message(ids).groups[0])
    return rank.digest


def test_lost_repeated_and_overtaken_messages_are_seen():
    first = append_message([1, 2], digest=digest_after([1, 2]))
    rank = states(50)[0]
    rank.apply(first)
    for sequence in (0, 2, 5):
        with pytest.raises(
            RankError, match=f"rank 0 expected message 1 and got message {sequence}"
        ):
            rank.apply(append_message([3], sequence=sequence))


def test_a_diverged_rank_is_named():
    rank = states(50, 50)[1]
    with pytest.raises(RankError, match="rank 1 diverged at step 0"):
        rank.apply(append_message([1, 2], digest=digest_after([1, 3])))


@pytest.mark.parametrize("which", ["own", "mirror", "count", "map"])
def test_a_flipped_bit_is_found_and_its_row_named(which):
    ids = list(range(1, 7))
    rank = states(50)[0]
    rank.apply(append_message(ids, row=2, digest=_digest_row2(ids)))
    if which == "own":
        rank.tables[0].rows[2, 3] ^= 1 << 4
    elif which == "mirror":
        rank.mirrors[0].table.rows[2, 3] ^= 1 << 4
    elif which == "count":
        rank.tables[0].counts[2] ^= 1
    else:
        rank.blocks.own[4] ^= 1 << 4
    with pytest.raises(RankError, match="rank 0, step 1: row 2 of its block table changed"):
        rank.apply(StepMessage(1, 1, _digest_row2(ids), (GroupDelta(),)))


def _digest_row2(ids):
    rank = states(50)[0]
    rank.mirrors[0].apply(append_message(ids, row=2).groups[0])
    return rank.digest


@pytest.mark.parametrize(
    "delta",
    [
        GroupDelta(append_rows=ints(9), append_counts=ints(1), append_ids=ints(1)),
        GroupDelta(append_rows=ints(-1), append_counts=ints(1), append_ids=ints(1)),
        GroupDelta(append_rows=ints(0), append_counts=ints(99), append_ids=np.ones(99, np.int32)),
        GroupDelta(append_rows=ints(0, 1), append_counts=ints(3, -1), append_ids=ints(1, 2)),
        GroupDelta(truncate_rows=ints(7), truncate_counts=ints(0)),
        GroupDelta(set_rows=ints(0), set_columns=ints(5), set_ids=ints(1)),
        GroupDelta(append_rows=ints(0), append_counts=ints(1), append_ids=ints(77)),
        GroupDelta(null_rows=ints(0), null_starts=ints(0), null_stops=ints(2**31 - 1)),
        GroupDelta(null_rows=ints(0), null_starts=ints(1), null_stops=ints(0)),
        GroupDelta(move_from=ints(-1), move_to=ints(0)),
        GroupDelta(truncate_rows=ints(0), truncate_counts=ints(-1)),
        GroupDelta(append_rows=ints(1, 1), append_counts=ints(1, 1), append_ids=ints(1, 2)),
    ],
)
def test_messages_that_make_no_sense_are_rank_errors(delta):
    with pytest.raises(RankError):
        states(50)[0].apply(StepMessage(0, 0, 0, (delta,)))


@pytest.mark.parametrize(
    "columns",
    [
        {"rows": ints(0), "num_scheduled": ints(2**31 - 1)},
        {"rows": ints(0), "num_scheduled": ints(0)},
        {"rows": ints(-1), "num_scheduled": ints(1)},
        {"rows": ints(0), "num_scheduled": ints(1), "sample_index": ints(1)},
        {"rows": ints(0), "num_scheduled": ints(1), "user": ints(-1)},
        {"start_rows": ints(0), "start_positions": ints(-5)},
        {"fork_rows": ints(0), "fork_parents": ints(99)},
    ],
)
def test_batches_that_make_no_sense_are_rank_errors(columns):
    state = states(50)[0]
    with pytest.raises(RankError, match=r"rank 0: step 3: \w+ has -?\d+, outside"):
        state.apply(StepMessage(3, 0, 0, (GroupDelta(),), **columns))
    assert state.digest == 0 and state.blocks.available == 49  # nothing has changed


numbers = st.one_of(st.integers(-2, 9), st.sampled_from([2**31 - 1, -(2**31), 33, 512]))
lists = st.lists(numbers, max_size=4).map(lambda values: ints(*values))


@given(st.lists(lists, min_size=30, max_size=30))
@settings(max_examples=400, deadline=None)
def test_any_numbers_are_applied_or_refused_and_take_no_memory(drawn):
    """Messages of noise: RankError and nothing else."""
    pairs = iter(drawn)
    delta = GroupDelta(*(next(pairs) for _ in GroupDelta._fields))
    message = StepMessage(0, 0, 0, (delta,), *(next(pairs) for _ in StepMessage._fields[4:]))
    tracemalloc.start()
    try:
        states(50)[0].apply(message)
    except RankError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 << 20


def test_kv_heads_are_shared_out_or_replicated():
    """8 query heads, 2 KV heads, 4 ranks: ranks 0 and 1 read KV head 0, ranks 2 and 3 head 1."""
    assert [kv_head_map(8, 2, 4, r).tolist() for r in range(4)] == [[0], [0], [1], [1]]
    assert [kv_head_map(8, 4, 2, r).tolist() for r in range(2)] == [[0, 1], [2, 3]]
    assert [kv_head_map(8, 1, 2, r).tolist() for r in range(2)] == [[0], [0]]
    for hq, hkv, ranks in [(8, 3, 2), (6, 2, 4), (9, 3, 2)]:
        with pytest.raises(ConfigError):
            kv_head_map(hq, hkv, ranks, 0)

"""Requests through the manager: the known faults of this kind of software, and their kind."""

from typing import Any

import numpy as np
import pytest

from blocktable.core.errors import BlockStateError, ConfigError, OutOfBlocks, RequestError, RowError
from blocktable.core.invariants import check
from blocktable.core.specs import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from blocktable.manager import KVCacheManager


def full(size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1)


def manager_of(*specs: KVCacheSpec, blocks: int = 100, rows: int = 8, length: int = 600, **options):
    groups = tuple(KVCacheGroupSpec((), spec) for spec in specs)
    options.setdefault("seed", 0)
    return KVCacheManager(
        KVCacheConfig(blocks, groups), max_num_rows=rows, max_model_len=length, **options
    )


def admit(manager: KVCacheManager, row: int, tokens: list[int], new: int | None = None, **extra):
    """Admit with everything the prompt needs; returns (hit tokens, scheduled tokens)."""
    hit = manager.find_hit(manager.sequence(tokens, **extra))
    count = len(tokens) - hit.num_tokens if new is None else new
    manager.admit(row, hit, count)
    check(manager)
    return hit.num_tokens, count


def row_of(manager: KVCacheManager, row: int, group: int = 0) -> list[int]:
    table = manager.tables[group]
    return table.rows[row, : table.counts[row]].tolist()


def release(manager: KVCacheManager, *rows: int, **extra) -> None:
    manager.release(np.array(rows), **extra)
    check(manager)


@pytest.mark.parametrize(
    ("size", "length", "hit"),
    [(256, 512, 256), (16, 48, 32), (16, 16, 0), (4, 7, 4), (4, 8, 4), (4, 9, 8), (4, 12, 8),
     (1, 5, 4), (17, 35, 34), (16, 15, 0), (16, 17, 16)],
)  # fmt: skip
def test_a_hit_never_covers_the_whole_prompt(size: int, length: int, hit: int) -> None:  # B19
    manager = manager_of(full(size), blocks=2000)
    tokens = list(range(length))
    assert admit(manager, 0, tokens) == (0, length)
    release(manager, 0)
    assert admit(manager, 0, tokens) == (hit, length - hit)


def test_prompts_of_160_and_120_plus_40_tokens_share_seven_blocks() -> None:
    manager = manager_of(full(16))
    prompt = list(range(160))
    admit(manager, 0, prompt)
    assert admit(manager, 1, prompt[:120] + list(range(900, 940)))[0] == 112
    assert row_of(manager, 0)[:7] == row_of(manager, 1)[:7]


def test_released_before_any_forward() -> None:  # case B21 a
    manager, tokens = manager_of(full(16)), list(range(33))
    admit(manager, 0, tokens)
    release(manager, 0, num_computed=0)
    assert admit(manager, 0, tokens) == (0, 33)


def test_aborted_after_its_first_chunk() -> None:  # case B21 b
    manager, tokens = manager_of(full(16)), list(range(49))
    admit(manager, 0, tokens, 16)
    manager.allocate(np.array([0]), np.array([16]))
    release(manager, 0, num_computed=16)
    assert manager.find_hit(manager.sequence(tokens)).num_tokens == 16


def test_two_identical_prompts_in_one_step() -> None:  # case B21 c; the oracle shares (rule 4)
    manager, tokens = manager_of(full(16)), list(range(33))
    admit(manager, 0, tokens)
    assert admit(manager, 1, tokens)[0] == 32
    orphans = manager.rollback(np.array([0]), 0)
    assert sorted(orphans.tolist()) == sorted(row_of(manager, 1)[:2])  # row 1 stands on nothing
    assert manager.find_hit(manager.sequence(tokens)).num_tokens == 0


def test_media_in_the_prompt() -> None:  # case B17
    manager = manager_of(full(16))
    tokens = [1] * 8 + [7] * 32 + [2] * 8
    for image, hit in (("ffaaaa1234", 0), ("ffbbbb1234", 0), ("ffaaaa1234", 32)):
        assert admit(manager, 0, tokens, media=[(8, 32, image)])[0] == hit
        release(manager, 0)
    assert admit(manager, 0, tokens, media=[(24, 16, "ffaaaa1234")])[0] == 0
    assert admit(manager, 1, [1] * 17)[0] == 0


def test_generated_tokens_after_media_chain_on() -> None:
    manager = manager_of(full(4))
    tokens = [1] * 6 + [7] * 3
    admit(manager, 0, tokens, media=[(6, 3, "a")])
    for token in range(8):
        manager.append_tokens(np.array([0]), [token])
        manager.allocate(np.array([0]), 1)
        check(manager)
    again = manager.sequence(tokens + list(range(8)), media=[(6, 3, "a")])
    assert manager.find_hit(again).num_tokens == 16
    assert manager.find_hit(manager.sequence(tokens + list(range(8)))).num_tokens == 4


def test_salt_and_adapter_separate_tenants() -> None:
    manager, tokens = manager_of(full(4)), list(range(20))
    admit(manager, 0, tokens, salt="a")
    admit(manager, 1, tokens, adapter="x")
    for extra, hit in (({"salt": "a"}, 16), ({"adapter": "x"}, 16), ({}, 0), ({"salt": "b"}, 0),
                       ({"salt": "a", "adapter": "x"}, 0)):  # fmt: skip
        assert manager.find_hit(manager.sequence(tokens, **extra)).num_tokens == hit


def test_duplicates_stay_with_who_computed_them() -> None:  # case B05
    manager, prefix = manager_of(full(16)), list(range(32))
    rows = [manager.sequence([*prefix, 100 + i] * 1) for i in range(2)]
    hits = [manager.find_hit(sequence) for sequence in rows]  # before either is admitted
    for row, hit in enumerate(hits):
        manager.admit(row, hit, 33)
    a, b = row_of(manager, 0), row_of(manager, 1)
    assert not set(a) & set(b)
    admit(manager, 2, [7] * 32)
    assert not set(row_of(manager, 2)) & set(a + b)
    assert row_of(manager, 1) == b and manager.stats().cached_keys == 4
    assert manager.stats().cached_blocks == 6


def test_a_partial_block_has_one_writer() -> None:  # case B36, variant
    manager = manager_of(full(16))
    admit(manager, 0, list(range(20)))
    admit(manager, 1, list(range(20)))
    a, b = row_of(manager, 0), row_of(manager, 1)
    assert a[0] == b[0] and a[1] != b[1] and manager.pool.ref[a[0]] == 2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_fork_in_a_window(order: tuple[int, int]) -> None:  # case B36
    window = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=1, sliding_window=32)
    manager = manager_of(window)
    admit(manager, 0, list(range(64)))
    manager.append_tokens(np.array([0]), [1])
    manager.fork(0, np.array([1]))
    live = [b for b in row_of(manager, 0) if b]
    assert (manager.pool.ref[live] == 2).all()
    manager.allocate(np.array([1]), 1)
    check(manager)
    assert not {b for b in row_of(manager, 1)[4:]} & set(live)
    for row in order:
        release(manager, row)
    assert manager.pool.available == 99


@pytest.mark.parametrize("children", [1, 3, 6])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_forks_copy_a_shared_tail_once_each(children: int, length: int) -> None:
    manager = manager_of(full(16))
    admit(manager, 0, list(range(length)))
    rows = np.arange(children + 1)
    manager.fork(0, rows[1:])
    check(manager)
    before = manager.pool.used
    manager.append_tokens(rows, rows)
    manager.allocate(rows, 1)
    check(manager)
    copies = manager.take_copies()
    partial = length % 16 != 0
    assert len(copies.src) == (children if partial else 0)  # the last writer keeps the block
    assert manager.pool.used == before + (children if partial else children + 1)
    tails = manager.tables[0].rows[rows, length // 16]
    assert len(set(tails.tolist())) == children + 1
    assert set(copies.dst.tolist()) <= set(tails.tolist()) and len(set(copies.src.tolist())) <= 1
    release(manager, *rows.tolist())
    assert manager.pool.available == 99


def test_a_fork_that_finds_no_room_changes_nothing() -> None:
    manager = manager_of(full(4), blocks=4)
    admit(manager, 0, list(range(9)))
    manager.fork(0, np.array([1]))
    manager.append_tokens(np.array([0, 1]), [5, 6])
    before = manager.stats(), row_of(manager, 0), row_of(manager, 1)
    with pytest.raises(OutOfBlocks, match="holds 3 blocks and needs 1 more, but 0 are available"):
        manager.allocate(np.array([0, 1]), 1)
    assert (manager.stats(), row_of(manager, 0), row_of(manager, 1)) == before
    assert len(manager.take_copies().src) == 0
    check(manager)


def test_statistics_count_a_request_once() -> None:  # case B40
    manager = manager_of(full(16), blocks=8)
    admit(manager, 0, list(range(33)))  # 32 tokens cached for P
    release(manager, 0)
    start = manager.stats()
    admit(manager, 1, [9] * 40)  # something that fills the pool
    hit = manager.find_hit(manager.sequence(list(range(64))))
    assert hit.num_tokens == 32
    for _ in range(3):
        with pytest.raises(OutOfBlocks):
            manager.admit(2, hit, 32, reserve_blocks=3)
    manager.admit(2, hit, 32)
    release(manager, 1)
    manager.release(np.array([2]))
    manager.admit(2, manager.find_hit(hit.sequence), 64 - 48, resumed=True)
    stats = manager.stats()
    assert stats.query_tokens - start.query_tokens == 40 + 64
    assert stats.hit_tokens - start.hit_tokens == 32 and stats.requests - start.requests == 2


def test_a_hit_that_went_stale_is_refused() -> None:
    manager = manager_of(full(4), blocks=6)
    admit(manager, 0, list(range(13)))
    release(manager, 0)
    hit = manager.find_hit(manager.sequence(list(range(13))))
    admit(manager, 1, [9] * 20)
    release(manager, 1)
    with pytest.raises(BlockStateError, match="no longer has the content"):
        manager.admit(2, hit, 1)
    check(manager)
    manager.invalidate_prefix_cache()
    assert manager.find_hit(manager.sequence([9] * 20)).num_tokens == 0


def test_weights_change_under_running_requests() -> None:
    manager, rows = manager_of(full(4), host_blocks=20), np.array([0, 1])
    admit(manager, 0, list(range(9)))
    admit(manager, 1, list(range(50, 59)))
    swapped = manager.swap_out(1)
    manager.invalidate_prefix_cache()
    manager.swap_in(1, swapped)
    for _ in range(8):
        manager.append_tokens(rows, [1, 1])
        manager.allocate(rows, 1)
    check(manager)
    assert manager.stats().cached_blocks == 0
    release(manager, 0)
    admit(manager, 0, list(range(9)))
    assert manager.stats().cached_blocks == 2  # a new request is keyed again


def test_swap_and_back_keeps_everything() -> None:
    window = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=1, sliding_window=6)
    manager = manager_of(full(4), window, host_blocks=40)
    admit(manager, 0, list(range(30)))
    manager.append_tokens(np.array([0]), [5])
    manager.allocate(np.array([0]), 1)
    shape = [[bool(b) for b in row_of(manager, 0, g)] for g in (0, 1)]
    old = np.concatenate([row_of(manager, 0, g) for g in (0, 1)])
    swapped = manager.swap_out(0)
    assert swapped.plan.device.tolist() == old[old != 0].tolist()
    assert manager.pool.used == 0 and manager.host_pool.used == len(swapped.plan.host)
    plan = manager.swap_in(3, swapped)
    check(manager)
    assert [[bool(b) for b in row_of(manager, 3, g)] for g in (0, 1)] == shape
    assert plan.host.tolist() == swapped.plan.host.tolist() and manager.host_pool.used == 0
    assert manager.tokens[3, :31].tolist() == [*range(30), 5] and manager.num_computed[3] == 31


def test_swap_without_room_changes_nothing() -> None:
    manager = manager_of(full(4), host_blocks=3)
    admit(manager, 0, list(range(30)))
    with pytest.raises(OutOfBlocks):
        manager.swap_out(0)
    assert manager.num_tokens[0] == 30
    check(manager)


@pytest.mark.parametrize("mode", ["none", "all", "align"])
def test_recurrent_states_beside_attention(mode: str) -> None:
    state = MambaSpec(block_size=8, shapes=((4,),), dtypes=("float32",), cache_mode=mode)
    manager = manager_of(full(4), state)
    tokens, one = list(range(40)), np.array([0])
    hit = manager.find_hit(manager.sequence(tokens))
    manager.admit(0, hit, 16)
    assert manager.find_hit(manager.sequence(tokens)).num_tokens == 0  # states are not there yet
    manager.allocate(one, np.array([24]))
    for token in range(30):
        manager.append_tokens(one, [token])
        manager.allocate(one, 1)
        check(manager)
    held = np.count_nonzero(row_of(manager, 0, 1))
    assert held <= {"none": 1, "all": 2, "align": 2}[mode]
    found = manager.find_hit(manager.sequence(tokens + list(range(30)))).num_tokens
    assert found == {"none": 0, "all": 64, "align": 64}[mode]
    short = manager.find_hit(manager.sequence(tokens)).num_tokens
    assert short == {"none": 0, "all": 32, "align": 16}[mode]  # align: only where a chunk ended
    release(manager, 0)
    assert manager.pool.available == 99


def test_a_forked_state_is_copied() -> None:
    state = MambaSpec(block_size=8, shapes=((4,),), dtypes=("float32",))
    manager = manager_of(full(4), state)
    admit(manager, 0, list(range(8)))
    manager.fork(0, np.array([1]))
    manager.append_tokens(np.array([0, 1]), [1, 2])
    manager.allocate(np.array([0, 1]), 1)
    copies = manager.take_copies()
    assert copies.group.tolist() == [1]
    assert row_of(manager, 0, 1) != row_of(manager, 1, 1)


def test_encoder_groups() -> None:
    cross = CrossAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, max_encoder_len=10)
    encoder = EncoderOnlyAttentionSpec(block_size=4, num_kv_heads=1, head_size=1)
    manager = manager_of(full(4), cross, encoder)
    admit(manager, 0, [1, 2, 3])
    assert [len(row_of(manager, 0, g)) for g in range(3)] == [1, 3, 0]
    manager.append_token_lists(np.array([0]), [9], list(range(9)))
    manager.allocate(np.array([0]), 9)
    assert [len(row_of(manager, 0, g)) for g in range(3)] == [3, 3, 0]
    manager.fork(0, np.array([1]))
    assert row_of(manager, 1, 1) == row_of(manager, 0, 1)
    release(manager, 0, 1)
    assert manager.pool.available == 99


def test_drafts_are_never_cached() -> None:
    manager, one = manager_of(full(4)), np.array([0])
    admit(manager, 0, [1, 2, 3])
    manager.append_tokens(one, [4])
    manager.allocate(one, 4)  # one token and three drafts
    assert manager.stats().cached_blocks == 1
    manager.rollback(one, 4)
    manager.append_token_lists(one, [2], [5, 6])
    assert manager.stats().cached_blocks == 1 and manager.num_computed[0] == 4
    check(manager)


@pytest.mark.parametrize(
    "name", ["max_num_rows", "max_model_len", "max_num_batched_tokens", "host_blocks"]
)
@pytest.mark.parametrize("value", [-1, 1.5, True, float("nan"), "x", 10**30, [], {}, np.float64(3)])
def test_sizes_that_are_none_are_named(name: str, value: object) -> None:
    group = KVCacheGroupSpec(("l",), FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8))
    sizes: dict[str, Any] = {"max_num_rows": 4, "max_model_len": 64, name: value}
    with pytest.raises(ConfigError, match=f"{name} must be an integer in"):
        KVCacheManager(KVCacheConfig(12, (group,)), **sizes)


@pytest.mark.parametrize("tokens", [[], [-1], [1.5], list(range(601))])
def test_sequences_that_cannot_be(tokens: list) -> None:  # cases B42, B44
    with pytest.raises(RequestError):
        manager_of(full(4)).sequence(tokens)


def test_wrong_calls_change_nothing() -> None:
    manager = manager_of(full(4), length=20)
    hit = manager.find_hit(manager.sequence([1] * 10))
    manager.admit(0, hit, 10)
    before = manager.stats()
    for wrong, error in (
        (lambda: manager.admit(0, hit, 10), RowError), (lambda: manager.admit(8, hit, 1), RowError),
        (lambda: manager.admit(1, hit, 0), RequestError),
        (lambda: manager.admit(1, hit, 21), RequestError),
        (lambda: manager.allocate(np.array([0]), 11), RowError),
        (lambda: manager.rollback(np.array([0]), 11), RowError),
        (lambda: manager.truncate(np.array([0]), 11), RowError),
        (lambda: manager.fork(1, np.array([2])), RowError),
        (lambda: manager.fork(0, np.array([0])), RowError),
        (lambda: manager.append_token_lists(np.array([0]), [11], [1] * 11), RowError),
        (lambda: manager.append_token_lists(np.array([0]), [1], [1, 2]), RowError),
        (lambda: manager.swap_out(0), ConfigError),
    ):  # fmt: skip
        with pytest.raises(error):
            wrong()
        assert manager.stats() == before
        check(manager)


@pytest.mark.parametrize("size", [1, 3, 16, 17])
@pytest.mark.parametrize("caching", [True, False])
def test_many_requests_leave_nothing_behind(size: int, caching: bool) -> None:
    manager, rng = (
        manager_of(full(size), blocks=900, enable_caching=caching),
        np.random.default_rng(size),
    )
    for _ in range(15):
        lengths = rng.integers(1, 100, 6)
        for row, length in enumerate(lengths.tolist()):
            admit(manager, row, rng.integers(0, 2, length).tolist())
        rows = np.arange(6)
        for _ in range(10):
            manager.append_tokens(rows, rng.integers(0, 2, 6))
            step = manager.begin_step()
            manager.allocate(rows, 1)
            manager.end_step(step)
        check(manager)
        release(manager, *rng.permutation(6).tolist())
        assert manager.pool.available == 899
    assert manager.reset_prefix_cache() and manager.stats().pool.free == 899

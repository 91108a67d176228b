"""A mirror follows any sequence of table operations through the bytes of step messages."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktable.core.table import HostTable
from blocktable.parallel.mirror import MirrorTable, combined_digest, group_delta
from blocktable.parallel.rank_map import BlockMap
from blocktable.parallel.wire import StepMessage, decode_step, encode_step

ROWS, WIDTH = 6, 10


def some_rows(rng, rows):
    return rng.permutation(rows)[: rng.integers(1, len(rows) + 1)].astype(np.int32)


def append(table, rng):
    rows = some_rows(rng, np.arange(ROWS))
    counts = np.minimum(rng.integers(0, 4, len(rows)), WIDTH - table.counts[rows])
    ids = rng.integers(0, 50, counts.sum())
    table.append(rows, counts, ids)


def append_one(table, rng):
    rows = np.flatnonzero(table.counts < WIDTH).astype(np.int32)
    table.append_one(rows, rng.integers(1, 50, len(rows)).astype(np.int32))


def truncate(table, rng):
    rows = some_rows(rng, np.arange(ROWS))
    table.truncate(rows, (table.counts[rows] * rng.random(len(rows))).astype(np.int32))


def clear(table, rng):
    table.clear(some_rows(rng, np.arange(ROWS)))


def write(table, rng):
    rows, columns = np.nonzero(np.arange(WIDTH) < table.counts[:, None])
    if len(rows):
        pick = rng.permutation(len(rows))[:3]
        table.write(rows[pick], columns[pick], rng.integers(1, 50, len(pick)))


def null(table, rng):
    rows = np.flatnonzero(table.counts > 0).astype(np.int32)
    start = (table.counts[rows] * rng.random(len(rows))).astype(np.int32)
    table.null(rows, start, np.minimum(start + 2, table.counts[rows]))


def move(table, rng):
    table.move_rows(*(rng.permutation(ROWS)[:3] for _ in range(2)))


OPERATIONS = [append, append_one, truncate, clear, write, null, move]


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=5), max_size=8),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_mirror_equals_table_after_each_message(seed, steps, drains):
    rng = np.random.default_rng(seed)
    table, mirror, follower = HostTable(ROWS, WIDTH), *(MirrorTable(ROWS, WIDTH) for _ in "ab")
    for operations in steps:
        for operation in operations:
            operation(table, rng)
        change = table.peek()
        released = some_rows(rng, np.arange(ROWS)) if drains else np.zeros(0, np.int32)
        released = released[np.isin(released, change.rows)]
        if not np.isin(released, change.copy_dst).any():
            released = released[~np.isin(released, change.copy_src)]
            released = np.setdiff1d(released, rows_not_rewritten(table, change, released))
        else:
            released = released[:0]
        delta = group_delta(table, change, mirror, released.astype(np.int32))
        table.drain()
        mirror.apply(delta)
        data = encode_step(StepMessage(1, 1, mirror.digest.value, (delta,)))
        follower.apply(decode_step(data).groups[0])
        for copy in (mirror, follower):
            assert np.array_equal(copy.table.rows, table.rows)
            assert np.array_equal(copy.table.counts, table.counts)
            assert copy.digest.verify(table.rows, table.counts) is None
        assert follower.digest.value == mirror.digest.value


def rows_not_rewritten(table, change, rows):
    """A released row was emptied, so all it holds now was written since."""
    whole = change.write_row[(change.write_start == 0)]
    full = [r for r in rows if table.counts[r] == 0 or r in whole]
    written = dict(zip(change.write_row, change.write_stop, strict=True))
    return [r for r in rows if r not in full or written.get(r, 0) < table.counts[r]]


def test_combined_digest_tells_groups_apart():
    tables = [MirrorTable(2, 4) for _ in range(2)]
    empty = combined_digest(tables)
    one = np.array([1], np.int32)
    tables[0].table.append(one, one, one)
    tables[0].digest.append(one, one * 0, one, one)
    assert len({empty, combined_digest(tables), combined_digest(tables[::-1])}) == 3


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_block_map_is_a_bijection_and_its_digest_is_sound(seed):
    rng = np.random.default_rng(seed)
    blocks = BlockMap(40, rng.permutation(np.arange(1, 61))[:39])
    mapped: set[int] = set()
    for _ in range(10):
        ids = rng.integers(0, 40, 9).astype(np.int32)
        fresh = blocks.unmapped(ids)
        assert set(fresh) == set(ids.tolist()) - mapped - {0}
        blocks.take(fresh)
        mapped |= set(fresh.tolist())
        assert len(set(blocks[np.array(sorted(mapped), np.int32)].tolist())) == len(mapped)
        gone = np.unique(rng.integers(0, 40, 4)).astype(np.int32)
        blocks.drop(gone)
        mapped -= set(gone.tolist())
        assert blocks.available == 39 - len(mapped) and blocks.is_sound()
    if mapped:
        blocks.own[min(mapped)] ^= 1
        assert not blocks.is_sound()

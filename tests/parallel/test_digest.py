"""The rolling digest: equal to a full recount after any operations, and what it notices."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktable.parallel.digest import TableDigest, first_difference

ROWS, WIDTH = 7, 12


class Plain:
    """A table as a list of lists, and the digest that follows it."""

    def __init__(self):
        self.table = np.zeros((ROWS, WIDTH), np.int32)
        self.counts = np.zeros(ROWS, np.int32)
        self.digest = TableDigest(ROWS)

    def check(self):
        fresh = TableDigest(ROWS)
        rows = np.arange(ROWS, dtype=np.int32)
        fresh._assign(rows, fresh.recompute(self.table, self.counts))
        assert fresh.value == self.digest.value
        assert np.array_equal(fresh.rows, self.digest.rows)
        assert self.digest.verify(self.table, self.counts) is None

    def append(self, rng):
        rows = rng.permutation(ROWS)[: rng.integers(1, ROWS + 1)].astype(np.int32)
        counts = rng.integers(0, 4, len(rows)).astype(np.int32)
        counts = np.minimum(counts, WIDTH - self.counts[rows])
        ids = rng.integers(0, 2**31 - 1, counts.sum()).astype(np.int32)
        starts = self.counts[rows].copy()
        at = 0
        for row, start, count in zip(rows, starts, counts, strict=True):
            self.table[row, start : start + count] = ids[at : at + count]
            at += count
        self.counts[rows] += counts
        self.digest.append(rows, starts, counts, ids)

    def append_one_each(self, rng):
        rows = np.flatnonzero(self.counts < WIDTH).astype(np.int32)
        ids = rng.integers(1, 99, len(rows)).astype(np.int32)
        starts = self.counts[rows].copy()
        self.table[rows, starts] = ids
        self.counts[rows] += 1
        self.digest.append(rows, starts, np.ones(len(rows), np.int32), ids)

    def truncate(self, rng):
        keep = (self.counts * rng.random(ROWS)).astype(np.int32)
        columns = np.arange(WIDTH)
        gone = (columns >= keep[:, None]) & (columns < self.counts[:, None])
        rows, cols = np.nonzero(gone)
        self.digest.remove(rows.astype(np.int32), cols, self.table[gone])
        self.table[gone] = 0
        self.counts[:] = keep

    def change(self, rng):
        rows, cols = np.nonzero(np.arange(WIDTH) < self.counts[:, None])
        old = self.table[rows, cols]
        new = np.where(rng.random(len(rows)) < 0.5, old, rng.integers(0, 99, len(rows)))
        self.table[rows, cols] = new
        self.digest.change(rows.astype(np.int32), cols, old, new.astype(np.int32))

    def clear(self, rng):
        rows = rng.permutation(ROWS)[:2].astype(np.int32)
        self.table[rows], self.counts[rows] = 0, 0
        self.digest.clear(rows)

    def move(self, rng):
        empty = np.flatnonzero(self.counts == 0).astype(np.int32)
        full = np.flatnonzero(self.counts > 0).astype(np.int32)
        n = min(len(empty), len(full))
        source, target = full[-n:] if n else full[:0], empty[:n]
        self.table[target], self.counts[target] = self.table[source], self.counts[source]
        self.table[source], self.counts[source] = 0, 0
        self.digest.move(source, target)


NAMES = ["append", "append_one_each", "truncate", "change", "clear", "move"]


@given(st.integers(0, 2**32 - 1), st.lists(st.sampled_from(NAMES), max_size=25))
@settings(max_examples=150, deadline=None)
def test_rolling_equals_recount(seed, names):
    plain, rng = Plain(), np.random.default_rng(seed)
    for name in names:
        getattr(plain, name)(rng)
        plain.check()


def test_order_of_changes_does_not_matter_but_place_does():
    def digest(*appends):
        out = TableDigest(4)
        for row, start, block in appends:
            one = np.array([1], np.int32)
            out.append(*(np.array([v], np.int32) for v in (row, start)), one, one * block)
        return out

    assert digest((0, 0, 5), (1, 0, 6)).value == digest((1, 0, 6), (0, 0, 5)).value
    values = [
        digest(*appends).value
        for appends in (
            [(0, 0, 5)], [(1, 0, 5)], [(0, 1, 5)], [(0, 0, 6)], [(0, 0, 5), (0, 1, 6)],
            [(0, 0, 6), (0, 1, 5)], [(0, 0, 5), (1, 0, 6)], [(0, 0, 6), (1, 0, 5)],
        )
    ]  # fmt: skip
    assert len(set(values)) == len(values)
    assert first_difference(digest((2, 0, 5)).rows, digest((2, 0, 6)).rows) == 2
    assert first_difference(digest((2, 0, 5)).rows, digest((2, 0, 5)).rows) is None


def test_a_flipped_bit_is_found_within_one_round_of_the_budget():
    plain, rng = Plain(), np.random.default_rng(3)
    plain.append_one_each(rng)
    plain.append(rng)
    entries = int(plain.counts.sum()) + ROWS
    for bit in range(31):
        plain.table[5, 0] ^= 1 << bit
        found = [plain.digest.verify(plain.table, plain.counts, 4) for _ in range(entries // 4 + 2)]
        assert set(found) - {None} == {5}
        plain.table[5, 0] ^= 1 << bit
    assert plain.digest.verify(plain.table, plain.counts, 10**9) is None

"""Rows never lie: every operation against lists of lists, host and a mirrored device."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktable.core.errors import RowError
from blocktable.core.table import HostTable

ROWS, WIDTH = 5, 7


class Mirror:
    """A device table that knows only what `drain` tells it."""

    def __init__(self, table: HostTable) -> None:
        self.table, self.rows = table, np.zeros_like(table.rows)

    def commit(self) -> None:
        delta, before = self.table.drain(), self.rows.copy()
        for dst, src, length in zip(delta.copy_dst, delta.copy_src, delta.copy_len, strict=True):
            self.rows[dst, :length] = before[src, :length]
        for row, start, stop in zip(delta.fill_row, delta.fill_start, delta.fill_stop, strict=True):
            self.rows[row, start:stop] = 0
        for row, a, b in zip(delta.write_row, delta.write_start, delta.write_stop, strict=True):
            self.rows[row, a:b] = self.table.rows[row, a:b]
        assert (self.rows == self.table.rows).all()


row_numbers = st.integers(0, ROWS - 1)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(row_numbers, unique=True, min_size=1),
                  st.lists(st.integers(0, 3), min_size=ROWS, max_size=ROWS)),
        st.tuples(st.just("one"), st.lists(row_numbers, unique=True, min_size=1)),
        st.tuples(st.just("set"), row_numbers, st.integers(0, WIDTH)),
        st.tuples(st.just("truncate"), st.lists(row_numbers, unique=True, min_size=1),
                  st.integers(0, WIDTH)),
        st.tuples(st.just("clear"), st.lists(row_numbers, unique=True)),
        st.tuples(st.just("move"), row_numbers, row_numbers),
        st.tuples(st.just("swap"), row_numbers, row_numbers),
        st.tuples(st.just("rotate"), st.permutations(range(ROWS))),
        st.tuples(st.just("null"), row_numbers, st.integers(0, WIDTH), st.integers(0, WIDTH)),
        st.tuples(st.just("write"), row_numbers, st.integers(0, WIDTH - 1)),
        st.tuples(st.just("commit")),
    ), max_size=25,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(operations)
def test_any_sequence_of_operations(steps: list) -> None:
    table, model, fresh = HostTable(ROWS, WIDTH), [[] for _ in range(ROWS)], iter(range(1, 10**6))
    mirror = Mirror(table)
    for name, *rest in steps:
        if name == "commit":
            mirror.commit()
        else:
            apply(table, model, fresh, name, rest)
        for row, entries in enumerate(model):
            assert table.counts[row] == len(entries)
            assert table.rows[row].tolist() == entries + [0] * (WIDTH - len(entries))
    mirror.commit()
    assert not table.is_dirty


def apply(table: HostTable, model: list, fresh, name: str, rest: list) -> None:
    if name in ("append", "one"):
        shares = [1] * len(rest[0]) if name == "one" else rest[1][: len(rest[0])]
        new = [[next(fresh) for _ in range(k)] for k in shares]
        flat = np.array([b for part in new for b in part], np.int32)
        too_long = any(len(model[r]) + len(p) > WIDTH for r, p in zip(rest[0], new, strict=True))
        rows = np.array(rest[0])
        call = (rows, flat) if name == "one" else (rows, shares, flat)
        method = table.append_one if name == "one" else table.append
        if too_long:
            with pytest.raises(RowError, match="room for 7"):
                method(*call)
            return
        method(*call)
        for row, part in zip(rest[0], new, strict=True):
            model[row] += part
    elif name == "set":
        model[rest[0]] = [next(fresh) for _ in range(rest[1])]
        table.set([rest[0]], [rest[1]], model[rest[0]])
    elif name == "truncate":
        table.truncate(rest[0], rest[1])
        for row in rest[0]:
            model[row] = model[row][: rest[1]]
    elif name == "clear":
        table.clear(np.array(rest[0], int))
        for row in rest[0]:
            model[row] = []
    elif name == "move":
        table.move(*rest)
        if rest[0] != rest[1]:
            model[rest[1]], model[rest[0]] = model[rest[0]], []
    elif name == "swap":
        table.swap(*rest)
        model[rest[0]], model[rest[1]] = model[rest[1]], model[rest[0]]
    elif name == "rotate":
        table.move_rows(np.arange(ROWS), np.array(rest[0]))
        old = list(model)
        for src, dst in enumerate(rest[0]):
            model[dst] = old[src]
    elif name == "null":
        row, start, stop = rest
        stop = min(stop, len(model[row]))
        if start < stop:
            table.null(np.array([row]), np.array([start]), np.array([stop]))
            model[row][start:stop] = [0] * (stop - start)
    elif name == "write" and rest[1] < len(model[rest[0]]):
        model[rest[0]][rest[1]] = next(fresh)
        table.write([rest[0]], [rest[1]], [model[rest[0]][rest[1]]])


def test_a_moved_row_keeps_nothing_of_the_earlier_occupant() -> None:  # case B03
    table = HostTable(2, 54)
    table.append([0], [54], np.arange(1, 55))
    table.append([1], [43], np.arange(55, 98))
    table.clear([0])
    table.move(1, 0)
    assert table.rows[0].tolist() == [*range(55, 98), *[0] * 11]
    assert table.counts.tolist() == [43, 0] and not table.rows[1].any()


@pytest.mark.parametrize("how", ["set", "swap", "clear"])
def test_shorter_occupants(how: str) -> None:  # case B03, its kind
    table = HostTable(2, 8)
    table.append([0, 1], [8, 3], np.arange(1, 12))
    if how == "set":
        table.set([0], [2], [20, 21])
        assert table.rows[0].tolist() == [20, 21, 0, 0, 0, 0, 0, 0]
    elif how == "swap":
        table.swap(0, 1)
        assert table.rows.tolist() == [[9, 10, 11, 0, 0, 0, 0, 0], list(range(1, 9))]
    else:
        table.clear()
        assert not table.rows.any() and not table.counts.any()


def test_500_then_200_tokens_need_44_blocks() -> None:
    table = HostTable(1, 64)
    table.append([0], [-(-500 // 16)], np.arange(1, 33))
    assert table.counts[0] == 32
    more = -(-700 // 16) - 32
    table.append([0], [more], np.arange(33, 33 + more))
    assert table.counts[0] == 44


def test_a_step_uploads_what_changed() -> None:
    table = HostTable(1024, 65536)
    table.append(np.arange(1024), 1000, np.arange(1024 * 1000))
    table.drain()
    table.append_one(np.arange(64), np.arange(64, dtype=np.int32))
    table.move(3, 1000)
    delta = table.drain()
    assert delta.num_written == 64 and len(delta.copy_dst) == 1


def test_a_window_sliding_forward_uploads_one_entry() -> None:
    table = HostTable(1, 4096)
    table.append([0], [100], np.arange(1, 101))
    table.drain()
    table.null(np.array([0]), np.array([0]), np.array([36]))
    table.append([0], [1], [101])
    delta = table.drain()
    assert delta.num_written == 1
    assert (delta.fill_start.tolist(), delta.fill_stop.tolist()) == ([0], [36])


@pytest.mark.parametrize("bad", [-1, 5, 10**9])
def test_wrong_rows_are_named(bad: int) -> None:
    table = HostTable(5, 3)
    for call in (table.clear, lambda r: table.append(r, [1], [1]), lambda r: table.truncate(r, 0)):
        with pytest.raises(RowError, match=f"row {bad} is outside a table of 5 rows"):
            call([bad])


def test_ids_near_two_to_the_31() -> None:
    table = HostTable(1, 2)
    table.append([0], [2], [2**31 - 1, 2**31 - 2])
    assert table.rows.tolist() == [[2**31 - 1, 2**31 - 2]]
    with pytest.raises(RowError, match="shared out"):
        table.append([0], [1], [])


def test_appending_nothing_changes_nothing() -> None:
    table = HostTable(2, 2)
    table.append([0, 1], [0, 0], [])
    assert not table.drain().num_written and not table.counts.any()

"""Every row operation against lists of lists; host and device compared after each commit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blocktable.core.errors import RowError
from blocktable.core.table import HostTable
from blocktable.device.block_table import BlockTable, MultiGroupBlockTable

ROWS = 12
MAX_LEN = 900
GROUPS = {
    "plain": ([16], [16]),
    "odd": ([7], [7]),
    "split": ([32], [16]),
    "three": ([16, 48, 5], [16, 16, 5]),
}


class Model:
    """The tables as lists of manager block ids: what every operation means."""

    def __init__(self, table: MultiGroupBlockTable) -> None:
        self.table = table
        self.rows = [[[] for _ in range(ROWS)] for _ in range(len(table))]

    def expected(self, group: int) -> np.ndarray:
        table = self.table[group]
        width = table.get_numpy_array().shape[1]
        out = np.zeros((ROWS, width), np.int32)
        for row, entries in enumerate(self.rows[group]):
            out[row, : len(entries)] = entries
        return out

    def check(self, device_too: bool = True) -> None:
        for group in range(len(self.table)):
            want, table = self.expected(group), self.table[group]
            np.testing.assert_array_equal(table.get_numpy_array(), want)
            np.testing.assert_array_equal(
                table.num_blocks_per_row, [len(row) for row in self.rows[group]]
            )
            if device_too:
                got = table.get_device_tensor(ROWS).cpu().numpy()
                np.testing.assert_array_equal(got, want)

    def kernel(self, group: int, ids: list[int]) -> list[int]:
        k = self.table[group].blocks_per_kv_block
        return [b * k + j for b in ids for j in range(k)]


def fresh(rng: np.random.Generator, model: Model, count: int) -> list[list[int]]:
    return [rng.integers(1, 2**31 // 8, count).tolist() for _ in model.rows]


def room(model: Model, row: int) -> int:
    return min(
        (model.table[g].max_num_blocks_per_req - len(rows[row]))
        // model.table[g].blocks_per_kv_block
        for g, rows in enumerate(model.rows)
    )


def widest(model: Model) -> int:
    return min(
        table.max_num_blocks_per_req // table.blocks_per_kv_block
        for table in model.table.block_tables
    )


def random_operation(rng: np.random.Generator, model: Model) -> str:
    table, rows = model.table, model.rows
    a, b = (int(r) for r in rng.choice(ROWS, 2, replace=False))
    name = str(
        rng.choice(
            ["append", "append_bulk", "add", "add_bulk", "clear", "move", "swap", "truncate",
             "permute", "condense", "wipe"],
            p=[0.2, 0.15, 0.1, 0.05, 0.05, 0.12, 0.12, 0.1, 0.05, 0.05, 0.01],
        )
    )  # fmt: skip
    if name == "append":
        ids = fresh(rng, model, min(room(model, a), int(rng.integers(0, 9))))
        table.append_row(ids, a)
        for g, group in enumerate(rows):
            group[a] += model.kernel(g, ids[g])
    elif name in ("append_bulk", "add_bulk"):
        some = rng.choice(ROWS, int(rng.integers(1, ROWS)), replace=False)
        ids = []
        for row in some:
            limit = room(model, row) if name == "append_bulk" else widest(model)
            ids.append(fresh(rng, model, min(limit, int(rng.integers(0, 6)))))
        shares = [[len(part[g]) for part in ids] for g in range(len(rows))]
        flat = [[b for part in ids for b in part[g]] for g in range(len(rows))]
        (table.append_rows if name == "append_bulk" else table.add_rows)(some, shares, flat)
        for row, part in zip(some, ids, strict=True):
            for g, group in enumerate(rows):
                kept = group[row] if name == "append_bulk" else []
                group[row] = kept + model.kernel(g, part[g])
    elif name == "add":
        ids = fresh(rng, model, int(rng.integers(0, widest(model) + 1)))
        table.add_row(ids, a)
        for g, group in enumerate(rows):
            group[a] = model.kernel(g, ids[g])
    elif name == "clear":
        table.clear_row(a)
        for group in rows:
            group[a] = []
    elif name == "move":
        table.move_row(a, b)
        for group in rows:
            group[b], group[a] = group[a], []
    elif name == "swap":
        table.swap_row(a, b)
        for group in rows:
            group[a], group[b] = group[b], group[a]
    elif name == "truncate":
        keep = [int(rng.integers(0, len(group[a]) + 2)) for group in rows]
        table.truncate_row(a, keep)
        for group, n in zip(rows, keep, strict=True):
            group[a] = group[a][:n]
    elif name == "permute":
        some = rng.choice(ROWS, int(rng.integers(2, ROWS)), replace=False)
        to = rng.permutation(some)
        table.move_rows(some, to)
        for group in rows:
            old = [group[r] for r in some]
            for row, entries in zip(to, old, strict=True):
                group[row] = entries
    elif name == "condense":
        some = rng.choice(ROWS, 6, replace=False)
        table.move_rows(some[:3], some[3:])
        for group in rows:
            for src, dst in zip(some[:3], some[3:], strict=True):
                group[dst], group[src] = group[src], []
    else:
        table.clear()
        for group in rows:
            group[:] = [[] for _ in range(ROWS)]
    return name


def make(device: torch.device, groups: str) -> Model:
    block_sizes, kernel_sizes = GROUPS[groups]
    return Model(MultiGroupBlockTable(ROWS, MAX_LEN, 64, device, block_sizes, kernel_sizes))


@pytest.mark.parametrize("groups", sorted(GROUPS))
@pytest.mark.parametrize("seed", range(3))
def test_random_operations(device: torch.device, groups: str, seed: int, steps: int) -> None:
    rng, model = np.random.default_rng(seed), make(device, groups)
    address = [table.get_device_tensor().data_ptr() for table in model.table.block_tables]
    for step in range(steps):
        random_operation(rng, model)
        model.check(device_too=False)
        if rng.random() < 0.4:  # several operations between most commits
            model.table.commit_block_table(int(rng.integers(0, ROWS + 1)))
            model.check()
        assert step < steps
    assert address == [table.get_device_tensor().data_ptr() for table in model.table.block_tables]


@pytest.mark.parametrize("seed", range(3))
def test_split_rows_of_a_manager(device: torch.device, seed: int, steps: int) -> None:
    """Tables over a manager's host tables: one zero copy, one split into kernel blocks."""
    rng = np.random.default_rng(seed)
    hosts = [HostTable(ROWS, 20), HostTable(ROWS, 10)]
    table = MultiGroupBlockTable.over(hosts, 64, device, [16, 32], [16, 8])
    assert np.shares_memory(table[0].get_numpy_array(), hosts[0].rows)
    for _ in range(steps // 2):
        for host in hosts:
            change_host(rng, host)
        if rng.random() < 0.5:
            table.commit_block_table(ROWS)
            for g, host in enumerate(hosts):
                k = table[g].blocks_per_kv_block
                want = host.rows[:, :, None] * k + np.arange(k)
                want[host.rows == 0] = 0
                want = want.reshape(ROWS, -1)
                np.testing.assert_array_equal(table[g].get_numpy_array(), want)
                np.testing.assert_array_equal(table[g].num_blocks_per_row, host.counts * k)
                np.testing.assert_array_equal(table[g].get_device_tensor().cpu().numpy(), want)


def change_host(rng: np.random.Generator, host: HostTable) -> None:
    """What a manager does to its rows, window nulls and copy-on-write included."""
    a, b = (int(r) for r in rng.choice(ROWS, 2, replace=False))
    count = int(host.counts[a])
    what = rng.integers(0, 7)
    if what <= 1:
        n = min(int(rng.integers(0, 7)), host.max_blocks_per_row - count)
        host.append([a], [n], rng.integers(1, 10**6, n))
    elif what == 2:
        host.truncate([a], [int(rng.integers(0, count + 1))])
    elif what == 3:
        host.move(a, b)
    elif what == 4:
        host.swap(a, b)
    elif what == 5 and count:
        start = int(rng.integers(0, count))
        host.null(np.array([a]), [start], [int(rng.integers(start, count + 1))])
    elif count:
        columns = rng.integers(0, count, 2)
        host.write(np.array([a, a]), columns, rng.integers(1, 10**6, 1).repeat(2))


@pytest.mark.parametrize("count", [127, 128, 129, 511, 512, 513, 1025, 2000])
def test_long_rows_cross_tiles(device: torch.device, count: int) -> None:
    """Rows as long as the kernel's column tile, one less and one more; moves of all of them."""
    table = BlockTable(16, 5, 2001, 8, device)
    want = np.zeros((5, 2001), np.int32)
    ids = np.arange(1, count + 1)
    table.add_row(ids, 0)
    table.add_row(ids + 10_000, 1)
    table.commit_block_table(5)
    table.swap_row(0, 1)
    table.move_row(0, 3)
    table.add_row(ids[:7], 0)
    table.append_row([5], 1) if count < 2001 else None
    table.commit_block_table(5)
    want[3, :count], want[1, :count], want[0, :7], want[1, count] = ids + 10_000, ids, ids[:7], 5
    np.testing.assert_array_equal(table.get_device_tensor().cpu().numpy(), want)
    assert table._tables.last_commit.bytes < 300 or table._tables.backend == "numpy"


def test_errors_change_nothing(device: torch.device) -> None:
    model = make(device, "three")
    table = model.table
    table.add_row([[1, 2], [3], [4, 5, 6]], 2)
    model.rows[0][2] = [1, 2]
    model.rows[1][2] = model.kernel(1, [3])
    model.rows[2][2] = [4, 5, 6]
    wide = [1] * 1000
    for call, error in [
        (lambda: table.append_row([[7], wide, [8]], 2), RowError),
        (lambda: table.append_row([[7], [8], [9]], ROWS), RowError),
        (lambda: table.append_row([[7], [8], [9]], -1), RowError),
        (lambda: table.append_row([[7], [8]], 2), ValueError),
        (lambda: table.append_row([[7], [8], [-9]], 2), RowError),
        (lambda: table.append_row([[7], [2**31 - 1], [9]], 2), RowError),
        (lambda: table.append_row([[7], [8], [2**31]], 2), RowError),
        (lambda: table.append_row([[7], [8], [1.5]], 2), RowError),
        (lambda: table.append_rows([2, 2], [[1, 1]] * 3, [[1, 2]] * 3), RowError),
        (lambda: table.append_rows([2, 3], [[1, 1]] * 3, [[1]] * 3), RowError),
        (lambda: table.add_row([wide, [1], [1]], 2), RowError),
        (lambda: table.clear_row(ROWS), RowError),
        (lambda: table.move_row(0, ROWS), RowError),
        (lambda: table.move_row(-1, 0), RowError),
        (lambda: table.swap_row(ROWS, 0), RowError),
        (lambda: table.truncate_row(2, [1, 2]), ValueError),
        (lambda: table.truncate_row(2, [1, 1, -1]), RowError),
        (lambda: table.truncate_row(ROWS, [0, 0, 0]), RowError),
        (lambda: table.commit_block_table(ROWS + 1), RowError),
        (lambda: table[3], RowError),
        (lambda: table[-1], RowError),
        (lambda: table[0].get_device_tensor(ROWS + 1), RowError),
    ]:
        with pytest.raises(error):
            call()
        model.check(device_too=False)
    table.commit_block_table(ROWS)
    model.check()


def test_append_empty_changes_nothing(device: torch.device) -> None:
    table = BlockTable(16, 4, 8, 8, device)
    table.append_row([], 1)
    table.append_row(np.zeros(0, np.int64), 1)
    assert not table.num_blocks_per_row.any()
    assert table._commit().bytes == 0


def test_clear_resets_counts_and_device(device: torch.device) -> None:
    table = BlockTable(16, 4, 8, 8, device)
    table.add_row([1, 2, 3], 1)
    table.commit_block_table(4)
    table.clear()
    assert not table.num_blocks_per_row.any() and not table.get_numpy_array().any()
    assert not table.get_device_tensor().cpu().any()
    table.append_row([9], 1)
    assert table.get_numpy_array()[1, 0] == 9 and table.num_blocks_per_row[1] == 1


@pytest.mark.parametrize("kernel", [None, [8, 16]])
@pytest.mark.parametrize("world", [1, 2])
def test_what_a_pool_is_asked_for_and_given_back(kernel: list[int] | None, world: int) -> None:
    table = MultiGroupBlockTable(4, 640, 64, "cpu", [16, 32], kernel, cp_world_size=world)
    table.append_rows([1, 3], [[2, 1], [1, 0]], [[5, 7, 9], [6]])
    lens = np.array([16 * world, 33 * world, 1, 0])
    need = table.blocks_needed([0, 1, 2, 3], lens)
    assert [n.tolist() for n in need] == [[1, 1, 1, 0], [1, 1, 1, 0]]
    table.append_rows([0, 1, 2, 3], need, [[11, 12, 13], [21, 22, 23]])
    assert not any(n.any() for n in table.blocks_needed([0, 1, 2, 3], lens))
    held = table.held_blocks([3, 1])
    assert [ids.tolist() for ids in held] == [[9, 12, 7, 5], [22, 6]]
    assert [ids.tolist() for ids in table.held_blocks(2)] == [[13], [23]]
    assert [len(ids) for ids in table.held_blocks([])] == [0, 0]
    for bad in ([4], [-1], [1.5], ["a"]):
        with pytest.raises(RowError):
            table.held_blocks(bad)
        with pytest.raises(RowError):
            table.blocks_needed(bad, [3])

"""Arguments that name no row, no block or no number: refused, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from blocktable.core.errors import ConfigError, RowError
from blocktable.core.table import HostTable
from blocktable.device.block_table import BlockTable, MultiGroupBlockTable
from blocktable.device.input_batch import BatchRequest, InputBatch

Change = Callable[[Any], object]


def tables(device: torch.device) -> list[BlockTable | MultiGroupBlockTable]:
    one = BlockTable(16, 4, 6, 8, device)
    many = MultiGroupBlockTable(4, 64, 8, device, [16, 32])
    for row in range(3):
        one.add_row([1 + row, 2 + row, 3 + row], row)
        many.add_row(([1 + row, 2 + row], [3 + row]), row)
    return [one, many]


def groups(table: BlockTable | MultiGroupBlockTable) -> tuple[BlockTable, ...]:
    return (table,) if isinstance(table, BlockTable) else table.block_tables


def content(table: BlockTable | MultiGroupBlockTable) -> list[Any]:
    found = [(t.get_numpy_array(), t.num_blocks_per_row) for t in groups(table)]
    return [(rows.tolist(), counts.tolist()) for rows, counts in found]


def per_group(table: BlockTable | MultiGroupBlockTable, value: Any, last: Any = None) -> Any:
    """The argument of one group, or a list with it for each (``last`` for the last of them)."""
    if isinstance(table, BlockTable):
        return value if last is None else last
    return [value] * (len(table) - 1) + [value if last is None else last]


BAD_ROWS = [1.5, "1", True, -1, 4, 2**40]
CHANGES_OF_A_ROW: dict[str, Callable[[Any, Any], object]] = {
    "append": lambda t, row: t.append_row(per_group(t, [9]), row),
    "add": lambda t, row: t.add_row(per_group(t, [9]), row),
    "append_rows": lambda t, row: t.append_rows([row], per_group(t, [1]), per_group(t, [9])),
    "clear": lambda t, row: t.clear_row(row),
    "truncate": lambda t, row: t.truncate_row(row, per_group(t, 1)),
    "move from": lambda t, row: t.move_row(row, 2),
    "move to": lambda t, row: t.move_row(2, row),
    "swap": lambda t, row: t.swap_row(row, 2),
    "swap with itself": lambda t, row: t.swap_row(row, row),
}


@pytest.mark.parametrize("row", BAD_ROWS)
@pytest.mark.parametrize("change", CHANGES_OF_A_ROW)
def test_what_is_no_row_is_refused(device: torch.device, change: str, row: Any) -> None:
    for table in tables(device):
        before = content(table)
        with pytest.raises(RowError):
            CHANGES_OF_A_ROW[change](table, row)
        assert content(table) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.append_rows([0], per_group(t, [1], [1.5]), per_group(t, [9])),
        lambda t: t.append_rows([0], per_group(t, [1], [-1]), per_group(t, [9])),
        lambda t: t.append_row(per_group(t, [9], [1.5]), 0),
        lambda t: t.append_row(per_group(t, [9], [None]), 0),
        lambda t: t.append_row(per_group(t, [9], ["9"]), 0),
        lambda t: t.append_row(per_group(t, [9], [2**63]), 0),
        lambda t: t.add_row(per_group(t, [9], iter([9])), 0),
        lambda t: t.truncate_row(0, per_group(t, 1, 1.5)),
        lambda t: t.truncate_row(0, per_group(t, 1, -1)),
        lambda t: t.swap_rows([0, 1], [2]),
        lambda t: t.move_rows([0, 1], [2]),
        lambda t: t.move_rows([0, 1], [2, 2]),
        lambda t: t.move_rows([0, 0], [2, 3]),
    ],
)
def test_values_that_cannot_be_meant_are_refused(device: torch.device, change: Change) -> None:
    for table in tables(device):
        before = content(table)
        with pytest.raises(RowError):
            change(table)
        assert content(table) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.swap_row(1, 1),
        lambda t: t.move_row(1, 1),
        lambda t: t.move_rows([], []),
        lambda t: t.swap_rows([], []),
        lambda t: t.clear_rows([]),
        lambda t: t.append_rows([], per_group(t, []), per_group(t, [])),
        lambda t: t.append_row(per_group(t, []), 0),
        lambda t: t.truncate_row(0, per_group(t, 2**40)),
    ],
)
def test_doing_nothing_is_allowed(device: torch.device, change: Change) -> None:
    for table in tables(device):
        before = content(table)
        change(table)
        assert content(table) == before


def test_block_ids_may_be_a_tensor(device: torch.device) -> None:
    for table in tables(device):
        table.append_row(per_group(table, torch.tensor([7, 8])), 3)
        for group in groups(table):
            assert group.get_numpy_array()[3, :3].tolist() == [7, 8, 0]


@pytest.mark.parametrize("value", [0, -1, 2.5, "16"])
@pytest.mark.parametrize(
    "name", ["block_size", "max_num_reqs", "max_num_blocks_per_req", "max_num_batched_tokens"]
)
def test_sizes_that_are_no_sizes_are_refused(device: torch.device, name: str, value: Any) -> None:
    sizes: dict[str, Any] = {
        "block_size": 16, "max_num_reqs": 4, "max_num_blocks_per_req": 6,
        "max_num_batched_tokens": 8,
    }  # fmt: skip
    with pytest.raises(ConfigError):
        BlockTable(**(sizes | {name: value}), device=device)


def test_a_set_that_fails_leaves_the_old_row() -> None:
    table = HostTable(2, 4)
    table.set([0], [2], [5, 6])
    with pytest.raises(OverflowError):
        table.set([0], [1], [2**40])
    assert table.rows[0].tolist() == [5, 6, 0, 0]


# -- batches ------------------------------------------------------------------------------------


def batch(device: torch.device) -> InputBatch:
    table = MultiGroupBlockTable(4, 64, 8, device, [16, 32])
    made = InputBatch(4, 64, table)
    made.add_column("pair", np.int32, -7, (2,))
    made.add([BatchRequest(name, [1, 2, 3], [[5], [6]]) for name in ("a", "b")])
    return made


def batch_content(made: InputBatch) -> list[Any]:
    names = ("temperature", "num_tokens", "num_computed_tokens", "token_line", "pair", "seed")
    columns = [made[name].tolist() for name in names]
    live = [made.tokens(row).tolist() for row in made.occupied_rows()]
    return [made.request_ids.tolist(), columns, live, made.num_reqs, content(made.block_table)]


def new(**changes: Any) -> BatchRequest:
    fields = {"request_id": "new", "prompt_token_ids": [1], "block_ids": [[7], [8]]}
    return BatchRequest(**(fields | changes))


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b.add([new(prompt_token_ids=[1.5])]),
        lambda b: b.add([new(prompt_token_ids=[2**40])]),
        lambda b: b.add([new(prompt_token_ids=[-1])]),
        lambda b: b.add([new(output_token_ids=np.array([2**40]))]),
        lambda b: b.add([new(sampling=SimpleNamespace(temperature="hot"))]),
        lambda b: b.add([new(sampling=SimpleNamespace(seed=2**70))]),
        lambda b: b.add([new(extra={"pair": [1, 2, 3]})]),
        lambda b: b.add([new(), new(request_id="other", extra={"pair": "x"})]),
        lambda b: b.add([new(), new(request_id="other", block_ids=[[1], [-1]])]),
        lambda b: b.add([new(block_ids=[[1], [1.5]])]),
        lambda b: b.swap([0, 1], [2]),
        lambda b: b.swap([0], [4]),
        lambda b: b.resume([0], [[1], [1]], [[1], [1]], [1, 2]),
        lambda b: b.resume([0], [[1], [1]], [[1], [1]], [1.5]),
        lambda b: b.append_tokens([0], [2**40]),
        lambda b: b.append_tokens([0], [1.5]),
        lambda b: b.append_tokens([0.5], [1]),
        lambda b: b.append_tokens([0, 0], [1, 2]),
        lambda b: b.append_tokens([0, 1], [1]),
        lambda b: b.append_tokens([0], [1, 2]),
        lambda b: b.append_tokens([0, 1], [[1, 2]]),
    ],
)
def test_a_batch_refuses_what_it_cannot_hold(device: torch.device, change: Change) -> None:
    made = batch(device)
    before = batch_content(made)
    with pytest.raises((RowError, ValueError)):
        change(made)
    assert batch_content(made) == before
    made.add([new()])
    assert made["num_tokens"][made.rows(["new"])].tolist() == [1]


@pytest.mark.parametrize(
    ("starts", "positions"),
    [([0, 2, 5], 4), ([0, 4, 3], 4), ([1, 2, 3], 4), ([0, -1, 3], 4), ([0, 1, 2], 0)],
)
def test_tokens_that_have_no_position_are_refused_on_a_cpu(
    starts: list[int], positions: int
) -> None:
    table = BlockTable(16, 4, 6, 8, torch.device("cpu"))
    table.add_row([3, 4], 0)
    table.add_row([5, 6], 1)
    table.commit_block_table(2)
    table.slot_mapping.fill_(7)
    with pytest.raises(ValueError, match="does not share out"):
        table.compute_slot_mapping(
            2, torch.tensor(starts, dtype=torch.int32), torch.arange(positions)
        )
    assert table.slot_mapping.tolist() == [7] * 8


def test_a_batch_may_be_told_nothing(device: torch.device) -> None:
    made = batch(device)
    before = batch_content(made)
    made.add([])
    made.remove([])
    made.swap([], [])
    made.append_tokens([], [])
    made.append_blocks([], [[], []], [[], []])
    made.resume([], [[], []], [[], []], [])
    assert batch_content(made) == before

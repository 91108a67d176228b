"""Rows of every per-request array and of every group's table move together."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from blocktable.core.errors import RowError
from blocktable.device.block_table import MultiGroupBlockTable
from blocktable.device.input_batch import REAL_COLUMNS, BatchRequest, InputBatch

ROWS, LENGTH = 10, 64


def make(device: torch.device) -> InputBatch:
    table = MultiGroupBlockTable(ROWS, LENGTH, 64, device, [4, 8], [4, 4])
    batch = InputBatch(ROWS, LENGTH, table)
    batch.add_column("logit_bias", np.float32, 0.5, (3,))
    batch.add_column("tag", np.int16, -7)
    return batch


def request(rng: np.random.Generator, name: str) -> BatchRequest:
    prompt = rng.integers(0, 1000, int(rng.integers(1, 30))).tolist()
    sampling = SimpleNamespace(
        temperature=round(float(rng.random()), 3), top_k=int(rng.integers(0, 50)), seed=None,
        top_p=0.25,
    )  # fmt: skip
    blocks = [rng.integers(1, 999, 5).tolist(), rng.integers(1, 999, 3).tolist()]
    return BatchRequest(
        name, prompt, blocks, num_computed_tokens=len(prompt) // 2,
        output_token_ids=rng.integers(0, 9, 4).tolist(), sampling=sampling,
        extra={"tag": int(rng.integers(0, 99))},
    )  # fmt: skip


def check(batch: InputBatch, model: dict[str, list]) -> None:
    """``model``: id -> [row, request, tokens, blocks of each group, computed]."""
    assert batch.num_reqs == len(model)
    assert sorted(batch.occupied_rows().tolist()) == sorted(entry[0] for entry in model.values())
    batch.block_table.commit_block_table(ROWS)
    for name, (row, asked, tokens, blocks, computed) in model.items():
        assert batch.rows([name]).tolist() == [row] and batch.request_ids[row] == name
        assert batch.tokens(row).tolist() == tokens
        assert batch["num_tokens"][row] == len(tokens)
        assert batch["num_prompt_tokens"][row] == len(asked.prompt_token_ids)
        assert batch["num_computed_tokens"][row] == computed
        assert batch["temperature"][row] == np.float32(asked.sampling.temperature)
        assert batch["top_k"][row] == asked.sampling.top_k and batch["seed"][row] == -1
        assert batch["tag"][row] == asked.extra["tag"]
        for table, ids in zip(batch.block_table.block_tables, blocks, strict=True):
            entries = table.map_to_kernel_blocks(ids).tolist()
            on_device = table.get_device_tensor().cpu().numpy()[row]
            assert (
                on_device[: len(entries)].tolist() == entries
                and not on_device[len(entries) :].any()
            )
    free = np.setdiff1d(np.arange(ROWS), batch.occupied_rows())
    assert (batch["temperature"][free] == 1).all() and (batch["tag"][free] == -7).all()
    assert not batch["num_tokens"][free].any() and (batch["logit_bias"] == 0.5).all()
    assert all(batch.request_ids[row] is None for row in free)
    for table in batch.block_table.block_tables:
        assert not table.get_device_tensor().cpu().numpy()[free].any()
    assert sorted(batch["token_line"].tolist()) == list(range(ROWS))


@pytest.mark.parametrize("seed", range(4))
def test_random_batches(device: torch.device, seed: int) -> None:
    rng, batch, model = np.random.default_rng(seed), make(device), {}
    for step in range(150):
        what = rng.integers(0, 6)
        free = ROWS - len(model)
        names = sorted(model)
        if what <= 1 and free:
            new = [request(rng, f"r{step}.{i}") for i in range(int(rng.integers(1, free + 1)))]
            for row, one in zip(batch.add(new).tolist(), new, strict=True):
                tokens = [*one.prompt_token_ids, *one.output_token_ids]
                model[one.request_id] = [
                    row, one, tokens, [list(ids) for ids in one.block_ids], one.num_computed_tokens
                ]  # fmt: skip
        elif what == 2 and names:
            gone = rng.choice(names, int(rng.integers(1, len(names) + 1)), replace=False).tolist()
            rows = batch.remove(gone)
            assert rows.tolist() == [model.pop(name)[0] for name in gone]
        elif what == 3:
            moved = dict(zip(*(part.tolist() for part in batch.condense()), strict=True))
            for entry in model.values():
                entry[0] = moved.get(entry[0], entry[0])
            assert batch.occupied_rows().tolist() == list(range(len(model)))
        elif what == 4:
            pairs = rng.permutation(ROWS)[: 2 * int(rng.integers(1, 5))].reshape(2, -1)
            moves = batch.swap(pairs[0], pairs[1])
            moved = dict(zip(moves.src.tolist(), moves.dst.tolist(), strict=True))
            for entry in model.values():
                entry[0] = moved.get(entry[0], entry[0])
        elif names:
            some = rng.choice(names, int(rng.integers(1, len(names) + 1)), replace=False)
            resume_or_grow(rng, batch, [model[name] for name in some])
        check(batch, model)


def resume_or_grow(rng: np.random.Generator, batch: InputBatch, entries: list[list]) -> None:
    rows = [entry[0] for entry in entries]
    counts = [rng.integers(0, 3, len(rows)) for _ in range(2)]
    ids = [[rng.integers(1, 999, n).tolist() for n in share] for share in counts]
    flat = [[b for part in group for b in part] for group in ids]
    resumed = bool(rng.integers(0, 2)) or any(len(entry[3][0]) > 12 for entry in entries)
    if resumed:
        batch.resume(rows, counts, flat, np.full(len(rows), 3))
    else:
        batch.append_blocks(rows, counts, flat)
    for i, entry in enumerate(entries):
        for g in range(2):
            entry[3][g] = ids[g][i] if resumed else entry[3][g] + ids[g][i]
        entry[4] = 3 if resumed else entry[4]
    if max(len(entry[2]) for entry in entries) < LENGTH:
        tokens = rng.integers(0, 1000, len(rows))
        batch.append_tokens(rows, tokens)
        for entry, token in zip(entries, tokens.tolist(), strict=True):
            entry[2].append(token)


def test_errors_change_nothing(device: torch.device) -> None:
    rng, batch = np.random.default_rng(0), make(device)
    first = [request(rng, "a"), request(rng, "b")]
    batch.add(first)
    model = {
        one.request_id: [
            row, one, [*one.prompt_token_ids, *one.output_token_ids], one.block_ids,
            one.num_computed_tokens,
        ]
        for row, one in enumerate(first)
    }  # fmt: skip
    long = BatchRequest("c", list(range(LENGTH + 1)), [[1], [2]])
    wide = BatchRequest("c", [1], [[1] * 100, [2]])
    for call in [
        lambda: batch.add([request(rng, "a")]),
        lambda: batch.add([request(rng, "c"), request(rng, "c")]),
        lambda: batch.add([request(rng, f"n{i}") for i in range(ROWS - 1)]),
        lambda: batch.add([request(rng, "d"), long]),
        lambda: batch.add([request(rng, "d"), wide]),
        lambda: batch.add([BatchRequest("c", [1], [[1]])]),
        lambda: batch.add([BatchRequest("c", [1], [[1], [2]], extra={"nope": 1})]),
        lambda: batch.remove(["a", "z"]),
        lambda: batch.remove(["a", "a"]),
        lambda: batch.swap([0], [0]),
        lambda: batch.swap([0], [ROWS]),
        lambda: batch.append_tokens([5], [1]),
        lambda: batch.resume([5], [[0], [0]], [[], []], [0]),
        lambda: batch.add_column("tag", int, 0),
    ]:
        with pytest.raises(RowError):
            call()
        check(batch, model)
    with pytest.raises(RowError):
        InputBatch(ROWS + 1, LENGTH, batch.block_table)


def test_condensed_row_keeps_no_tail_of_the_one_before(device: torch.device) -> None:
    """Row 0 held blocks 1..54; the request that moves there has 55..97 (43 blocks): columns
    43..53 are null, on the host and on the device."""
    table = MultiGroupBlockTable(4, 54 * 16, 64, device, [16], [16])
    batch = InputBatch(4, 54 * 16, table)
    batch.add([BatchRequest("a", [1], [range(1, 55)]), BatchRequest("b", [1], [range(55, 98)])])
    table.commit_block_table(4)
    batch.remove(["a"])
    moves = batch.condense()
    assert (moves.src.tolist(), moves.dst.tolist()) == ([1], [0])
    table.commit_block_table(4)
    for rows in (table[0].get_numpy_array(), table[0].get_device_tensor().cpu().numpy()):
        assert rows[0, :43].tolist() == list(range(55, 98)) and not rows[0, 43:54].any()
        assert not rows[1].any()
    assert table[0].num_blocks_per_row[:2].tolist() == [43, 0]


def test_sampling_columns_default_when_unset(device: torch.device) -> None:
    batch = make(device)
    batch.add([BatchRequest("a", [1, 2], [[1], [1]], sampling=SimpleNamespace(temperature=None))])
    for name, empty in REAL_COLUMNS:
        assert batch[name][0] == np.float32(empty)
    assert batch["max_tokens"][0] == -1 and "a" in batch and "b" not in batch


def test_next_tokens_are_the_uncomputed_ones_in_order() -> None:
    table = MultiGroupBlockTable(4, 32, 64, "cpu", [4])
    batch = InputBatch(4, 32, table)
    prompts = [list(range(10 * i, 10 * i + 5 + i)) for i in range(4)]
    batch.add(
        [BatchRequest(i, prompt, [[]], num_computed_tokens=i) for i, prompt in enumerate(prompts)]
    )
    batch.remove([0])
    batch.condense()  # request 3 is row 0 now, its token line stays
    rows = batch.rows([3, 1, 2])
    assert batch.uncomputed(rows).tolist() == [5, 5, 5]
    counts = [2, 0, 5]
    expected = prompts[3][3:5] + prompts[2][2:7]
    assert batch.next_tokens(rows, counts).tolist() == expected
    assert batch.next_tokens([], []).tolist() == []
    for bad_rows, bad_counts in (([0], [6]), ([0], [-1]), ([3], [1]), ([0, 1], [1]), ([0], [1.5])):
        with pytest.raises(RowError):
            batch.next_tokens(bad_rows, bad_counts)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_computed_tokens": -1}, "num_computed_tokens is -1, outside 0 .. 3"),
        ({"num_computed_tokens": 4}, "num_computed_tokens is 4, outside 0 .. 3"),
        ({"num_computed_tokens": 1.5}, "num_computed_tokens is 1.5"),
        ({"num_computed_tokens": True}, "num_computed_tokens is True"),
        ({"adapter": 0.5}, "'adapter' cannot hold 0.5"),
        ({"adapter": 2**63}, "'adapter' cannot hold 9223372036854775808"),
        ({"sampling": SimpleNamespace(top_k=2.5)}, "'top_k' cannot hold 2.5"),
        ({"extra": {"mine": 1.5}}, "'mine' cannot hold 1.5"),
        ({"extra": {"mine": 2**40}}, "'mine' cannot hold 1099511627776"),
    ],
)
def test_values_that_would_become_others_are_refused(fields: dict, message: str) -> None:
    batch = InputBatch(2, 32, MultiGroupBlockTable(2, 32, 64, "cpu", [4]))
    batch.add_column("mine", np.int16, 7)
    with pytest.raises(RowError, match=message):
        batch.add([BatchRequest("a", [1, 2, 3], [[5]], **fields)])
    assert batch.num_reqs == 0 and batch["adapter"].tolist() == [-1, -1]
    assert batch["mine"].tolist() == [7, 7] and not batch["num_tokens"].any()


@pytest.mark.parametrize("computed", [-1, 4, 1.5])
def test_a_resumed_request_has_computed_no_more_than_it_has(computed: float) -> None:
    batch = InputBatch(2, 32, MultiGroupBlockTable(2, 32, 64, "cpu", [4]))
    batch.add([BatchRequest("a", [1, 2, 3], [[5]])])
    with pytest.raises(RowError):
        batch.resume([0], [[1]], [[9]], computed)
    assert batch.block_table[0].get_numpy_array()[0, 0] == 5


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("bad", [-1, -(2**31)])
def test_negative_token_ids_are_refused_in_any_integer_type(dtype: type, bad: int) -> None:
    batch = make(torch.device("cpu"))
    batch.add([BatchRequest("a", [1, 2, 3], [[1], [2]])])
    with pytest.raises(RowError, match=str(bad)):
        batch.append_tokens([0], np.array([bad], dtype))
    with pytest.raises(RowError, match=str(bad)):
        batch.add([BatchRequest("b", np.array([4, bad], dtype), [[3], [4]])])
    assert batch.tokens(0).tolist() == [1, 2, 3] and batch.num_reqs == 1

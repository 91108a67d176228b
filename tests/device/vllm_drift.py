"""Drives vLLM's own MultiGroupBlockTable and ours with the same operations (a script).

Run by ``test_vllm_drift.py`` in a process with TRITON_INTERPRET=1, so that vLLM's slot kernel runs
on CPU tensors. Prints one JSON object: how often each known fault of vLLM 0.25.1 showed, by name.
Any other difference is an error.
"""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import torch
import triton
import triton.language as tl
import vllm.triton_utils as vllm_triton

vllm_triton.triton, vllm_triton.tl = triton, tl  # without a GPU vLLM puts stand-ins here

from vllm.v1.worker.block_table import MultiGroupBlockTable as Theirs  # noqa: E402

from blocktable.device.block_table import MultiGroupBlockTable as Ours  # noqa: E402

ROWS, MAX_LEN, TOKENS = 8, 200, 96
CPU = torch.device("cpu")
GROUPS = [([16], [16]), ([32, 16], [16, 16]), ([8, 64], [8, 16])]


def require(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"drift: {what}")


def both(block_sizes: list[int], kernel_sizes: list[int]) -> tuple[Ours, Theirs]:
    ours = Ours(ROWS, MAX_LEN, TOKENS, CPU, block_sizes, kernel_sizes)
    return ours, Theirs(ROWS, MAX_LEN, TOKENS, False, CPU, block_sizes, kernel_sizes)


def compare_tables(ours: Ours, theirs: Theirs, faults: Counter[str]) -> None:
    """Counts and live entries are equal; what lies behind them is null in ours."""
    ours.commit_block_table(ROWS)
    theirs.commit_block_table(ROWS)
    for mine, other in zip(ours.block_tables, theirs.block_tables, strict=True):
        counts = mine.num_blocks_per_row
        require((counts == other.num_blocks_per_row).all(), "counts")
        live = np.arange(mine.max_num_blocks_per_req) < counts[:, None]
        for got, want in (
            (mine.get_numpy_array(), other.get_numpy_array()),
            (mine.get_device_tensor().numpy(), other.get_device_tensor(ROWS).numpy()),
        ):
            require(got.shape == want.shape, f"widths {got.shape} {want.shape}")
            require((got[live] == want[live]).all(), "live entries")
            require(not got[~live].any(), "our entries behind a row's count")
            faults["a row keeps the tail of its earlier occupant"] += bool(want[~live].any())


def compare_slots(rng: np.random.Generator, ours: Ours, theirs: Theirs) -> None:
    """Slots of positions that the rows hold, with the padding behind them, are equal."""
    held = np.min(
        [t.num_blocks_per_row * t.block_size for t in ours.block_tables], axis=0
    )  # positions each row has blocks for in every group
    lens = np.minimum(rng.integers(0, 12, ROWS), held)
    first = (rng.random(ROWS) * (held - lens + 1)).astype(int)
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    positions = np.concatenate([np.arange(n) + f for n, f in zip(lens, first, strict=True)])
    where = torch.from_numpy(positions.astype(np.int64))
    for table in (ours, theirs):
        table.compute_slot_mapping(ROWS, torch.from_numpy(starts), where)
    for mine, other in zip(ours.block_tables, theirs.block_tables, strict=True):
        require(torch.equal(mine.slot_mapping, other.slot_mapping.gpu), "slot mappings")


def random_operations(seed: int, sizes: tuple[list[int], list[int]], faults: Counter[str]) -> None:
    rng = np.random.default_rng(seed)
    ours, theirs = both(*sizes)
    for _ in range(60):
        a, b = rng.choice(ROWS, 2, replace=False).tolist()
        space = min(
            (t.max_num_blocks_per_req - int(t.num_blocks_per_row[a])) // t.blocks_per_kv_block
            for t in ours.block_tables
        )
        most = min(t.max_num_blocks_per_req // t.blocks_per_kv_block for t in ours.block_tables)
        what = str(rng.choice(["append", "append", "add", "clear", "move", "swap"]))
        count = int(rng.integers(0, (space if what == "append" else most) + 1))
        ids = tuple(rng.integers(1, 10**6, count).tolist() for _ in ours.block_tables)
        for table in (ours, theirs):
            if what == "append":
                table.append_row(ids, a)
            elif what == "add":
                table.add_row(ids, a)
            elif what == "clear":
                table.clear_row(a)
            elif what == "swap":
                table.swap_row(a, b)
            else:
                table.move_row(a, b)
                if table is theirs:  # as its callers do: it leaves the source as it was
                    faults["move_row leaves the source row"] += bool(
                        theirs[0].num_blocks_per_row[a]
                    )
                    theirs.clear_row(a)
        compare_tables(ours, theirs, faults)
        compare_slots(rng, ours, theirs)


def slots_of(table: Ours | Theirs, positions: list[int] | np.ndarray) -> np.ndarray:
    starts = torch.tensor([0, len(positions)], dtype=torch.int32)
    table.compute_slot_mapping(1, starts, torch.as_tensor(np.asarray(positions, np.int64)))
    found = table[0].slot_mapping
    return (found if isinstance(found, torch.Tensor) else found.gpu).numpy()[: len(positions)]


def kernel_size_in_the_virtual_block(faults: Counter[str]) -> None:
    """Context parallel with kernel blocks smaller than the manager's: block 128/64, world 4,
    interleave 128, 2,048 positions, each of which must have one owner."""
    wrong, seen = 0, np.zeros(2048, int)
    for rank in range(4):
        ours = Ours(1, 2048, 2048, CPU, [128], [64], cp_world_size=4, cp_rank=rank,
                    cp_interleave=128)  # fmt: skip
        theirs = Theirs(1, 2048, 2048, False, CPU, [128], [64], cp_kv_cache_interleave_size=128)
        theirs[0].dcp_world_size, theirs[0].dcp_rank = 4, rank
        for table in (ours, theirs):
            table.add_row(([5, 2, 9, 4],), 0)
            table.commit_block_table(1)
        mine, other = slots_of(ours, np.arange(2048)), slots_of(theirs, np.arange(2048))
        owned = np.arange(2048) // 128 % 4 == rank
        require(((mine >= 0) == owned).all(), "our owners")
        seen += owned
        wrong += int((mine[owned] != other[owned]).sum())
    require((seen == 1).all(), "our ranks do not share out the positions")
    faults["kernel block size in the context-parallel block"] += wrong


def same_blocks_context_parallel(faults: Counter[str]) -> None:
    """With equal block sizes both agree for every rank and interleave."""
    for world, step in [(2, 1), (4, 8), (4, 16)]:
        for rank in range(world):
            ours = Ours(1, 512, 512, CPU, [16], [16], cp_world_size=world, cp_rank=rank,
                        cp_interleave=step)  # fmt: skip
            theirs = Theirs(1, 512, 512, False, CPU, [16], [16], cp_kv_cache_interleave_size=step)
            theirs[0].dcp_world_size, theirs[0].dcp_rank = world, rank
            for table in (ours, theirs):
                table.add_row((list(range(1, 512 // (16 * world) + 1)),), 0)
                table.commit_block_table(1)
            same = slots_of(ours, np.arange(512)) == slots_of(theirs, np.arange(512))
            require(bool(same.all()), f"context parallel world {world} rank {rank}")
    faults["context parallel, equal block sizes"] = 0


def single_faults(faults: Counter[str]) -> None:
    ours, theirs = both([16], [16])
    for table in (ours, theirs):
        table.add_row(([5, 9],), 0)
        table.add_row(([7, 8],), 1)
        table.commit_block_table(2)
    width = ours[0].max_num_blocks_per_req
    beyond = [width * 16]
    require(slots_of(ours, beyond)[0] == -1, "our slot beyond a row")
    faults["a position beyond the row reads the next row"] += int(slots_of(theirs, beyond)[0] >= 0)
    require(slots_of(ours, [40])[0] == -1, "our slot without a block")
    faults["a position without a block is written to the null block"] += int(
        slots_of(theirs, [40])[0] == 8
    )
    theirs[0].slot_mapping.gpu.fill_(77)
    theirs.compute_slot_mapping(1, torch.tensor([0, 1], dtype=torch.int32), torch.zeros(3).long())
    ours.compute_slot_mapping(1, torch.tensor([0, 1], dtype=torch.int32), torch.zeros(3).long())
    require(ours[0].slot_mapping[:4].tolist() == [80, -1, -1, -1], "our padded tokens")
    faults["padded tokens keep old slots"] += int(theirs[0].slot_mapping.gpu[1] == 77)
    for name, call in [
        ("a row that overflows is half done", lambda t: t.append_row(([3] * (width + 1),), 2)),
        ("a negative row is another row", lambda t: t.add_row(([3],), -1)),
    ]:
        outcomes = []
        for table in (ours, theirs):
            before = table[0].num_blocks_per_row.copy()
            try:
                call(table)
            except (ValueError, IndexError):
                outcomes.append(("raised", (table[0].num_blocks_per_row == before).all()))
            else:
                outcomes.append(("done", False))
        require(outcomes[0] == ("raised", True), f"our {name}")
        faults[name] += int(outcomes[1] != ("raised", True))
    for table in (ours, theirs):
        table.clear()
    require(not ours[0].num_blocks_per_row.any(), "our counts after clear")
    faults["clear keeps the counts"] += int(theirs[0].num_blocks_per_row.any())


def main() -> None:
    faults: Counter[str] = Counter()
    for seed, sizes in enumerate(GROUPS):
        random_operations(seed, sizes, faults)
    kernel_size_in_the_virtual_block(faults)
    same_blocks_context_parallel(faults)
    single_faults(faults)
    print(json.dumps(faults))


if __name__ == "__main__":
    main()

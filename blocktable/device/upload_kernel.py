"""The Triton kernel that carries out an `upload_plan.UploadPlan` for all groups in one launch."""

import torch
import triton
import triton.language as tl

from blocktable.device.compile_cases import CompileCase
from blocktable.device.launching import FixedLaunch

ENTRY_TILE = 128
"""Entries a program writes."""
COLUMN_TILE = 512
"""Columns of a chain that a program works on."""

_FILL = tl.constexpr(0)
_VALUES = tl.constexpr(1)
_COPY = tl.constexpr(2)
_SAVED = tl.constexpr(3)


@triton.jit(
    do_not_specialize=[
        "num_entries",
        "value_offset",
        "entry_programs",
        "num_chains",
        "num_operations",
    ],
    do_not_specialize_on_alignment=["plan"],
)
def upload_kernel(
    arena,  # int32, all groups' tables
    plan,  # int32, packed as upload_plan says
    num_entries,
    value_offset,
    entry_programs,
    num_chains,
    num_operations,
    ENTRY_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
):
    program = tl.program_id(0)
    tile = tl.program_id(1)
    if program < entry_programs:
        if tile == 0:
            entry = program * ENTRY_TILE + tl.arange(0, ENTRY_TILE)
            live = entry < num_entries
            cell = tl.load(plan + entry, mask=live, other=0)
            value = tl.load(plan + value_offset + entry, mask=live, other=0)
            tl.store(arena + cell, value, mask=live)
    else:
        starts = plan + 2 * num_entries
        operations = starts + num_chains + 1
        values = operations + 5 * num_operations
        chain = program - entry_programs
        first = tl.load(starts + chain)
        last = tl.load(starts + chain + 1)
        column = tile * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
        # A cycle's first row is overwritten before its last copy reads it.
        home = tl.load(operations + 5 * first + 1)
        closing = tl.load(operations + 5 * (last - 1) + 3)
        for at in range(first, last):
            closing = tl.maximum(closing, tl.load(operations + 5 * at + 3))
        saved = tl.load(arena + home + column, mask=column < closing, other=0)
        for at in range(first, last):
            operation = operations + 5 * at
            kind = tl.load(operation)
            row = tl.load(operation + 1)
            start = tl.load(operation + 2)
            stop = tl.load(operation + 3)
            source = tl.load(operation + 4)
            live = (column >= start) & (column < stop)
            value = tl.zeros([COLUMN_TILE], tl.int32)
            if kind == _VALUES:
                value = tl.load(values + source + (column - start), mask=live, other=0)
            elif kind == _COPY:
                value = tl.load(arena + source + column, mask=live, other=0)
            elif kind == _SAVED:
                value = saved
            # The next operation may write what another thread of this program has just read.
            tl.debug_barrier()
            tl.store(arena + row + column, value, mask=live)
            tl.debug_barrier()


_launch = FixedLaunch(upload_kernel)


def launch(
    arena: torch.Tensor,
    plan: torch.Tensor,
    num_entries: int,
    value_offset: int,
    num_chains: int,
    num_operations: int,
    max_stop: int,
) -> None:
    """Apply a packed plan on the current stream: one launch. ``plan`` may be pinned host memory;
    the values of its entries begin at ``value_offset``."""
    entry_programs = -(-num_entries // ENTRY_TILE)
    grid = (entry_programs + num_chains, max(1, -(-max_stop // COLUMN_TILE)), 1)
    _launch(
        grid, arena.device,
        arena, plan, num_entries, value_offset, entry_programs, num_chains, num_operations,
        ENTRY_TILE, COLUMN_TILE,
    )  # fmt: skip


COMPILE_CASES = [
    CompileCase(
        upload_kernel,
        {
            "arena": "*i32", "plan": "*i32", "num_entries": "i32", "value_offset": "i32",
            "entry_programs": "i32", "num_chains": "i32", "num_operations": "i32",
        },
        {"ENTRY_TILE": ENTRY_TILE, "COLUMN_TILE": COLUMN_TILE},
    )
]  # fmt: skip

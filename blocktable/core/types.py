"""Index spaces of the page table, as types, and the two reserved values.

Every array of ids in blocktable says by its alias which space it indexes. Block ids and rows are
int32 (4 bytes an entry is what the device table holds); slots are int64 everywhere, because
``num_blocks * block_size`` passes 2**31 for large pools.
"""

from typing import Final, NewType, TypeAlias

import numpy as np
from numpy.typing import NDArray

BlockId = NewType("BlockId", int)
"""Physical index of a block in its pool, 0 <= id < num_blocks."""
SlotId = NewType("SlotId", int)
"""``block_id * block_size + offset``, or PAD_SLOT."""
RowId = NewType("RowId", int)
"""A request's line in every block table, 0 <= row < max_num_rows."""
GroupId = NewType("GroupId", int)
"""Index of a KV cache group."""
StepId = NewType("StepId", int)
"""Number of a scheduler step, rising by one."""

BlockIds: TypeAlias = NDArray[np.int32]
RowIds: TypeAlias = NDArray[np.int32]
Slots: TypeAlias = NDArray[np.int64]
Counts: TypeAlias = NDArray[np.int32]
TokenIds: TypeAlias = NDArray[np.int32]
Keys: TypeAlias = NDArray[np.uint8]
"""Content keys of blocks, shape [n, key_bytes]."""

NULL_BLOCK: Final = BlockId(0)
"""Reserved, zeroed, never handed out; fills table entries past a row's count."""
PAD_SLOT: Final = SlotId(-1)
"""A token that is written nowhere."""

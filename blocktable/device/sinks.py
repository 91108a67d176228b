"""Rows that begin with static attention sinks, as their layers' kernels read them.

A `SinkFullAttentionSpec` group keeps the KV of its sinks, which belongs to the model, in blocks of
its own. No row names them; a kernel is handed rows and lengths that do::

    group's row, 5 tokens   [ 7  9 ]             block size 4, sinks in blocks 1 and 2
    as the kernel sees it   [ 1  2  7  9 ]       8 + 5 = 13 keys, all of them before the query

Slots are the group's own, so sinks are written once (`sink_slots`) and never by a token.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from blocktable.core.errors import ConfigError
from blocktable.core.types import BlockIds
from blocktable.device.metadata import CommonAttentionMetadata


def sink_slots(static_blocks: BlockIds, block_size: int) -> torch.Tensor:
    """Slots of the sink tokens, int64 [sink_len], in order: where the model writes their K and V,
    once. ``static_blocks`` are the group's (``manager.groups[g].static_blocks``)."""
    blocks = torch.from_numpy(static_blocks).to(torch.int64)
    return (blocks[:, None] * block_size + torch.arange(block_size)).reshape(-1)


class SinkRows:
    """Puts a group's sink blocks before its rows, in buffers whose addresses never move.

    ``max_width`` is the width of the group's own rows, ``static_blocks`` int32 [n] the blocks as
    the kernel addresses them, ``block_size`` the positions in one of these.
    """

    def __init__(
        self, static_blocks: BlockIds, block_size: int, max_num_reqs: int, max_width: int,
        device: torch.device | str,
    ) -> None:  # fmt: skip
        self.num_blocks, self.sink_len = len(static_blocks), len(static_blocks) * block_size
        width = self.num_blocks + max_width
        self.rows = torch.zeros((max_num_reqs, width), dtype=torch.int32, device=device)
        self.rows[:, : self.num_blocks] = torch.from_numpy(static_blocks).to(device)
        self.seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)

    def before(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """The step as the group's kernel is told it: rows and lengths with the sinks in front.

        A padded request keeps length 0. One copy of the rows; runs inside a CUDA graph. Valid
        until the next call. ConfigError for more or wider rows than were planned for.
        """
        table = common.block_table_tensor
        n, width = table.shape
        if n > self.rows.shape[0] or self.num_blocks + width > self.rows.shape[1]:
            raise ConfigError(
                f"{n} rows of {width} blocks behind {self.num_blocks} sink blocks do not fit a "
                f"buffer of {tuple(self.rows.shape)}"
            )
        rows, lens = self.rows[:n, : self.num_blocks + width], self.seq_lens[:n]
        rows[:, self.num_blocks :] = table
        torch.mul(common.seq_lens > 0, self.sink_len, out=lens)
        lens += common.seq_lens
        cpu = common.seq_lens_cpu
        return replace(
            common, block_table_tensor=rows, seq_lens=lens,
            seq_lens_cpu=cpu + self.sink_len * (cpu > 0).to(cpu.dtype),
            max_seq_len=common.max_seq_len + self.sink_len * (common.max_seq_len > 0),
        )  # fmt: skip

"""Plans on the device: items and tokens at fixed addresses, filled by one asynchronous copy.

A captured CUDA graph holds the addresses and the grid of its kernels. ``PlanBuffers`` keeps both
fixed: every plan is written into the same memory, and items past its end are empty (the programs
return at once). ``DevicePlan`` is what a launch needs, whether from there or made for one call.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from blocktable.attention.plan import AttentionPlan, PlanConfig
from blocktable.attention.plan_items import ITEM_WIDTH, TOKEN_WIDTH
from blocktable.core.errors import ConfigError


class Workspace(NamedTuple):
    """Partial results of pieces, one for all layers: they run one after the other.

    part_out: float32 [slots, Hq, Dv]. part_lse: float32 [slots, Hq]. counters: int32 [counters *
    Hkv], zero between calls (whoever counts last resets).
    """

    part_out: torch.Tensor
    part_lse: torch.Tensor
    counters: torch.Tensor


class DevicePlan(NamedTuple):
    """A plan on the device. small [s, 16], tile [t, 16], tokens [k, 4] int32; empty = no launch."""

    small: torch.Tensor
    tile: torch.Tensor
    tokens: torch.Tensor
    tile_m: int
    gathers: bool
    workspace: Workspace


def make_workspace(
    slots: int, counters: int, config: PlanConfig, value_size: int, device: torch.device
) -> Workspace:
    """A workspace for plans of at most ``slots`` slots and ``counters`` counters."""
    heads = config.num_q_heads
    slots = max(slots, 1)
    return Workspace(
        torch.empty((slots, heads, value_size), dtype=torch.float32, device=device),
        torch.empty((slots, heads), dtype=torch.float32, device=device),
        torch.zeros(max(counters, 1) * config.num_kv_heads, dtype=torch.int32, device=device),
    )


def upload_plan(
    plan: AttentionPlan, config: PlanConfig, value_size: int, device: torch.device
) -> DevicePlan:
    """A plan for one call, in memory of its own."""
    packed = np.concatenate((plan.small.ravel(), plan.tile.ravel(), plan.tokens.ravel()))
    words = torch.from_numpy(packed)
    if device.type == "cuda":
        words = words.pin_memory().to(device, non_blocking=True)
    small, tile, tokens = words.split([plan.small.size, plan.tile.size, plan.tokens.size])
    return DevicePlan(
        small.view(-1, ITEM_WIDTH), tile.view(-1, ITEM_WIDTH), tokens.view(-1, TOKEN_WIDTH),
        plan.tile_m, plan.shares,
        make_workspace(plan.num_slots, plan.num_counters, config, value_size, device),
    )  # fmt: skip


class PlanBuffers:
    """Fixed device memory for the decode plans of one batch size, ready for CUDA graphs.

    num_rows: padded batch size, one query token a row. max_tiles: tile items (shared prefixes) per
    plan; 0 for a graph that launches none. Memory: 64 bytes an item, and the workspace unless one
    is passed (4 * Hq * (Dv + 1) bytes a slot).
    """

    def __init__(
        self, config: PlanConfig, value_size: int, num_rows: int, device: torch.device | str,
        *, max_tiles: int = 0, workspace: Workspace | None = None, staging: int = 3,
    ) -> None:  # fmt: skip
        self.config, self.num_rows, self.max_tiles = config, num_rows, max_tiles
        self.device = torch.device(device)
        # Cutting work into pieces of work / workers adds at most workers / Hkv of them.
        self.max_small = num_rows + -(-config.num_workers // config.num_kv_heads)
        self.tile_m = config.tile_sizes[-1]
        self.max_tokens = max_tiles * max(self.tile_m // config.group, 1)
        self.max_slots = self.max_small + self.max_tokens
        self._words = (
            self.max_small * ITEM_WIDTH + max_tiles * ITEM_WIDTH + self.max_tokens * TOKEN_WIDTH
        )
        self.workspace = workspace or make_workspace(
            self.max_slots, num_rows, config, value_size, self.device
        )
        self._device_words = torch.zeros(self._words, dtype=torch.int32, device=self.device)
        pin = self.device.type == "cuda"
        self._staging = [
            torch.zeros(self._words, dtype=torch.int32, pin_memory=pin) for _ in range(staging)
        ]
        self._copied: list[torch.cuda.Event | None] = [None] * staging
        self._turn = 0

    @property
    def plan(self) -> DevicePlan:
        """The plan in the buffers; its tensors keep their addresses for the buffers' life."""
        small, tile, tokens = self._device_words.split(
            [
                self.max_small * ITEM_WIDTH,
                self.max_tiles * ITEM_WIDTH,
                self.max_tokens * TOKEN_WIDTH,
            ]
        )
        return DevicePlan(
            small.view(-1, ITEM_WIDTH), tile.view(-1, ITEM_WIDTH), tokens.view(-1, TOKEN_WIDTH),
            self.tile_m, self.max_tiles > 0, self.workspace,
        )  # fmt: skip

    def fits(self, plan: AttentionPlan) -> bool:
        """Whether a plan goes into these buffers."""
        return (
            len(plan.small) <= self.max_small
            and len(plan.tile) <= self.max_tiles
            and len(plan.tokens) <= self.max_tokens
            and plan.num_slots <= self.workspace.part_out.shape[0]
            and plan.num_counters * self.config.num_kv_heads <= self.workspace.counters.numel()
            and (len(plan.tile) == 0 or plan.tile_m == self.tile_m)
        )

    def load(self, plan: AttentionPlan) -> None:
        """Bring a plan to the device: one asynchronous copy on the current stream.

        The staging memory turns, so that a copy in flight is never overwritten. Raises ConfigError
        for a plan that does not fit (see ``fits``).
        """
        if not self.fits(plan):
            raise ConfigError(
                f"a plan of {len(plan.small)} small and {len(plan.tile)} tile items, "
                f"{plan.num_slots} slots and tile size {plan.tile_m} does not fit buffers for "
                f"{self.max_small}, {self.max_tiles}, {self.workspace.part_out.shape[0]} and "
                f"{self.tile_m}"
            )
        turn = self._turn
        self._turn = (turn + 1) % len(self._staging)
        event = self._copied[turn]
        if event is not None:
            event.synchronize()
        words = self._staging[turn].numpy()
        words[:] = 0
        at = 0
        for part, room in (
            (plan.small, self.max_small * ITEM_WIDTH),
            (plan.tile, self.max_tiles * ITEM_WIDTH),
            (plan.tokens, self.max_tokens * TOKEN_WIDTH),
        ):
            words[at : at + part.size] = part.ravel()
            at += room
        self._device_words.copy_(self._staging[turn], non_blocking=True)
        if self.device.type == "cuda":
            event = event or torch.cuda.Event()
            event.record()
            self._copied[turn] = event



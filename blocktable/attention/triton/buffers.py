"""Plans on the device: items and tokens at fixed addresses, filled by one asynchronous copy.

A captured CUDA graph holds the addresses and the grid of its kernels. ``PlanBuffers`` keeps both
fixed: every plan is written into the same memory, and items past its end are empty (a small item's
program returns at once, a tile's takes some 5 us). ``DevicePlan`` is what a launch needs, whether
from there or made for one call.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from blocktable.attention.plan import SMALL_M, AttentionPlan, PlanConfig
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
    """A plan on the device: small [s, 16], tile [t, 16], tokens and merges [k, 4] int32. An empty
    one is no launch."""

    small: torch.Tensor
    tile: torch.Tensor
    tokens: torch.Tensor
    merges: torch.Tensor
    tile_m: int
    gathers: bool
    tile_merges: bool
    few: bool
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
    parts = (plan.small, plan.tile, plan.tokens, plan.merges)
    words = torch.from_numpy(np.concatenate([part.ravel() for part in parts]))
    if device.type == "cuda":
        words = words.to(device, non_blocking=True)  # staged by the driver; pinning costs 0.3 ms
    workspace = make_workspace(plan.num_slots, plan.num_counters, config, value_size, device)
    sizes = [part.size for part in parts]
    return _view(words, sizes, plan.tile_m, plan.shares, plan.tile_merges, plan.few, workspace)


def _view(
    words: torch.Tensor, sizes: list[int], tile_m: int, gathers: bool, tile_merges: bool,
    few: bool, workspace: Workspace,
) -> DevicePlan:  # fmt: skip
    small, tile, tokens, merges = words.split(sizes)
    return DevicePlan(
        small.view(-1, ITEM_WIDTH), tile.view(-1, ITEM_WIDTH), tokens.view(-1, TOKEN_WIDTH),
        merges.view(-1, TOKEN_WIDTH), tile_m, gathers, tile_merges, few, workspace,
    )  # fmt: skip


class PlanBuffers:
    """Fixed device memory for the decode plans of one batch size, ready for CUDA graphs.

    Plans for it are made with its ``config``: the one given, settled for ``num_rows``.

    num_rows: padded batch size, one query token a row. max_tiles: tile items (shared prefixes) per
    plan; 0 for a graph that launches none. Memory: 64 bytes an item, and the workspace unless one
    is passed (4 * Hq * (Dv + 1) bytes a slot).
    """

    def __init__(
        self, config: PlanConfig, value_size: int, num_rows: int, device: torch.device | str,
        *, max_tiles: int = 0, workspace: Workspace | None = None, staging: int = 3,
    ) -> None:  # fmt: skip
        self.num_rows, self.max_tiles = num_rows, max_tiles
        self.device = torch.device(device)
        self.max_small = num_rows + config.slots(config.num_workers)
        self.config = config.for_graph(num_rows)
        self.tile_m = config.tile_sizes[-1]
        self.tile_merges = config.group > SMALL_M  # decoding rows are tiles themselves
        self.max_tokens = max_tiles * max(self.tile_m // config.group, 1)
        self.max_slots = self.max_small + self.max_tokens
        self._sizes = [
            self.max_small * ITEM_WIDTH, max_tiles * ITEM_WIDTH, self.max_tokens * TOKEN_WIDTH,
            (num_rows if max_tiles else 0) * TOKEN_WIDTH,
        ]  # fmt: skip
        words = sum(self._sizes)
        self.workspace = workspace or make_workspace(
            self.max_slots, num_rows, config, value_size, self.device
        )
        self._device_words = torch.zeros(words, dtype=torch.int32, device=self.device)
        pin = self.device.type == "cuda"
        self._staging = [
            torch.zeros(words, dtype=torch.int32, pin_memory=pin) for _ in range(staging)
        ]
        self._copied: list[torch.cuda.Event | None] = [None] * staging
        self._turn = 0

    @property
    def plan(self) -> DevicePlan:
        """The plan in the buffers; its tensors keep their addresses for the buffers' life."""
        return _view(
            self._device_words, self._sizes, self.tile_m, self.max_tiles > 0, self.tile_merges,
            bool(self.config.few), self.workspace,
        )  # fmt: skip

    def fits(self, plan: AttentionPlan) -> bool:
        """Whether a plan goes into these buffers."""
        return (
            len(plan.small) <= self.max_small
            and len(plan.tile) <= self.max_tiles
            and len(plan.tokens) <= self.max_tokens
            and len(plan.merges) * TOKEN_WIDTH <= self._sizes[3]
            and plan.num_slots <= self.workspace.part_out.shape[0]
            and plan.num_counters * self.config.num_kv_heads <= self.workspace.counters.numel()
            and (len(plan.tile) == 0 or plan.tile_m == self.tile_m)
            and (self.tile_merges or not plan.tile_merges)
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
        parts = (plan.small, plan.tile, plan.tokens, plan.merges)
        for part, room in zip(parts, self._sizes, strict=True):
            words[at : at + part.size] = part.ravel()
            at += room
        self._device_words.copy_(self._staging[turn], non_blocking=True)
        if self.device.type == "cuda":
            event = event or torch.cuda.Event()
            event.record()
            self._copied[turn] = event

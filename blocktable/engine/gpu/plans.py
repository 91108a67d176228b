"""The attention work of a step, planned on the host and kept at fixed device addresses.

Layers of one KV cache group that look alike share a plan. Items of a plan name rows of the batch;
here they are renamed to the rows of the device table, so the kernels read the table where it lies
and no step gathers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from blocktable.attention.plan import AttentionPlan, PlanConfig, plan_attention
from blocktable.attention.plan_items import field
from blocktable.attention.triton import (
    DevicePlan,
    PlanBuffers,
    Workspace,
    make_workspace,
    plan_config,
    upload_plan,
)
from blocktable.core.table import HostTable
from blocktable.engine.attention_glue import AttentionCall, LayerCache
from blocktable.engine.probe import ProbedLayer


class GroupShape(NamedTuple):
    """What the layers of one KV cache group have in common: all that a plan depends on."""

    config: PlanConfig
    value_size: int


def group_shapes(
    layers: Sequence[ProbedLayer],
    caches: dict[int, LayerCache],
    num_groups: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[GroupShape | None]:
    """The shape of each group; None where its layers differ (they then plan for themselves)."""
    found: list[dict[AttentionCall, LayerCache]] = [{} for _ in range(num_groups)]
    for layer in layers:
        cache = caches[id(layer.module)]
        found[cache.group][layer.call] = cache
    return [_shape(calls, dtype, device) for calls in found]


def _shape(
    calls: dict[AttentionCall, LayerCache], dtype: torch.dtype, device: torch.device
) -> GroupShape | None:
    shapes = {
        (c.num_heads, c.num_kv_heads, c.head_size, c.head_size_v, c.sliding_window, c.chunk)
        for c in calls
    }
    if len(shapes) != 1:
        return None
    call, cache = next(iter(calls.items()))
    query = torch.empty((1, call.num_heads, call.head_size), dtype=dtype, device=device)
    config = plan_config(
        query, cache.k_cache, cache.v_cache,
        sliding_window=call.sliding_window or cache.window, chunk=cache.chunk,
    )  # fmt: skip
    return GroupShape(config, call.head_size_v)


class GroupPlanner:
    """Plans of one group, for steps in a graph and for others."""

    def __init__(
        self, shape: GroupShape, table: HostTable, device: torch.device, rows: int
    ) -> None:
        self.shape, self._table, self._device = shape, table, device
        config = shape.config
        self.max_tiles = 2 * config.num_tile_workers if config.may_share else 0
        self._workspace = self._make_workspace(rows)
        self._buffers: dict[tuple[int, bool], PlanBuffers] = {}

    def _make_workspace(self, rows: int) -> Workspace:
        """Partial results for the largest batch, shared by all graphs: they never run at once."""
        config = self.shape.config
        largest = PlanBuffers(
            config, self.shape.value_size, rows, "meta", max_tiles=self.max_tiles,
            workspace=make_workspace(1, 1, config, self.shape.value_size, torch.device("meta")),
        )  # fmt: skip
        return make_workspace(largest.max_slots, rows, config, self.shape.value_size, self._device)

    def host_plan(
        self,
        rows: NDArray[np.int32],
        starts: NDArray[np.int32],
        lens: NDArray[np.int32],
        *,
        num_tokens: int | None = None,
    ) -> AttentionPlan:
        """The plan of a batch; rows past ``len(rows)`` of ``lens`` are padding of length 0."""
        table = None
        if self.shape.config.may_share and len(rows) > 1:
            width = int(self._table.counts[rows].max())
            table = np.zeros((len(lens), width), np.int32)
            table[: len(rows)] = self._table.rows[rows, :width]
        plan = plan_attention(self.shape.config, starts, lens, table, num_tokens=num_tokens)
        names = np.zeros(len(lens), np.int32)
        names[: len(rows)] = rows
        for items in (plan.small, plan.tile):
            at = field(items, "table_row")
            at[:] = names[at]
        return plan

    def upload(self, plan: AttentionPlan) -> DevicePlan:
        """A plan for a step outside the graphs."""
        return upload_plan(plan, self.shape.config, self.shape.value_size, self._device)

    def buffers(self, num_rows: int, shares: bool) -> PlanBuffers:
        """The fixed buffers of a graph of ``num_rows`` requests, with or without shared tiles."""
        key = (num_rows, shares)
        if key not in self._buffers:
            self._buffers[key] = PlanBuffers(
                self.shape.config, self.shape.value_size, num_rows, self._device,
                max_tiles=self.max_tiles if shares else 0, workspace=self._workspace,
            )  # fmt: skip
        return self._buffers[key]

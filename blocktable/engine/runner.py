"""Runs a scheduled step on the model: blocks moved, inputs built, one forward pass, logits out.

A step's inputs are built from the scheduler's arrays by a fixed number of NumPy calls, whatever the
number of requests::

    rows           [ 4   0   9 ]            requests in batch order
    num_scheduled  [ 1   3   1 ]
    num_computed   [57   0  12 ]
    tokens         | 57 | 0 1 2 | 12 |      positions; token ids from manager.tokens[row, position]
    slots          one for each token and KV cache group, through the host table

The host tables are read as they are: on a CPU the table the kernel walks is a copy of the batch's
rows, cut to the longest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from blocktable.core.geometry import SlotGeometry
from blocktable.core.specs import AttentionSpec, KVCacheConfig, KVCacheGroupSpec
from blocktable.core.table import HostTable
from blocktable.engine.attention_glue import AttentionSwitch, GroupStep, PagedStep
from blocktable.engine.drafts import draw_lines
from blocktable.engine.kv_layout import KVLayout, is_dealt_out
from blocktable.engine.kv_memory import KVMemory
from blocktable.engine.probe import ProbeResult
from blocktable.sched.output import SchedulerOutput

if TYPE_CHECKING:
    from blocktable.manager import KVCacheManager


class StepInputs(NamedTuple):
    """The flattened ragged batch of a step, on the host."""

    input_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    token_rows: NDArray[np.int32]  # [T] row of each token
    query_start_loc: NDArray[np.int32]  # [n + 1]
    seq_lens: NDArray[np.int32]  # [n]
    logits_at: NDArray[np.int64]  # [lines] tokens whose logits are drawn from (see DrawLines)


class PagedGroup(NamedTuple):
    """A group's table, where its positions lie on this rank, and the share where others lie on
    other ranks."""

    table: HostTable
    geometry: SlotGeometry
    share: ContextShare | None


class StepRows(NamedTuple):
    """What attention sees: table rows [n], query starts [n + 1] and keys [n], on the device."""

    rows: NDArray[np.int32]
    starts: torch.Tensor
    lens: torch.Tensor


def _paged_group(
    table: HostTable, group: KVCacheGroupSpec, page_tokens: int, share: ContextShare | None
) -> PagedGroup:
    if share is None or not is_dealt_out(group):
        return PagedGroup(table, SlotGeometry(group.kv_cache_spec.block_size), None)
    return PagedGroup(table, share.geometry(page_tokens), share)


def build_inputs(output: SchedulerOutput, tokens: NDArray[np.int32]) -> StepInputs:
    """The step's flattened inputs; ``tokens`` is ``manager.tokens`` [rows, max_model_len]."""
    counts, start = output.num_scheduled, output.query_start_loc
    token_rows = np.repeat(output.rows, counts)
    shift = output.num_computed.astype(np.int64) - start[:-1]
    positions = np.arange(output.num_total, dtype=np.int64) + np.repeat(shift, counts)
    ids = tokens[token_rows, positions].astype(np.int64)
    logits_at = start[1:].astype(np.int64)[output.sample_index] - 1
    if output.num_drafts is not None:
        lines = draw_lines(output, output.num_drafts)
        logits_at = logits_at[lines.owner] - lines.drafts[lines.owner] + lines.offset
    return StepInputs(ids, positions, token_rows, start, output.seq_lens, logits_at)


class ContextShare(Protocol):
    """A rank's part in attention over KV that is dealt out to several (context parallelism)."""

    def geometry(self, block_size: int) -> SlotGeometry:
        """Where positions lie; ``block_size`` is a page's on one rank."""
        ...

    def visible(self, positions: Any, geometry: SlotGeometry) -> Any:
        """int32, same shape: keys of this rank that a query at each position sees; for a tensor or
        a NumPy array."""
        ...

    def attend(self, back_end: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        """A ``paged_attention`` of one query a row that joins what all ranks' back ends find."""
        ...


class ModelRunner:
    """The device side of an engine: model, KV memory, and the tensors of the step being run.

    ``model`` is a transformers causal language model whose attention the probe has accepted.
    ``attend``, ``write`` and ``prepare`` are the back end: ``prepare(table, query_start_loc,
    seq_lens)`` may return a plan that ``attend`` gets as ``plan=`` in every layer of the step.
    ``share`` is this rank's part where positions are dealt out to several ranks.
    """

    def __init__(
        self,
        model: Any,
        probed: ProbeResult,
        layout: KVLayout,
        config: KVCacheConfig,
        manager: KVCacheManager,
        *,
        attend: Callable[..., Any],
        write: Callable[..., None],
        prepare: Callable[..., Any] | None = None,
        num_host_blocks: int = 0,
        share: ContextShare | None = None,
    ) -> None:
        self.model, self.manager = model, manager
        self.device = torch.device(model.device)
        self.memory = KVMemory(
            layout, probed.layers, config.num_blocks, self.device, num_host_blocks
        )
        self._mixers = probed.mixers
        self._switch = AttentionSwitch(model)
        self._attend, self._write, self._prepare = attend, write, prepare
        self._paged = [
            _paged_group(table, group, layout.block_size, share)
            for table, group in zip(manager.tables, config.kv_cache_groups, strict=True)
            if isinstance(group.kv_cache_spec, AttentionSpec)
        ]
        num_rows = manager.tables[0].max_rows
        self._last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def execute(
        self, output: SchedulerOutput, also: NDArray[np.int64] | None = None
    ) -> torch.Tensor | None:
        """Move the step's blocks and run it. Returns logits [m, V], one line for each of
        ``output.sample_rows`` (with drafts one for each of ``draw_lines``) and, behind them, one
        for each place in the flattened batch that ``also`` names; None if there is no line. Does
        not wait for a GPU."""
        self.memory.swap_out(output.swap_out)
        self.memory.swap_in(output.swap_in)
        self.memory.copy(output.copies)
        if self._mixers.modules:
            self._enter_states(output)
        if output.is_empty:
            return None
        inputs = build_inputs(output, self.manager.tokens)
        if also is not None:
            inputs = inputs._replace(logits_at=np.concatenate([inputs.logits_at, also]))
        logits = self._forward(output, inputs)
        if self._mixers.modules:
            self._mixers.fork(_forks(output, drawn=True))
        return logits

    def remember(self, rows: NDArray[np.int32], token_ids: torch.Tensor) -> None:
        """Keep the sampled tokens on the device, for a step scheduled before they are known."""
        self._last_tokens[torch.from_numpy(rows.astype(np.int64)).to(self.device)] = token_ids

    def download(self, token_ids: torch.Tensor) -> Callable[[], np.ndarray]:
        """Start bringing sampled tokens to the host; the returned function waits for them alone,
        not for what was queued behind them."""
        return token_ids.cpu().numpy

    def _forward(self, output: SchedulerOutput, inputs: StepInputs) -> torch.Tensor | None:
        groups = self._groups(output, inputs)
        step = PagedStep(self.memory.caches, groups, self._attend, self._write)
        ids = self._to_device(inputs.input_ids)
        if output.pending is not None:
            self._fill_pending(ids, output, output.pending, inputs)
        sampling = len(inputs.logits_at) > 0
        keep = inputs.logits_at if sampling else np.zeros(1, np.int64)
        self._mixers.active = bool(self._mixers.modules)
        try:
            with self._switch:
                logits = self.model(
                    input_ids=ids[None],
                    position_ids=self._to_device(inputs.positions)[None],
                    use_cache=False,
                    logits_to_keep=self._to_device(keep),
                    blocktable=step,
                ).logits[0]
        finally:
            self._mixers.active = False
        return logits if sampling else None

    def _fill_pending(
        self,
        ids: torch.Tensor,
        output: SchedulerOutput,
        pending: NDArray[np.bool_],
        inputs: StepInputs,
    ) -> None:
        """Take the last input token of rows whose previous step is not yet back from the device."""
        waiting = np.flatnonzero(pending)
        at = self._to_device(inputs.query_start_loc[1:].astype(np.int64)[waiting] - 1)
        ids[at] = self._last_tokens[self._to_device(output.rows[waiting].astype(np.int64))]

    def _groups(self, output: SchedulerOutput, inputs: StepInputs) -> list[GroupStep]:
        """Table, slots and plan of every attention group."""
        starts = self._to_device(inputs.query_start_loc)
        lens = self._to_device(inputs.seq_lens)
        groups = []
        for table, geometry, share in self._paged:
            slots = self._to_device(geometry.slots(table.rows, inputs.token_rows, inputs.positions))
            width = max(1, int(table.counts[output.rows].max()))
            view, attend = StepRows(output.rows, starts, lens), None
            if share is not None:
                view, attend = self._dealt_out(share, geometry, inputs), share.attend(self._attend)
            rows = self._to_device(table.rows[view.rows, :width])
            plan = None
            if self._prepare is not None:
                plan = self._prepare(rows, view.starts, view.lens)
            groups.append(GroupStep(rows, slots, view.starts, view.lens, plan, attend))
        return groups

    def _dealt_out(
        self, share: ContextShare, geometry: SlotGeometry, inputs: StepInputs
    ) -> StepRows:
        """How many of this rank's keys a query sees is another number for each token, so each token
        is a row of its own."""
        starts = np.arange(len(inputs.positions) + 1, dtype=np.int32)
        own = share.visible(inputs.positions, geometry)
        return StepRows(inputs.token_rows, self._to_device(starts), self._to_device(own))

    def _enter_states(self, output: SchedulerOutput) -> None:
        """Bring the stateful mixers' request states in line with the step."""
        self._mixers.fork(_forks(output, drawn=False), output.released.tolist())
        self._mixers.enter_step(
            output.rows.tolist(), output.num_computed.tolist(), output.query_start_loc.tolist()
        )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


def _forks(output: SchedulerOutput, *, drawn: bool) -> list[tuple[int, int]]:
    """(parent row, row) of children that only draw their first token from the step, and copy
    what their parent is after it; or of the others, which copy what it was before."""
    if not output.forked:
        return []
    first_drawn = set(output.sample_rows.tolist()) - set(output.rows.tolist())
    return [(f.parent_row, f.row) for f in output.forked if (f.row in first_drawn) == drawn]

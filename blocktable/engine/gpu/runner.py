"""Running steps on a GPU.

A step in which every request decodes one token is replayed as a CUDA graph: its inputs are copied
into buffers that never move, the table's changes are uploaded, the attention plan is loaded, and
one launch runs the whole model. Other steps launch their kernels one by one, with the same layers::

    stage (1 copy) -> commit tables (1 kernel) -> load plans (1 copy a group) -> replay

The host never waits for the device here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from blocktable.attention.adapters import Tables
from blocktable.attention.options import OURS
from blocktable.attention.plan import SMALL_M
from blocktable.core.errors import ConfigError
from blocktable.core.geometry import SlotGeometry
from blocktable.core.specs import AttentionSpec
from blocktable.device.block_table import MultiGroupBlockTable
from blocktable.device.graphs import GraphPool, StaticInputs, StepInputs, capture_sizes, padded_size
from blocktable.engine.attention_glue import AttentionSwitch, GroupStep, PagedStep
from blocktable.engine.gpu.libraries import Planner, with_libraries
from blocktable.engine.gpu.op import (
    COMPILED_NAME,
    RunningStep,
    compile_blocks,
    give_handles,
    register_compiled_attention,
    running,
)
from blocktable.engine.gpu.plans import GroupPlanner, GroupShape, group_shapes
from blocktable.engine.runner import ModelRunner, PagedGroup
from blocktable.sched.output import SchedulerOutput

PENDING = -1
"""Input id of a token that the step before samples: taken from the device when the step runs."""


class Download(NamedTuple):
    """Tokens on their way to pinned memory; calling it waits for them alone."""

    host: torch.Tensor
    copied: torch.cuda.Event

    def is_there(self) -> bool:
        """Whether they have come."""
        return self.copied.query()

    def __call__(self) -> np.ndarray:
        self.copied.synchronize()
        return self.host.numpy()


class GraphRunner(ModelRunner):
    """A ModelRunner whose decode steps are CUDA graphs. Same arguments, and:

    max_num_seqs, max_num_batched_tokens: sizes of the fixed buffers.
    compile: compile the decoder blocks (``op.compile_blocks``).
    use_graphs: off for measuring what graphs give.
    attention_backend: see ``EngineOptions``.
    """

    def __init__(
        self, *args: Any, max_num_seqs: int, max_num_batched_tokens: int, compile: bool = True,
        use_graphs: bool = True, attention_backend: str = OURS, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kwargs)
        model, probed, _, config, manager = args[:5]
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        self._attention_groups = [
            g for g, spec in enumerate(specs) if isinstance(spec, AttentionSpec)
        ]
        hosts = [manager.tables[g] for g in self._attention_groups]
        spread = next((g.geometry for g in self._paged if g.share), SlotGeometry(1))
        self.tables = MultiGroupBlockTable.over(
            hosts, max(max_num_batched_tokens, max_num_seqs, 2), self.device,
            [group.geometry.block_size for group in self._paged], None,
            spread.cp_world, spread.cp_rank, spread.cp_interleave,
            [group.share is None for group in self._paged],
        )  # fmt: skip
        self._inputs = StaticInputs(
            max(max_num_seqs, 2), max(max_num_batched_tokens, 2), self.device
        )
        shapes = group_shapes(
            probed.layers, self.memory.caches, len(hosts), model.dtype, self.device
        )
        planners = [
            None if shape is None else GroupPlanner(shape, host, self.device, max_num_seqs)
            for shape, host in zip(map(_shape_on_rank, shapes, self._paged), hosts, strict=True)
        ]
        device_tables = self.tables.device_tables.tables
        self._planners: list[Planner | None] = with_libraries(
            attention_backend, planners, probed.layers, self.memory.caches,
            [Tables(h.rows, table) for h, table in zip(hosts, device_tables, strict=True)],
            model.dtype, max(max_num_seqs, 2),
        )  # fmt: skip
        # a compiler makes a second build for a single token: one request is padded to two
        sizes = [size for size in capture_sizes(max_num_seqs, step=16) if size > 1] or [2]
        levels = max((len(p.tile_rooms) for p in self._planners if p is not None), default=1)
        self._graphs = [GraphPool(sizes, self.device) for _ in range(levels)]
        self._use_graphs = (
            use_graphs
            and self.device.type == "cuda"
            and not probed.mixers.modules
            and all(planner is not None for planner in self._planners)
            and all(map(_may_capture, self._planners, self._paged))
        )
        self._modules: dict[int, torch.nn.Module] = {}
        if compile and not probed.mixers.modules:
            register_compiled_attention()
            self._modules = give_handles(probed.layers, self.device)
            compile_blocks(model, probed.layers)
            self._switch = AttentionSwitch(model, COMPILED_NAME)
        self._staged: StepInputs | None = None

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """Batch sizes that have a graph, or will when they are first needed."""
        return self._graphs[0].sizes

    def remember(self, rows: NDArray[np.int32], token_ids: torch.Tensor) -> None:
        """Keep the sampled tokens on the device, for a step scheduled before they are known."""
        self._last_tokens.index_copy_(0, self._to_device(rows.astype(np.int64)), token_ids)

    def download(self, token_ids: torch.Tensor) -> Callable[[], np.ndarray]:
        """Copy sampled tokens to pinned memory behind what is queued; wait for that copy alone."""
        if self.device.type != "cuda":
            return super().download(token_ids)
        host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
        host.copy_(token_ids, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return Download(host, copied)

    # -- one step ---------------------------------------------------------------------------------

    def _forward(self, output: SchedulerOutput, inputs: Any) -> torch.Tensor | None:
        decodes = output.num_total == len(output.rows) == len(output.sample_rows)
        ordered = decodes and np.array_equal(output.sample_rows, output.rows)
        size = padded_size(len(output.rows), self.capture_sizes)
        if self._use_graphs and ordered and size is not None:
            logits = self._replay(output, inputs, size)
            if logits is not None:
                return logits
        return self._launch(output, inputs)

    def _stage(
        self, output: SchedulerOutput, inputs: Any, *, requests: int, tokens: int
    ) -> StepInputs:
        """Inputs and table changes on their way to the device."""
        ids = inputs.input_ids
        if output.pending is not None:
            ids = ids.copy()
            ids[inputs.query_start_loc[1:][output.pending] - 1] = PENDING
        staged = self._inputs.stage(
            output.rows, output.num_scheduled, inputs.seq_lens, ids,
            num_reqs_padded=requests, num_tokens_padded=tokens,
        )  # fmt: skip
        self.tables.commit_block_table(len(output.rows))
        return staged

    def _replay(self, output: SchedulerOutput, inputs: Any, size: int) -> torch.Tensor | None:
        """The step as a graph of ``size`` requests; None if a plan does not fit its buffers."""
        planners = [planner for planner in self._planners if planner is not None]
        plans = [
            planner.decode_plan(output.rows, _keys(group, inputs.seq_lens), size)
            for planner, group in zip(planners, self._paged, strict=True)
        ]
        levels = (p.level(plan) for p, plan in zip(planners, plans, strict=True))
        level = max(levels, default=0)
        buffers = [p.buffers(size, level) for p in planners]
        if not all(b.fits(plan) for b, plan in zip(buffers, plans, strict=True)):
            return None
        staged = self._stage(output, inputs, requests=size, tokens=size)
        for held, plan in zip(buffers, plans, strict=True):
            held.load(plan)
        step_plans = [held.plan for held in buffers]

        run = partial(self._captured_pass, staged, step_plans)
        return self._graphs[level].run(size, run)[: len(output.rows)]

    def _captured_pass(self, staged: StepInputs, plans: list[Any], size: int) -> torch.Tensor:
        return self._model_pass(staged, plans, size, 0)

    def _launch(self, output: SchedulerOutput, inputs: Any) -> torch.Tensor | None:
        """The step kernel by kernel."""
        tokens = max(output.num_total, 2)  # see capture sizes
        staged = self._stage(output, inputs, requests=len(output.rows), tokens=tokens)
        plans = [
            planner and planner.upload(_launch_plan(planner, group, output.rows, inputs, tokens))
            for planner, group in zip(self._planners, self._paged, strict=True)
        ]
        sampling = len(inputs.logits_at) > 0
        keep = inputs.logits_at if sampling else np.zeros(1, np.int64)
        keep_at = self._to_device(keep)
        logits = self._model_pass(staged, plans, len(output.rows), keep_at)
        return logits if sampling else None

    def _model_pass(
        self, staged: StepInputs, plans: list[Any], num_requests: int, keep: Any
    ) -> torch.Tensor:
        """Slots, then the model: everything a graph captures. Returns logits [m, V]."""
        tokens = staged.input_ids.shape[0]
        ids = staged.input_ids.to(torch.int64)
        if num_requests == tokens:
            last = self._last_tokens[staged.rows.clamp(min=0).to(torch.int64)]
        else:
            owner = torch.searchsorted(
                staged.query_start_loc[1:].contiguous(),
                torch.arange(tokens, dtype=torch.int32, device=self.device), right=True,
            ).clamp(max=num_requests - 1)  # fmt: skip
            last = self._last_tokens[staged.rows.clamp(min=0).to(torch.int64)[owner]]
        ids = torch.where(ids == PENDING, last, ids)
        self.tables.compute_slot_mapping(
            num_requests, staged.query_start_loc, staged.positions, staged.rows
        )
        tables = self._tables_of(staged, plans)
        groups = [
            GroupStep(
                tables[g], self.tables[g].slot_mapping[:tokens],
                staged.query_start_loc, staged.seq_lens, plan,
                None if group.share is None else group.share.attend(self._attend),
            )
            for g, (plan, group) in enumerate(zip(plans, self._paged, strict=True))
        ]  # fmt: skip
        step = PagedStep(self.memory.caches, groups, self._attend, self._write)
        self._mixers.active = bool(self._mixers.modules)
        try:
            with self._switch, running(RunningStep(step, self._modules)):
                return self.model(
                    input_ids=ids[None], position_ids=staged.positions[None], use_cache=False,
                    logits_to_keep=keep, **({} if self._modules else {"blocktable": step}),
                ).logits[0]  # fmt: skip
        finally:
            self._mixers.active = False

    def _tables_of(self, staged: StepInputs, plans: list[Any]) -> list[torch.Tensor]:
        """Each group's table: plans name its rows; without one (never in a graph) rows are taken
        in the batch's order, so they are gathered."""
        tables = list(self.tables.device_tables.tables)
        if any(plan is None for plan in plans):
            gathered = self.tables.gather_rows(staged.rows, staged.rows_cpu.numpy())
            for g, plan in enumerate(plans):
                tables[g] = gathered[g] if plan is None else tables[g]
        return tables

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    # -- before traffic ---------------------------------------------------------------------------

    @torch.inference_mode()
    def warm_up(self) -> int:
        """Capture every batch size now, by steps of padding alone, which touch no block; the last
        level's graphs, which few batches ever need, are left until then. Returns the number of
        graphs; call it before the first request (about 50 ms a graph)."""
        if not self._use_graphs:
            return 0
        nothing = np.zeros(0, np.int32)
        planners = [planner for planner in self._planners if planner is not None]
        for level in range(min(2, len(self._graphs))):
            for size in reversed(self.capture_sizes):
                staged = self._inputs.stage(
                    nothing, nothing, nothing, nothing,
                    num_reqs_padded=size, num_tokens_padded=size,
                )  # fmt: skip
                step_plans = []
                for planner in planners:
                    held = planner.buffers(size, level)
                    held.load(planner.decode_plan(nothing, nothing, size))
                    step_plans.append(held.plan)
                self._graphs[level].run(size, partial(self._captured_pass, staged, step_plans))
        return sum(len(pool.captured) for pool in self._graphs)

    @property
    def graph_pools(self) -> list[GraphPool]:
        """Where the graphs are kept."""
        return self._graphs

    def captured(self) -> list[list[int]]:
        """Batch sizes captured so far, by level of room for shared prefixes (``GroupPlanner``)."""
        return [sorted(pool.captured) for pool in self._graphs]


def _shape_on_rank(shape: GroupShape | None, group: PagedGroup) -> GroupShape | None:
    """The shape to plan by. Where keys are dealt out, all of a rank's keys up to a token's are seen
    (no mask), and which graph runs must not depend on what this rank's rows have in common."""
    if group.share is None:
        return shape
    if shape is None:
        raise ConfigError("context parallelism needs layers of one shape in a KV cache group")
    return shape._replace(config=replace(shape.config, causal=False, share=False))


def _may_capture(planner: Planner | None, group: PagedGroup) -> bool:
    """Whether a decode plan always fits its buffers, on all ranks alike, where keys are dealt out:
    one rank must not replay a graph while another launches its kernels one by one."""
    return group.share is None or (planner is not None and planner.shape.config.group <= SMALL_M)


def _launch_plan(
    planner: Planner, group: PagedGroup, rows: NDArray[np.int32], inputs: Any, tokens: int
) -> Any:
    """The plan of a step outside the graphs. Where keys are dealt out each token is a row: how many
    of this rank's keys it sees is no function of its request's length."""
    starts, lens = inputs.query_start_loc, inputs.seq_lens
    if group.share is not None:
        rows, starts = inputs.token_rows, np.arange(len(inputs.positions) + 1, dtype=np.int32)
        lens = group.share.visible(inputs.positions, group.geometry)
    return planner.host_plan(rows, starts, lens, num_tokens=tokens)


def _keys(group: PagedGroup, seq_lens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Keys that a decoding request sees on this rank."""
    if group.share is None:
        return seq_lens
    return group.share.visible(seq_lens - 1, group.geometry)

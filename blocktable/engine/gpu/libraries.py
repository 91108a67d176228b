"""FlashInfer and FlashAttention in the engine: which group's steps they serve, and their plans.

A group served by our own kernels alone keeps its ``GroupPlanner``. Where a library serves some kind
of step, a ``ChosenPlanner`` stands in its place, with the same methods. It still looks for shared
prefixes, which the libraries do not find: such a step goes to our kernels, unless the library was
asked for by name. All of this is settled by (batch size, level), as captured graphs need; level 0
is for steps in which nothing is shared (see ``GroupPlanner``)::

    decode_plan -> StepPlan(batch, ours or None) -> buffers(size, level).load(plan)
    host_plan   -> StepPlan                      -> upload(plan): ours or the library's
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from blocktable.attention.adapters import ADAPTERS, Batch, LayerKind, LibraryPlanner, Tables
from blocktable.attention.adapters.choose import Choice, choose
from blocktable.attention.options import OURS
from blocktable.attention.plan import AttentionPlan
from blocktable.core.errors import ConfigError
from blocktable.engine.attention_glue import AttentionCall, LayerCache
from blocktable.engine.gpu.plans import GroupPlanner, GroupShape
from blocktable.engine.probe import ProbedLayer

_LOG = logging.getLogger("blocktable")


class StepPlan(NamedTuple):
    """A step of one group: as a batch for a library, and as a plan of ours where there is one."""

    batch: Batch
    ours: AttentionPlan | None

    @property
    def shares(self) -> bool:
        """Whether our kernels read some pages once for several rows."""
        return self.ours is not None and self.ours.shares


class ChosenPlanner:
    """Plans of one group whose steps are served by our kernels and by libraries."""

    def __init__(
        self, ours: GroupPlanner, chosen: dict[str, LibraryPlanner], *, forced: bool
    ) -> None:
        self.ours, self.shape = ours, ours.shape
        self._chosen = chosen  # decode, prefill, mixed -> library; the others are ours
        self._looks = ours.shape.config.may_share and not forced
        self.tile_rooms = ours.tile_rooms if self._looks else (0,)
        self._buffers: dict[tuple[int, int | None], _Buffers] = {}

    def decode_plan(self, rows: NDArray[np.int32], lens: NDArray[np.int32], size: int) -> StepPlan:
        """See ``GroupPlanner.decode_plan``."""
        needed = self._looks or "decode" not in self._chosen
        plan = self.ours.decode_plan(rows, lens, size) if needed else None
        return StepPlan(Batch.decode(rows, lens, size), plan)

    def host_plan(
        self, rows: NDArray[np.int32], starts: NDArray[np.int32], lens: NDArray[np.int32], *,
        num_tokens: int | None = None,
    ) -> StepPlan:  # fmt: skip
        """See ``GroupPlanner.host_plan``."""
        tokens = int(starts[-1]) if num_tokens is None else num_tokens
        batch = Batch(rows, starts, lens, tokens)
        needed = self._looks or step_of(batch) not in self._chosen
        plan = self.ours.host_plan(rows, starts, lens, num_tokens=tokens) if needed else None
        return StepPlan(batch, plan)

    def upload(self, plan: StepPlan) -> Any:
        """The plan of a step outside the graphs, by whoever serves it."""
        library = self._chosen.get(step_of(plan.batch))
        if plan.ours is not None and (library is None or plan.shares):
            return self.ours.upload(plan.ours)
        if library is None:
            raise ConfigError("a step that no library serves was planned for one")
        return library.plan(plan.batch)

    def level(self, plan: StepPlan) -> int:
        """See ``GroupPlanner.level``."""
        return 0 if plan.ours is None or not self._looks else self.ours.level(plan.ours)

    def buffers(self, num_rows: int, level: int) -> _Buffers:
        """The fixed buffers of a graph of ``num_rows`` requests. Above level 0 some group shares
        pages; where this one may, it is ours then."""
        level = min(level, len(self.tile_rooms) - 1)
        library = None if level else self._chosen.get("decode")
        key = (num_rows, level if library is None else None)
        if key not in self._buffers:
            held: Any = (
                self.ours.buffers(num_rows, level) if library is None else library.buffers(num_rows)
            )
            self._buffers[key] = _Buffers(held, library is None)
        return self._buffers[key]


class _Buffers:
    """Buffers of ours or of a library's, loaded with its part of a StepPlan."""

    def __init__(self, held: Any, is_ours: bool) -> None:
        self._held, self._is_ours = held, is_ours

    @property
    def plan(self) -> Any:
        return self._held.plan

    def fits(self, plan: StepPlan) -> bool:
        return self._held.fits(plan.ours if self._is_ours else plan.batch)

    def load(self, plan: StepPlan) -> None:
        self._held.load(plan.ours if self._is_ours else plan.batch)


class Planner(Protocol):
    """A GroupPlanner or a ChosenPlanner; the plans of one mean nothing to another."""

    shape: GroupShape
    tile_rooms: tuple[int, ...]  # of each level

    def decode_plan(self, rows: NDArray[np.int32], lens: NDArray[np.int32], size: int) -> Any:
        """The plan of a step in which each of ``rows`` decodes one token."""
        ...

    def host_plan(
        self, rows: NDArray[np.int32], starts: NDArray[np.int32], lens: NDArray[np.int32], *,
        num_tokens: int | None = None,
    ) -> Any:  # fmt: skip
        """The plan of any step."""
        ...

    def upload(self, plan: Any) -> Any:
        """A plan for a step outside the graphs."""
        ...

    def level(self, plan: Any) -> int:
        """The least level of graphs that a decode plan fits."""
        ...

    def buffers(self, num_rows: int, level: int) -> Any:
        """The fixed buffers of a graph."""
        ...


def step_of(batch: Batch) -> str:
    """The kind of a step: all rows decode, none does, or some do."""
    if batch.is_decode:
        return "decode"
    return "mixed" if (np.diff(batch.starts) == 1).any() else "prefill"


def with_libraries(
    wanted: str,
    planners: Sequence[GroupPlanner | None],
    layers: Sequence[ProbedLayer],
    caches: dict[int, LayerCache],
    tables: Sequence[Tables],
    dtype: torch.dtype,
    max_rows: int,
) -> list[Planner | None]:
    """The planners, with a ChosenPlanner for each group that a library serves.

    wanted: "auto" (measured, see ``adapters.choose``), "triton", or the library that must serve all
    groups. Raises ConfigError, naming the layers and the reason, where that one cannot.
    """
    if wanted == OURS:
        return list(planners)
    shared: dict[str, torch.Tensor] = {}
    made: list[Planner | None] = []
    for group, (planner, table) in enumerate(zip(planners, tables, strict=True)):
        kinds = _kinds(layers, caches, group, dtype)
        reason = _reason(planner, kinds)
        if reason is not None or planner is None:
            if wanted != "auto":
                raise ConfigError(f"attention_backend {wanted!r} cannot serve group {group} of "
                                  f"layers ({_named(kinds)}): {reason}")  # fmt: skip
            made.append(planner)
            continue
        kind, layer = next(iter(kinds.items()))
        choice = choose(wanted, kind, table.device.device, layer=layer)
        made.append(_chosen(planner, choice, kind, table, max_rows, shared, wanted != "auto"))
        _LOG.info("attention of group %d (%s): %s", group, kind, choice)
    return made


def _chosen(
    planner: GroupPlanner, choice: Choice, kind: LayerKind, table: Tables, max_rows: int,
    shared: dict[str, torch.Tensor], forced: bool,
) -> Planner:  # fmt: skip
    if not choice.libraries:
        return planner
    made = {
        name: ADAPTERS[name].planner(kind, table, max_rows, shared) for name in choice.libraries
    }
    serving = {step: made[name] for step, name in choice._asdict().items() if name in made}
    return ChosenPlanner(planner, serving, forced=forced)


def _kinds(
    layers: Sequence[ProbedLayer], caches: dict[int, LayerCache], group: int, dtype: torch.dtype
) -> dict[LayerKind, str]:
    """The kinds of layers in a group, with the name of the first layer of each."""
    found: dict[LayerKind, str] = {}
    for layer in layers:
        cache = caches[id(layer.module)]
        if cache.group == group:
            found.setdefault(_kind(layer.call, cache, dtype), layer.name)
    return found


def _kind(call: AttentionCall, cache: LayerCache, dtype: torch.dtype) -> LayerKind:
    return LayerKind(
        num_heads=call.num_heads, num_kv_heads=call.num_kv_heads, head_size=call.head_size,
        head_size_v=call.head_size_v, block_size=cache.k_cache.shape[2], dtype=dtype,
        cache_dtype=cache.k_cache.dtype, scale=float(call.scale),
        sliding_window=call.sliding_window or cache.window, chunk=cache.chunk,
        softcap=call.softcap, has_sinks=call.has_sinks,
    )  # fmt: skip


def _reason(planner: GroupPlanner | None, kinds: dict[LayerKind, str]) -> str | None:
    """Why no library may serve a group, whatever its layers are."""
    if planner is None or len(kinds) != 1:
        return "its layers differ, and a library plans once for all of them"
    if not planner.shape.config.causal:
        return "its positions are dealt out over ranks, whose results only our kernels can merge"
    return None


def _named(kinds: dict[LayerKind, str]) -> str:
    return "; ".join(f"{name}: {kind}" for kind, name in kinds.items())

"""Paged attention as one operation that torch.compile does not look into.

Every decoder layer of a model is the same code, so it is compiled once (regional compilation) and
all layers run the same kernels. For that, nothing in a layer may depend on its number: what layer
it is travels in a one-element tensor, the layer's *handle*, whose address names the layer's cache.

::

    layer 0   handle 0 --.
    layer 1   handle 1 ---+--> one compiled layer --> blocktable::paged_layer --> this step
    layer 2   handle 2 --'

The schema says that nothing is mutated. The cache is written, but no other operation of the graph
reads it, and saying so would make the compiler copy gigabytes to keep the graph functional.
"""

# No `from __future__ import annotations`: custom_op reads the annotations as objects.

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Optional

import torch

from blocktable.core.errors import UnsupportedModel
from blocktable.engine.attention_glue import PagedStep, paged_forward
from blocktable.engine.probe import ProbedLayer

COMPILED_NAME = "blocktable_compiled"
"""Name of the attention function whose body is the opaque operation."""
HANDLE = "blocktable_handle"
"""Buffer of an attention module: int8 [1] on the model's device; its address is its layer."""


class RunningStep(NamedTuple):
    """The step being run and the modules behind the handles."""

    step: PagedStep
    modules: dict[int, torch.nn.Module]  # address of a handle -> attention module


_RUNNING: ContextVar[RunningStep] = ContextVar("blocktable_running_step")


@contextmanager
def running(step: RunningStep) -> Iterator[None]:
    """Operations of this thread belong to ``step`` inside the ``with`` block."""
    token = _RUNNING.set(step)
    try:
        yield
    finally:
        _RUNNING.reset(token)


@torch.library.custom_op("blocktable::paged_layer", mutates_args=())
def paged_layer(
    query: torch.Tensor,  # [1, Hq, T, D]
    key: torch.Tensor,  # [1, Hkv, T, D]
    value: torch.Tensor,  # [1, Hkv, T, Dv]
    handle: torch.Tensor,
    scaling: float,
    sliding_window: Optional[int],  # noqa: UP045
    softcap: Optional[float],  # noqa: UP045
    sinks: Optional[torch.Tensor],  # noqa: UP045
) -> torch.Tensor:
    """Store keys and values of the running step, attend through its table: [1, T, Hq, Dv]."""
    now = _RUNNING.get()
    module = now.modules.get(handle.data_ptr())
    if module is None:
        raise UnsupportedModel("a compiled layer lost its handle: run with compile=False")
    return paged_forward(
        module, query, key, value, scaling=scaling, sliding_window=sliding_window,
        softcap=softcap, s_aux=sinks, blocktable=now.step,
    )[0]  # fmt: skip


@paged_layer.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    handle: torch.Tensor,
    scaling: float,
    sliding_window: Optional[int],  # noqa: UP045
    softcap: Optional[float],  # noqa: UP045
    sinks: Optional[torch.Tensor],  # noqa: UP045
) -> torch.Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))


def compiled_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor] = None,  # noqa: UP045
    *,
    scaling: Optional[float] = None,  # noqa: UP045
    sliding_window: Optional[int] = None,  # noqa: UP045
    softcap: Optional[float] = None,  # noqa: UP045
    s_aux: Optional[torch.Tensor] = None,  # noqa: UP045
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function transformers calls inside a compiled layer."""
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = torch.ops.blocktable.paged_layer(
        query, key, value, getattr(module, HANDLE), scale, sliding_window, softcap, s_aux
    )
    return out, None


def register_compiled_attention() -> None:
    """Make ``attn_implementation=COMPILED_NAME`` known to transformers; safe to call again."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(COMPILED_NAME, compiled_forward)


def give_handles(layers: Sequence[ProbedLayer], device: torch.device) -> dict[int, torch.nn.Module]:
    """Give each attention module its handle; returns the modules by their handles' addresses."""
    handles = torch.zeros(max(len(layers), 1), dtype=torch.int8, device=device)
    for i, layer in enumerate(layers):
        layer.module.register_buffer(HANDLE, handles[i : i + 1], persistent=False)
    return {getattr(layer.module, HANDLE).data_ptr(): layer.module for layer in layers}


def repeated_blocks(model: torch.nn.Module, layers: Sequence[ProbedLayer]) -> list[torch.nn.Module]:
    """The model's decoder blocks: members of a ModuleList that hold exactly one attention
    module."""
    attention = {id(layer.module) for layer in layers}
    found: list[torch.nn.Module] = []
    for stack in model.modules():
        if isinstance(stack, torch.nn.ModuleList):
            found += [
                block
                for block in stack
                if sum(id(inner) in attention for inner in block.modules()) == 1
            ]
    return found


def compile_blocks(model: torch.nn.Module, layers: Sequence[ProbedLayer]) -> int:
    """Compile the decoder blocks in place, with the number of tokens left open; returns how many.

    Cost: nothing now; about 10 s at the first run, 2 to 3 s with a warm compiler cache.
    """
    blocks = repeated_blocks(model, layers)
    for block in blocks:
        block.compile(dynamic=True)
    return len(blocks)

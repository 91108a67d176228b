"""The seam between transformers models and the paged KV cache.

transformers lets an attention function be registered by name. Every attention layer of a model
whose config says ``attn_implementation="blocktable"`` then calls :func:`paged_forward` with query,
key and value of the whole flattened batch (RoPE applied), and with whatever extra keyword arguments
``model(...)`` was given. One of those is the step's :class:`PagedStep`, which says where each
layer's cache lies and which table its tokens go through::

    input_ids [1, T] --> model --> layer i: paged_forward(module, q, k, v, blocktable=step)
                                        write_kv(k, v -> slots of the step)
                                        paged_attention(q, pages of the step)

No mask function is registered under the name, so transformers builds no masks at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from blocktable.core.errors import UnsupportedModel

ATTENTION_NAME = "blocktable"
"""The name the function is registered under, and the keyword argument that carries the step."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one attention layer asked for: shapes and variants, as observed, not as configured."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    scale: float
    sliding_window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


@dataclass(slots=True)
class GroupStep:
    """One KV cache group's view of the step being run. All tensors live on the model's device."""

    block_table: torch.Tensor  # int32 [n, W]
    slot_mapping: torch.Tensor  # int64 [T]
    query_start_loc: torch.Tensor  # int32 [n + 1]
    seq_lens: torch.Tensor  # int32 [n]
    plan: Any = None  # whatever the back end wants to keep for the step's other layers
    attend: Callable[..., Any] | None = None  # instead of the step's, where ranks share a group


@dataclass(slots=True)
class LayerCache:
    """Where one attention layer keeps its keys and values."""

    k_cache: torch.Tensor  # [num_blocks, Hkv, block_size, D]
    v_cache: torch.Tensor  # [num_blocks, Hkv, block_size, Dv]
    group: int
    chunk: int | None = None
    window: int | None = None  # from the config, where the model passes none


@dataclass(slots=True)
class PagedStep:
    """Everything :func:`paged_forward` needs for one forward pass.

    ``layers`` maps ``id(module)`` of each attention module to its cache; ``attend`` and ``write``
    are the back end's ``paged_attention`` and ``write_kv``.
    """

    layers: dict[int, LayerCache]
    groups: list[GroupStep]
    attend: Callable[..., torch.Tensor]
    write: Callable[..., None]
    calls: dict[int, int] = field(default_factory=dict)


def paged_forward(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, Hq, T, D]
    key: torch.Tensor,  # [1, Hkv, T, D]
    value: torch.Tensor,  # [1, Hkv, T, Dv]
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    blocktable: PagedStep | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Store the step's keys and values, attend through the block table.

    Returns the output ``[1, T, Hq, Dv]`` and no attention weights. Raises UnsupportedModel when the
    model did not hand the step on, or for a layer the probe did not see.
    """
    if blocktable is None:
        raise UnsupportedModel(
            f"{type(module).__name__} drops the keyword argument that carries the block table"
        )
    layer = blocktable.layers.get(id(module))
    if layer is None:
        raise UnsupportedModel(f"{type(module).__name__} was not seen by the probe at load")
    group = blocktable.groups[layer.group]
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    blocktable.write(k, v, layer.k_cache, layer.v_cache, group.slot_mapping)
    attend = group.attend or blocktable.attend
    out = attend(
        q, layer.k_cache, layer.v_cache, group.block_table, group.query_start_loc, group.seq_lens,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window or layer.window, chunk=layer.chunk,
        softcap=softcap, sinks=s_aux, plan=group.plan,
    )  # fmt: skip
    return out.unsqueeze(0), None


def register_attention(name: str = ATTENTION_NAME) -> None:
    """Make ``attn_implementation=name`` known to transformers; safe to call again."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(name, _dispatch)


def _dispatch(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: the probe's recorder where there is one, else the real thing."""
    recorder = kwargs.get(ATTENTION_NAME)
    if recorder is not None and not isinstance(recorder, PagedStep):
        return recorder(module, query, key, value, attention_mask, **kwargs)
    return paged_forward(module, query, key, value, attention_mask, **kwargs)


class AttentionSwitch:
    """Turns a model's attention implementation on for the length of a ``with`` block.

    The model may be the caller's own and go on being used elsewhere, so its configs are put back
    after each forward pass; that costs 2 us.
    """

    def __init__(self, model: torch.nn.Module, name: str = ATTENTION_NAME) -> None:
        found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
        self._configs = [c for c in found.values() if hasattr(c, "_attn_implementation")]
        self._name = name
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._before = [config._attn_implementation for config in self._configs]
        for config in self._configs:
            config._attn_implementation = self._name

    def __exit__(self, *_: object) -> None:
        for config, before in zip(self._configs, self._before, strict=True):
            config._attn_implementation = before

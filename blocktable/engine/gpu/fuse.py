"""Linear layers that read the same input, run as one.

A transformers block calls ``q_proj(x)``, ``k_proj(x)``, ``v_proj(x)`` one after the other, and
``gate_proj(x)``, ``up_proj(x)``. With few rows each is a short read of a weight, and most of its
time is starting up: on an H200 the three take 8.7 + 4.8 + 4.8 us for a 0.6B model, their weights in
one matrix 5.1 us; a decode step of one request falls from 2.0 to 1.5 ms. The model's code stays as
it is: the first of them computes all, the others hand out their part.

::

    q_proj(x) --> x @ [Wq; Wk; Wv] --> q, and k, v laid aside
    k_proj(x) --> the k laid aside          (a different x: its own product, as before)
    v_proj(x) --> the v laid aside
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers that transformers' blocks call in this order on one input."""


class LaidAside:
    """Parts of a fused product, from the first sibling's call until the last one took its own."""

    __slots__ = ("parts", "source")

    def __init__(self) -> None:
        self.source: torch.Tensor | None = None
        self.parts: tuple[torch.Tensor, ...] = ()


class FirstSibling(nn.Module):
    """Computes the fused product and returns the first part."""

    fused_weight: torch.Tensor
    fused_bias: torch.Tensor | None

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, sizes: list[int], aside: LaidAside
    ) -> None:
        super().__init__()
        self.register_buffer("fused_weight", weight, persistent=False)
        self.register_buffer("fused_bias", bias, persistent=False)
        self.weight = nn.Parameter(weight[: sizes[0]], requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias[: sizes[0]], requires_grad=False)
        self.in_features, self.out_features = weight.shape[1], sizes[0]
        self.sizes, self.aside = sizes, aside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = F.linear(x, self.fused_weight, self.fused_bias).split(self.sizes, dim=-1)
        self.aside.source, self.aside.parts = x, parts
        return parts[0]


class LaterSibling(nn.Module):
    """Returns its part of the first sibling's product, if that was made from the same input."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, index: int, last: bool,
        aside: LaidAside,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self.index, self.last, self.aside = index, last, aside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.aside.source is not x:
            return F.linear(x, self.weight, self.bias)
        part = self.aside.parts[self.index]
        if self.last:
            self.aside.source, self.aside.parts = None, ()
        return part


def fuse_siblings(model: nn.Module) -> int:
    """Fuse the siblings of every block in place; returns how many products were made of them.

    The weights move into one matrix a product; the modules' own weights become views of it.
    """
    made = 0
    for parent in list(model.modules()):
        for names in SIBLINGS:
            found = [getattr(parent, name, None) for name in names]
            layers = [layer for layer in found if type(layer) is nn.Linear]
            if len(layers) == len(names) and _alike(layers):
                _fuse(parent, names, layers)
                made += 1
    return made


def _alike(layers: list[nn.Linear]) -> bool:
    first = layers[0]
    return all(
        layer.in_features == first.in_features
        and layer.weight.dtype == first.weight.dtype
        and layer.weight.device == first.weight.device
        and (layer.bias is None) == (first.bias is None)
        for layer in layers
    )


@torch.no_grad()
def _fuse(parent: nn.Module, names: tuple[str, ...], layers: list[nn.Linear]) -> None:
    weights: list[torch.Tensor] = [layer.weight for layer in layers]
    weight = torch.cat(weights)
    biases: list[torch.Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    bias = torch.cat(biases) if biases else None
    sizes, aside = [layer.out_features for layer in layers], LaidAside()
    setattr(parent, names[0], FirstSibling(weight, bias, sizes, aside))
    rows = weight.split(sizes)
    parts = [None] * len(sizes) if bias is None else bias.split(sizes)
    for i in range(1, len(names)):
        sibling = LaterSibling(rows[i], parts[i], i, i == len(names) - 1, aside)
        setattr(parent, names[i], sibling)

"""Parts of the GPU engine that need no GPU: fused siblings, the opaque attention operation."""

import copy

import pytest
import torch
from torch import nn

from blocktable.engine.gpu.fuse import FirstSibling, LaterSibling, fuse_siblings


class Block(nn.Module):
    """Calls its projections as transformers' blocks do."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(24, 32, bias=bias)
        self.k_proj = nn.Linear(24, 8, bias=bias)
        self.v_proj = nn.Linear(24, 8, bias=bias)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        other = x if y is None else y
        return torch.cat([self.q_proj(x), self.k_proj(other), self.v_proj(other)], -1)


@pytest.mark.parametrize("bias", [False, True])
def test_fused_siblings_compute_the_same(bias: bool) -> None:
    block = Block(bias)
    fused = copy.deepcopy(block)
    assert fuse_siblings(fused) == 1
    assert isinstance(fused.q_proj, FirstSibling) and isinstance(fused.v_proj, LaterSibling)
    for rows in (1, 7, 7):
        x = torch.randn(1, rows, 24)
        torch.testing.assert_close(fused(x), block(x))


def test_a_sibling_given_another_input_computes_its_own() -> None:
    block = Block(True)
    fused = copy.deepcopy(block)
    fuse_siblings(fused)
    x, y = torch.randn(1, 3, 24), torch.randn(1, 3, 24)
    torch.testing.assert_close(fused(x, y), block(x, y))
    torch.testing.assert_close(fused(x), block(x))


def test_weights_of_siblings_stay_readable_and_are_not_stored_twice() -> None:
    block = Block(False)
    fused = copy.deepcopy(block)
    fuse_siblings(fused)
    for name in ("q_proj", "k_proj", "v_proj"):
        ours, theirs = getattr(fused, name), getattr(block, name)
        torch.testing.assert_close(ours.weight, theirs.weight)
        inside = ours.weight.untyped_storage().data_ptr()
        assert inside == fused.q_proj.fused_weight.untyped_storage().data_ptr()


def test_layers_that_differ_are_left_alone() -> None:
    block = Block(False)
    block.k_proj = nn.Linear(24, 8, bias=True)
    assert fuse_siblings(block) == 0
    assert type(block.q_proj) is nn.Linear

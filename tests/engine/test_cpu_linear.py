"""Packed linear layers: nn.Linear's results up to rounding, in every arrangement a model uses."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_models import CONFIGS, HYBRID_CONFIGS, tiny_model
from torch import nn

from blocktable.core.errors import ConfigError
from blocktable.engine import linear
from blocktable.engine.linear import PackedLinear, ProjectionPart, accelerate_linears

RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def close(got: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    scale = float(expected.float().abs().max())
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert float((got.float() - expected.float()).abs().max()) <= relative * scale


class Attention(nn.Module):
    """The projections of an attention layer and a sibling that takes another input."""

    def __init__(self, bias: bool, size: int = 48) -> None:
        super().__init__()
        self.q_proj = nn.Linear(size, 36, bias=bias)
        self.k_proj = nn.Linear(size, 12, bias=bias)
        self.v_proj = nn.Linear(size, 20, bias=bias)
        self.o_proj = nn.Linear(36, size, bias=bias)


@pytest.fixture(autouse=True)
def _inference() -> object:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (1, 1, 48), (1, 33, 48), (2, 3, 48), (600, 48)])
def test_packed_equals_linear(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    for out_features in (1, 33, 128):
        source = nn.Linear(48, out_features, bias=bias).to(dtype)
        x = torch.randn(shape).to(dtype)
        close(PackedLinear(source, dtype)(x), source(x), RELATIVE[dtype])


def test_odd_input_size_and_strided_input() -> None:
    source = nn.Linear(33, 7)
    x = torch.randn(5, 66)[:, ::2]
    close(PackedLinear(source, torch.float32)(x), source(x), 1e-5)


def test_bfloat16_weights_serve_a_float32_model() -> None:
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 8))
    x = torch.randn(4, 48)
    expected = model(x)
    done = accelerate_linears(model, torch.bfloat16)
    assert done.weight_bytes == 2 * (48 * 64 + 64 * 8)
    close(model(x), expected, 3e-2)


@pytest.mark.parametrize("bias", [True, False])
def test_query_key_value_share_one_product(bias: bool) -> None:
    layer = Attention(bias)
    x, other = torch.randn(1, 5, 48), torch.randn(1, 5, 48)
    names = ("q_proj", "k_proj", "v_proj")
    expected = {n: (getattr(layer, n)(x), getattr(layer, n)(other)) for n in names}
    out = torch.randn(1, 5, 36)
    expected_out = layer.o_proj(out)
    accelerate_linears(layer)
    assert all(isinstance(getattr(layer, n), ProjectionPart) for n in names)
    for order in (names, names[::-1], ("k_proj", "q_proj", "q_proj", "v_proj", "k_proj")):
        for i, y in ((0, x), (1, other), (0, x)):
            for name in order:
                close(getattr(layer, name)(y), expected[name][i], 1e-5)
    for name in names:  # inputs that alternate between the parts
        close(getattr(layer, name)(x), expected[name][0], 1e-5)
        close(getattr(layer, name)(other), expected[name][1], 1e-5)
    close(layer.o_proj(out), expected_out, 1e-5)
    heads = layer.q_proj(x).view(1, 5, 3, 12).transpose(1, 2)
    close(heads, expected["q_proj"][0].view(1, 5, 3, 12).transpose(1, 2), 1e-5)


def test_a_finished_product_is_not_kept() -> None:
    layer = Attention(False)
    accelerate_linears(layer)
    x = torch.randn(1, 5, 48)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer, name)(x)
    assert layer.q_proj.shared._last is None


def test_threads_that_share_a_layer_get_their_own_results() -> None:
    layer = Attention(False)
    inputs = [torch.randn(1, 3, 48) for _ in range(40)]
    expected = [torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1) for x in inputs]
    accelerate_linears(layer)

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)

    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(pool.map(run, inputs), expected, strict=True):
            close(got, want, 1e-5)


def test_projections_of_different_inputs_stay_apart() -> None:
    layer = Attention(False)
    layer.k_proj = nn.Linear(24, 12, bias=False)  # cross attention
    accelerate_linears(layer)
    assert isinstance(layer.q_proj, PackedLinear) and isinstance(layer.k_proj, PackedLinear)


def test_tied_embedding_and_subclasses_are_left_alone() -> None:
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict({"embed": nn.Embedding(50, 16), "head": nn.Linear(16, 50, bias=False)})
    model["head"].weight = model["embed"].weight
    model["special"] = Special(16, 16)
    before = model["embed"].weight.clone()
    done = accelerate_linears(model)
    assert done.replaced == ("head",) and type(model["special"]) is Special
    assert torch.equal(model["embed"].weight, before)
    x = torch.randn(2, 16)
    close(model["head"](x), x @ before.T, 1e-5)


def test_restore_puts_the_originals_back() -> None:
    layer = Attention(True)
    originals = dict(layer.named_children())
    done = accelerate_linears(layer, keep=True)
    assert all(m is not originals[n] for n, m in layer.named_children())
    done.restore()
    assert all(m is originals[n] for n, m in layer.named_children())


def test_shape_and_dtype_of_a_packed_weight_can_be_read_but_not_its_values() -> None:
    layer = PackedLinear(nn.Linear(8, 4), torch.float32)
    assert layer.weight.shape == (4, 8) and layer.weight.dtype == torch.float32
    with pytest.raises((RuntimeError, NotImplementedError)):
        layer.weight.sum().item()


def test_other_dtypes() -> None:
    model = nn.Sequential(nn.Linear(8, 4).half())
    assert accelerate_linears(model).replaced == () and type(model[0]) is nn.Linear
    with pytest.raises(ConfigError, match=r"packed as float32 or bfloat16, got torch\.float16"):
        accelerate_linears(model, torch.float16)


def test_nothing_changes_where_packing_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_packs", lambda dtype: False)
    layer = Attention(True)
    assert accelerate_linears(layer).replaced == ()
    assert all(type(child) is nn.Linear for child in layer.children())


@pytest.mark.parametrize("name", [*CONFIGS, *HYBRID_CONFIGS])
def test_every_architecture_computes_the_same(name: str) -> None:
    """Layers whose weights the model reads itself (Mamba's dt_proj) are not packed away."""
    ids = torch.tensor([[5, 9, 33, 60, 7]])
    plain, fast = tiny_model(name), tiny_model(name)
    accelerated = accelerate_linears(fast)
    assert accelerated.replaced or name == "gpt2"
    with torch.inference_mode():
        own, theirs = fast(ids, use_cache=False).logits, plain(ids, use_cache=False).logits
    torch.testing.assert_close(own, theirs, rtol=1e-3, atol=1e-3)


def test_only_values_that_are_read_keep_a_layer() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.called, self.sized, self.typed = (nn.Linear(8, 8) for _ in range(3))
            self.multiplied, self.handed = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.called(x.to(self.typed.weight.dtype)) * self.sized.weight.shape[0]
            y = y @ self.multiplied.weight
            return torch.nn.functional.linear(y, self.handed.weight)

    replaced = accelerate_linears(Reader()).replaced
    assert replaced == ("called", "sized", "typed")


MANY_LENGTHS = """
import psutil, torch
from blocktable.engine.linear import PackedLinear
torch.set_num_threads(1)
layer, process, held = PackedLinear(torch.nn.Linear(128, 128), torch.float32), psutil.Process(), []
with torch.inference_mode():
    for tokens in range(1, 1001):
        layer(torch.zeros(1, tokens, 128))
        if tokens in (500, 1000):
            held.append(process.memory_info().rss / 2**20)
print(held[1] - held[0])
"""


def test_memory_does_not_grow_with_the_lengths_seen() -> None:
    """The product for a number of tokens is kept for a while, not for ever (0.65 MB each)."""
    run = subprocess.run(
        [sys.executable, "-c", MANY_LENGTHS], capture_output=True, text=True, check=True,
        env={k: v for k, v in os.environ.items() if "CACHE_CAPACITY" not in k},
    )  # fmt: skip
    assert float(run.stdout) < 60, f"{run.stdout} MiB for 500 more lengths"

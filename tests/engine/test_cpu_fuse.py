"""Shortened modules compute what transformers' own do, and touch no other model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from blocktable.attention.cpu import backend
from blocktable.engine import fuse, row_ops
from blocktable.engine.fuse import accelerate_model

pytestmark = pytest.mark.skipif(
    not backend.native_available(), reason="needs the compiled kernels (no C++ compiler here)"
)
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NAMES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3Text", "Olmo2", "Glm", "Granite"]


def tiny(name: str) -> Any:
    config = getattr(transformers, f"{name}Config")(**SIZES)
    torch.manual_seed(0)
    model_name = f"{name.removesuffix('Text')}ForCausalLM"
    model = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.float()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_logits_stay(name: str, dtype: torch.dtype, relative: float) -> None:
    model = tiny(name).to(dtype)
    untouched = copy.deepcopy(model)
    ids = torch.randint(0, 128, (1, 19))
    expected = logits(model, ids)
    done = accelerate_model(model, keep=True)
    got = logits(model, ids)
    assert float((got - expected).abs().max()) <= relative * float(expected.abs().max())
    assert torch.equal(logits(untouched, ids), expected)
    assert any(n.endswith("norm") for n, _ in done.fused)
    rotated = any(n.endswith("self_attn") for n, _ in done.fused)
    assert rotated == (name != "Glm")  # GLM rotates interleaved pairs of half the head
    done.restore()
    assert torch.equal(logits(model, ids), expected)


def test_gradients_go_the_original_way() -> None:
    model = tiny("Llama")
    with torch.no_grad():
        fuse._shorten(model.model.norm)
    x = torch.randn(1, 3, 64, requires_grad=True)
    model.model.norm(x).sum().backward()
    assert x.grad is not None


def test_batches_of_more_than_one_row_keep_their_rotary_embedding() -> None:
    model = tiny("Llama")
    ids = torch.randint(0, 128, (3, 7))
    expected = logits(model, ids)
    accelerate_model(model)
    torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-5)


def test_a_norm_that_computes_something_else_keeps_its_forward() -> None:
    class OddRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x / x.abs().mean(-1, keepdim=True)

    model = nn.Sequential(OddRMSNorm()).eval()
    assert accelerate_model(model).fused == ()


def _levels() -> list[str]:
    if not backend.native_available():
        return []
    from blocktable.attention.cpu import _kernels  # pyright: ignore

    return list(_kernels.levels())


@pytest.fixture(params=_levels())
def at_level(request: pytest.FixtureRequest) -> Any:
    index = _levels().index(request.param)
    real = row_ops._handle()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_ops, "_handle", lambda: real._replace(level=index))
        yield


TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (2, 5, 64), (1, 7, 3, 80), (300, 576)])
def test_rms_norm(at_level: None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    wide = x.double()
    plain = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    for shift in (0.0, 1.0):
        expected = plain * (weight.double() + shift)
        got = row_ops.rms_norm(x, weight, 1e-5, shift)
        assert got.dtype == dtype and got.shape == x.shape
        torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)
    strided = torch.stack([x, x], -2)[..., 0, :]
    assert torch.equal(row_ops.rms_norm(strided, weight, 1e-5), row_ops.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("heads", "tokens", "size"), [(1, 1, 2), (3, 5, 66), (9, 130, 64)])
def test_rotate(at_level: None, heads: int, tokens: int, size: int, dtype: torch.dtype) -> None:
    projected = torch.randn(1, tokens, heads * size + 7).to(dtype)
    x = projected[..., : heads * size].view(1, tokens, heads, size).transpose(1, 2)
    cos, sin = torch.randn(2, 1, tokens, size).to(dtype).unbind(0)
    wide, half = x.double(), size // 2
    turned = torch.cat([-wide[..., half:], wide[..., :half]], -1)
    expected = wide * cos.double()[:, None] + turned * sin.double()[:, None]
    got = row_ops.rotate(x, cos, sin)
    torch.testing.assert_close(
        got.double(), expected, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype]
    )

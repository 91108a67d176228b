"""The probe accepts what goes through the block table and refuses the rest, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import CONFIGS, HYBRID_CONFIGS, REFUSED_CONFIGS, tiny_model
from transformers.masking_utils import (
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from blocktable.attention import paged_attention, write_kv
from blocktable.core.errors import UnsupportedModel
from blocktable.engine.kv_layout import plan_layout
from blocktable.engine.probe import probe_model
from blocktable.engine.probe_layers import check_span

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", [*CONFIGS, *HYBRID_CONFIGS])
def test_accepted(name: str) -> None:
    model = tiny_model(name)
    before = model.config._attn_implementation
    probed = probe_model(model, paged_attention, write_kv)
    assert probed.error < 1e-4
    assert model.config._attn_implementation == before
    kinds = [kind for kind in (getattr(model.config, "layer_types", None) or [])]
    if name in CONFIGS:
        assert len(probed.layers) == model.config.num_hidden_layers
    else:
        assert probed.mixers.modules
    if name == "gemma2":
        windows = [layer.call.sliding_window for layer in probed.layers]
        assert windows == [8 if kind == "sliding_attention" else None for kind in kinds]
        assert {layer.call.softcap for layer in probed.layers} == {50.0}
    if name == "gpt_oss":
        assert all(layer.call.has_sinks for layer in probed.layers)


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_refused(name: str) -> None:
    model = tiny_model(name)
    with pytest.raises(UnsupportedModel) as caught:
        probe_model(model, paged_attention, write_kv)
    assert "\n" not in str(caught.value)
    with torch.inference_mode():  # the model is as it was
        assert model(torch.tensor([[4, 5]])).logits.shape == (1, 2, model.config.vocab_size)


def test_wrong_attention_is_noticed() -> None:
    """A kernel that forgets the past gives different logits, and is refused."""

    def forgetful(query: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        return torch.zeros_like(query)

    with pytest.raises(UnsupportedModel, match="differ"):
        probe_model(tiny_model("llama"), forgetful, write_kv)


def test_layers_share_memory_by_kind() -> None:
    """Three sliding layers and one full layer of gemma3: groups of equal size over one memory."""
    probed = probe_model(tiny_model("gemma3"), paged_attention, write_kv)
    layout = plan_layout(probed, 16, torch.float32)
    sizes = [len(group.layer_names) for group in layout.groups]
    assert sum(sizes) == 3 and layout.num_memories == max(sizes) == 1
    assert layout.bytes_per_block == 2 * 2 * 16 * 8 * 4
    assert [place.group for place in layout.places] == [0, 2, 1]


def test_value_heads_of_another_size() -> None:
    probed = probe_model(tiny_model("deepseek_v3"), paged_attention, write_kv)
    layout = plan_layout(probed, 16, torch.float32)
    assert layout.page_bytes == 4 * 16 * (16 + 12) * 4


def dropping(**changes: object) -> Callable[..., Any]:
    """The real kernel, but for these options."""

    def attend(*args: Any, **options: Any) -> Any:
        return paged_attention(*args, **{**options, **changes})

    return attend


def sharpened(query: torch.Tensor, *args: Any, scale: float, **options: Any) -> Any:
    return paged_attention(query, *args, scale=scale * 1.3, **options)


WRONG = {
    "scale": ("llama", {}, sharpened),
    "softcap": ("gemma2", {"attn_logit_softcapping": 1.0}, dropping(softcap=None)),
    "window": ("mistral", {"sliding_window": 3}, dropping(sliding_window=None)),
    "window off by one": ("mistral", {"sliding_window": 3}, dropping(sliding_window=4)),
    "chunk": ("llama4", {"attention_chunk_size": 4}, dropping(chunk=None)),
    "sinks": ("gpt_oss", {}, dropping(sinks=None)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", WRONG)
def test_what_a_layer_gets_wrong_is_noticed(what: str, dtype: torch.dtype) -> None:
    """In half precision too, where the logits of a whole model say nothing."""
    name, fields, attend = WRONG[what]
    model = tiny_model(name, **fields).to(dtype)
    if what == "sinks":
        for layer in model.model.layers:
            layer.self_attn.sinks.data.fill_(1.0)
    probe_model(model, paged_attention, write_kv).mixers.close()
    with pytest.raises(UnsupportedModel, match=r"layer .* differs"):
        probe_model(model, attend, write_kv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*CONFIGS, *HYBRID_CONFIGS])
def test_rounding_alone_is_not_refused(name: str, dtype: torch.dtype) -> None:
    probe_model(tiny_model(name, seed=1).to(dtype), paged_attention, write_kv).mixers.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_counts_positions_itself_is_refused(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    rotary = model.model.rotary_emb
    original = rotary.forward
    rotary.forward = lambda x, position_ids: original(x, torch.arange(x.shape[1])[None])
    with pytest.raises(UnsupportedModel, match="positions are not followed"):
        probe_model(model, paged_attention, write_kv)


@pytest.mark.parametrize(("window", "shown"), [(8, 8), (300, 300)])
def test_a_window_that_only_the_mask_knows_is_refused(
    window: int, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much longer than the probe's sequences it is."""
    from transformers.masking_utils import create_sliding_window_causal_mask
    from transformers.models.llama import modeling_llama

    model = tiny_model("llama").to(torch.bfloat16)
    model.config.sliding_window = window
    monkeypatch.setattr(modeling_llama, "create_causal_mask", create_sliding_window_causal_mask)
    with pytest.raises(UnsupportedModel, match=f"masks all but {shown} tokens"):
        probe_model(model, paged_attention, write_kv)


@pytest.mark.parametrize("name", [n for n in CONFIGS if n in ("mistral", "gemma3", "llama4")])
def test_windows_and_chunks_are_held_against_the_masks(name: str) -> None:
    """A layer that asks for one token more than its mask shows is refused."""
    model = tiny_model(name)
    probed = probe_model(model, paged_attention, write_kv)
    limited = [c for layer in probed.layers if (c := layer.call).sliding_window or c.chunk]
    assert limited
    for call in limited:
        field = "chunk" if call.chunk else "sliding_window"
        wrong = replace(call, **{field: getattr(call, field) + 1})
        window = sliding_window_causal_mask_function(call.sliding_window or 0)
        chunked = chunked_causal_mask_function(call.chunk or 1, torch.zeros(1, dtype=torch.int64))
        predicate = chunked if call.chunk else window
        check_span(predicate, call, 500, "layer")
        with pytest.raises(UnsupportedModel, match="asks for attention to"):
            check_span(predicate, wrong, 500, "layer")


def test_a_mask_of_the_models_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **_: torch.zeros((1, 1, 7, 7)))
    with pytest.raises(UnsupportedModel, match="mask of its own"):
        probe_model(tiny_model("llama"), paged_attention, write_kv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HYBRID_CONFIGS)
def test_how_states_go_on_does_not_depend_on_the_dtype(name: str, dtype: torch.dtype) -> None:
    probed = probe_model(tiny_model(name).to(dtype), paged_attention, write_kv)
    assert probed.mixers.token_by_token == (name in ("mamba", "jamba"))
    probed.mixers.close()

"""The probe accepts what goes through the block table and refuses the rest, by name."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CONFIGS, HYBRID_CONFIGS, REFUSED_CONFIGS, tiny_model

from blocktable.attention import paged_attention, write_kv
from blocktable.core.errors import UnsupportedModel
from blocktable.engine.kv_layout import plan_layout
from blocktable.engine.probe import probe_model

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

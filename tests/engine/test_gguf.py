"""GGUF files: bit-identical values, equal models, one-line errors."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_files import write_mamba, write_model
from tiny_models import tiny_model

from blocktable import LLM, SamplingParams
from blocktable.core.errors import LoadError
from blocktable.engine.loader import begin
from blocktable.engine.loader.gguf_dequant import dequantize
from blocktable.engine.loader.gguf_file import GGUFFile, TensorInfo

QUANT_TYPES = [
    name for name in (
        "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K",
        "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS",
        "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS",
    ) if name in GGMLQuantizationType.__members__
]  # fmt: skip


@pytest.mark.parametrize("name", QUANT_TYPES)
def test_values_are_bit_identical_to_gguf_py(name: str) -> None:
    kind = GGMLQuantizationType[name]
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    rows, row_blocks = 37, 256 // per_block * 8  # 75,776 values: more than one pass
    rng = np.random.default_rng(5)
    raw = rng.integers(0, 256, (rows, row_blocks * block_bytes), dtype=np.uint8)
    if name in ("F32", "F16", "BF16"):
        raw = raw & 0x3F  # no NaN patterns: their payload is nobody's contract
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, kind).astype(np.float32)
        found = dequantize(TensorInfo("t", expected.shape, name, raw.reshape(-1)))
    np.testing.assert_array_equal(found, expected)
    live = ~np.isnan(expected)
    assert np.array_equal(found[live].view(np.uint32), expected[live].view(np.uint32))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2"])
def test_a_written_model_comes_back(arch: str, tmp_path: Path) -> None:
    model = tiny_model(arch)
    write_model(tmp_path / "tiny.gguf", arch, model)
    loaded = begin(tmp_path / "tiny.gguf").finish("float32")
    state, back = model.state_dict(), loaded.model.state_dict()
    assert state.keys() == back.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=1e-6 if "norm" in name else 0)
    ids = torch.tensor([[5, 9, 33, 60, 7]])
    with torch.inference_mode():
        own, theirs = loaded.model(ids).logits, model(ids).logits
    torch.testing.assert_close(own, theirs, rtol=1e-3, atol=1e-3)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("abba").input_ids == [95, 68, 67]
    assert loaded.tokenizer.eos_token_id == 2


def test_quantised_model_has_the_quantised_values(tmp_path: Path) -> None:
    model = tiny_model("llama")
    write_model(tmp_path / "q.gguf", "llama", model, "Q8_0")
    weight = model.model.layers[1].mlp.up_proj.weight.detach().numpy()
    loaded = begin(tmp_path / "q.gguf").finish("float32").model
    found = loaded.model.layers[1].mlp.up_proj.weight.detach().numpy()
    kind = GGMLQuantizationType.Q8_0
    np.testing.assert_array_equal(found, gguf.dequantize(gguf.quantize(weight, kind), kind))


@pytest.mark.parametrize("keep", [0, 3, 4, 11, 23, 40, 200, 1500, 4000, -64])
def test_a_truncated_file_is_one_error(keep: int, tmp_path: Path) -> None:
    write_model(tmp_path / "whole.gguf", "llama", tiny_model("llama"))
    whole = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:keep])
    with pytest.raises(LoadError) as caught:
        begin(tmp_path / "cut.gguf").finish("float32")
    assert "\n" not in str(caught.value) and "cut.gguf" in str(caught.value)


def test_flipped_header_bytes_never_escape_as_another_error(tmp_path: Path) -> None:
    write_model(tmp_path / "whole.gguf", "llama", tiny_model("llama"))
    whole = (tmp_path / "whole.gguf").read_bytes()
    header = whole.index(b"token_embd.weight") + 2000
    rng = np.random.default_rng(0)
    path = tmp_path / "bad.gguf"
    refused = 0
    for position in rng.integers(0, header, 400):
        bad = bytearray(whole)
        bad[position] ^= int(rng.integers(1, 256))
        path.write_bytes(bad)
        try:
            GGUFFile(path)
        except LoadError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 40


def test_what_is_no_gguf_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("hello, this is not a model at all")
    with pytest.raises(LoadError, match="not a GGUF file"):
        begin(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 99, 0, 0))
    with pytest.raises(LoadError, match="version 99"):
        begin(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0))
    with pytest.raises(LoadError, match="corrupt"):
        begin(path)


def test_bundled_model_reads_digits_one_by_one() -> None:
    """SmolLM2's rule: GPT-2's pattern after every digit was cut off."""
    loading = begin("smollm2")
    backend = loading.tokenizer.result()
    ids = backend.encode("In 2026, it's <|im_end|>").ids
    assert ids == [788, 216, 34, 32, 34, 38, 28, 357, 506, 216, 2]


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q6_K"])
def test_rounding_while_reading_is_torchs(name: str) -> None:
    kind = GGMLQuantizationType[name]
    rng = np.random.default_rng(1)
    values = rng.standard_normal((33, 2048), dtype=np.float32)
    if name == "Q6_K":
        raw = rng.integers(0, 60, (33, 2048 // 256 * GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    else:
        raw = gguf.quantize(values, kind)
    info = TensorInfo("t", (33, 2048), name, raw.reshape(-1))
    bits = dequantize(info, to_bfloat16=True)
    expected = torch.from_numpy(dequantize(info)).to(torch.bfloat16)
    assert torch.equal(torch.from_numpy(bits).view(torch.bfloat16), expected)


def test_bundled_model_equals_transformers_own_loading() -> None:
    """All 272 tensors and the rotary buffers, float32 bit for bit, bfloat16 rounded the same."""
    loaded = begin("smollm2").finish("float32").model
    rounded = begin("smollm2").finish("bfloat16").model
    state, low = loaded.state_dict(), rounded.state_dict()
    from_pretrained = type(loaded).from_pretrained(
        None, config=loaded.config, state_dict=dict(state), dtype=torch.float32
    )
    other = from_pretrained.state_dict()
    assert len(state) == 273 and state.keys() == other.keys() == low.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, other[name]) and torch.equal(tensor.bfloat16(), low[name])
    for model in (rounded, from_pretrained):
        assert torch.equal(model.model.rotary_emb.inv_freq, loaded.model.rotary_emb.inv_freq)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert rounded.dtype == torch.bfloat16 and rounded.config.dtype == torch.bfloat16


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "no-such-model")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(LoadError, match="no-such-model") as caught:
        begin(path).finish("float32")
    assert "\n" not in str(caught.value)


def test_an_architecture_left_to_transformers_is_loaded_and_served(tmp_path: Path) -> None:
    path, model = tmp_path / "mamba.gguf", tiny_model("mamba")
    write_mamba(path, model)
    state, back = model.state_dict(), begin(path).finish("float32").model.state_dict()
    for name, tensor in state.items():
        torch.testing.assert_close(back[name], tensor, rtol=1e-6, atol=1e-6)
    llm, ids = LLM(path, dtype="float32"), [5, 9, 33, 60, 7]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    found = llm.generate([ids], params)[0].outputs[0]
    own = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=6)
    assert found.token_ids == own[0, len(ids) :].tolist()
    assert llm.tokenizer is not None and found.text == llm.tokenizer.decode(found.token_ids)


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.95])
def test_such_a_file_cut_short_is_one_error(keep: float, tmp_path: Path) -> None:
    write_mamba(tmp_path / "whole.gguf", tiny_model("mamba"))
    whole = (tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(LoadError, match=r"cut\.gguf") as caught:
        begin(path).finish("float32")
    assert "\n" not in str(caught.value)


def test_without_accelerate_such_a_file_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers wants more packages than its plain loading; what is missing is said."""
    write_mamba(tmp_path / "mamba.gguf", tiny_model("mamba"))

    def missing(*_: object, **__: object) -> None:
        raise ImportError("needs the package gguf\nand more")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", missing)
    with pytest.raises(LoadError, match="architecture 'mamba' cannot be loaded: needs") as caught:
        begin(tmp_path / "mamba.gguf").finish("float32")
    assert "\n" not in str(caught.value)

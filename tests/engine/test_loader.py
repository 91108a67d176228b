"""Where models come from, and what is said when they do not come."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from blocktable.core.errors import ConfigError, LoadError
from blocktable.engine.loader import begin
from blocktable.engine.loader.dtypes import choose_dtype


def test_a_directory(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path)
    loaded = begin(str(tmp_path)).finish("float32")
    ids = torch.tensor([[3, 4, 5]])
    with torch.inference_mode():
        assert torch.equal(loaded.model(ids).logits, model(ids).logits)
    assert loaded.owned and loaded.tokenizer is None


def test_a_model_object_stays_the_callers() -> None:
    model = tiny_model("llama")
    loaded = begin(model).finish()
    assert loaded.model is model and not loaded.owned and model.dtype == torch.float32


@pytest.mark.parametrize(
    "source", ["/nowhere/at/all", "./missing.gguf", "../missing/dir", "a/b/c/d", "/nowhere/x.gguf"]
)
def test_a_missing_path_is_one_line(source: str) -> None:
    with pytest.raises(LoadError) as caught:
        begin(source).finish("float32")
    assert source.split("/")[-1] in str(caught.value) and "\n" not in str(caught.value)


def test_an_id_is_not_downloaded() -> None:
    with pytest.raises(LoadError, match="allow_download") as caught:
        begin("some-organisation/some-model-that-is-not-here").finish("float32")
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"config\.json"):
        begin(str(tmp_path)).finish("float32")
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(LoadError):
        begin(str(tmp_path)).finish("float32")


def test_what_is_no_model() -> None:
    with pytest.raises(LoadError, match="int"):
        begin(5)


def test_dtype_names() -> None:
    assert choose_dtype("float16", "cpu") is torch.float16
    assert choose_dtype("auto", "cpu") in (torch.bfloat16, torch.float32)
    with pytest.raises(ConfigError, match="float8"):
        choose_dtype("float8", "cpu")


@pytest.mark.parametrize("device", ["cuda:99", "cuda:x", "cuda:-3"])
def test_a_gpu_that_is_not_there_is_one_line(device: str) -> None:
    with pytest.raises(ConfigError, match=device):
        begin(tiny_model("llama")).finish("float32", device)

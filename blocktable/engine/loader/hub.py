"""Loading a Hugging Face directory or id; files only from this machine unless downloads are
allowed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blocktable.core.errors import LoadError

if TYPE_CHECKING:
    import torch


class HubModel(NamedTuple):
    """A model and its tokenizer; None where the directory holds none."""

    model: Any
    tokenizer: Any | None


def load_hub(source: str, dtype: torch.dtype, *, allow_download: bool) -> HubModel:
    """The causal language model at a directory or under an id, in ``dtype``, on the CPU.

    Raises LoadError, in one line, for whatever keeps it from loading.
    """
    from transformers import AutoModelForCausalLM

    local_only = not allow_download
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise LoadError(f"{source} holds no config.json: it is no model directory")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, local_files_only=local_only
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        if isinstance(error, OSError) and local_only and not Path(source).is_dir():
            raise LoadError(
                f"no model {source} on this machine: it is no path, no bundled name and no id in "
                "the Hugging Face cache (allow_download=True fetches ids)"
            ) from error
        raise LoadError(f"cannot load {source}: {one_line(error)}") from error
    return HubModel(model.eval(), load_tokenizer(source, local_only=local_only))


_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "merges.txt", "*.tiktoken", "tekken.json")


def load_tokenizer(source: str, *, local_only: bool) -> Any | None:
    """The tokenizer beside a model, or None where there is none that transformers can read.

    A directory without a tokenizer's files has none: transformers would make up an empty one.
    """
    from transformers import AutoTokenizer

    folder = Path(source)
    if folder.is_dir() and not any(f for name in _TOKENIZER_FILES for f in folder.glob(name)):
        return None
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=local_only)
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError):
        return None


def one_line(error: BaseException) -> str:
    """An exception's first line of text, or its type's name."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

"""The tokenizer a GGUF file describes.

A byte-level BPE (``tokenizer.ggml.model`` = ``gpt2``) whose splitting rule is known is built here
from the vocabulary and merges, which needs neither torch nor transformers and can run while those
are being imported. Everything else goes through transformers' own conversion.

The splitting rules are those of the models' own tokenizer.json files; llama.cpp names them in
``tokenizer.ggml.pre``.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

from blocktable.core.errors import LoadError
from blocktable.engine.loader.gguf_file import GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_DIGIT_WISE = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
"""Every digit stands alone, then GPT-2's pattern."""

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|", 1)
_SPLITS = {
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "megrez": _QWEN2,
    "llama3": _LLAMA3, "llama-v3": _LLAMA3, "llama-bpe": _LLAMA3, "falcon3": _LLAMA3,
    "dbrx": _LLAMA3, "smaug-bpe": _LLAMA3, "pixtral": _LLAMA3,
}  # fmt: skip
_PLAIN = frozenset({"gpt-2", "phi-2", "jais", "mpt", "olmo", "default"})


def byte_level_tokenizer(file: GGUFFile) -> Tokenizer | None:
    """The file's tokenizer built here, or None where its kind is not one of those above."""
    meta = file.metadata
    pre = meta.get("tokenizer.ggml.pre", "default")
    tokens, merges = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.merges")
    known = pre in _DIGIT_WISE or pre in _SPLITS or pre in _PLAIN
    if meta.get("tokenizer.ggml.model") != "gpt2" or not (known and tokens and merges):
        return None
    from tokenizers import Tokenizer, decoders, models

    bpe = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
        ignore_merges=pre in ("llama3", "llama-v3", "llama-bpe"),
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, file)
    return tokenizer


def _pre_tokenizer(pre: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if pre in _DIGIT_WISE:
        first: Any = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if pre in _PLAIN:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    first = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([first, rest])


def _add_special(tokenizer: Tokenizer, file: GGUFFile) -> None:
    """Control tokens are special, user-defined ones are only kept whole; add BOS where asked."""
    from tokenizers import AddedToken, processors

    meta = file.metadata
    tokens = meta["tokenizer.ggml.tokens"]
    kinds = meta.get("tokenizer.ggml.token_type") or []
    pairs = list(zip(tokens, kinds, strict=False))
    special = [AddedToken(t, special=True, normalized=False) for t, k in pairs if k == _CONTROL]
    whole = [AddedToken(t, special=False, normalized=False) for t, k in pairs if k == _USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(whole)
    bos = meta.get("tokenizer.ggml.bos_token_id")
    if meta.get("tokenizer.ggml.add_bos_token") and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )


def wrap_tokenizer(file: GGUFFile, built: Tokenizer | None) -> Any:
    """A transformers tokenizer with the file's special tokens and chat template.

    ``built`` is what :func:`byte_level_tokenizer` returned; None asks transformers to convert.
    LoadError where the file holds no vocabulary or one that cannot be converted.
    """
    from transformers import PreTrainedTokenizerFast

    meta = file.metadata
    tokens = meta.get("tokenizer.ggml.tokens")
    if not tokens:
        raise LoadError(f"{file.path} holds no tokenizer")
    special: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = meta.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and 0 <= index < len(tokens):
            special[f"{name}_token"] = tokens[index]
    if built is None:
        built, extra = _converted(file)
        special = {**extra, **special}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, **special)
    tokenizer.chat_template = meta.get("tokenizer.chat_template")
    return tokenizer


def _converted(file: GGUFFile) -> tuple[Tokenizer, dict[str, Any]]:
    """transformers' own conversion; where it lives depends on the version."""
    convert = None
    for name in ("gguf.gguf_tokenizer_mapping", "ggml"):
        if convert is None:
            with contextlib.suppress(ImportError):
                module = importlib.import_module(f"transformers.integrations.{name}")
                convert = getattr(module, "convert_gguf_tokenizer", None)
    if convert is None:
        raise LoadError(f"{file.path}: this transformers cannot convert its tokenizer")
    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    prefix = "tokenizer.ggml."
    fields = {
        names.get(key.removeprefix(prefix), key.removeprefix(prefix)): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    try:
        return convert(file.architecture, fields)
    except (KeyError, ValueError, TypeError) as error:
        raise LoadError(f"{file.path}: its tokenizer cannot be converted: {error}") from error

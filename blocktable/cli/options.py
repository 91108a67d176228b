"""Options that several commands share, each written down once."""

from __future__ import annotations

from typing import Annotated, Any

import typer

_SAMPLING, _ENGINE = "Sampling", "Engine"

Model = Annotated[
    str,
    typer.Argument(help="smollm2, a Hugging Face directory or id, or a .gguf file."),
]
MaxTokens = Annotated[
    int, typer.Option(help="Most tokens to generate for a request.", rich_help_panel=_SAMPLING)
]
Temperature = Annotated[
    float, typer.Option(help="0 takes the likeliest token.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[int, typer.Option(help="0 keeps all tokens.", rich_help_panel=_SAMPLING)]
TopP = Annotated[float, typer.Option(help="1 keeps all tokens.", rich_help_panel=_SAMPLING)]
MinP = Annotated[float, typer.Option(help="0 keeps all tokens.", rich_help_panel=_SAMPLING)]
Seed = Annotated[int | None, typer.Option(help="Fixes the draws.", rich_help_panel=_SAMPLING)]
Stop = Annotated[
    list[str] | None, typer.Option(help="Text that ends an answer.", rich_help_panel=_SAMPLING)
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Run to max-tokens.", rich_help_panel=_SAMPLING)
]
BlockSize = Annotated[int, typer.Option(help="Tokens in a block.", rich_help_panel=_ENGINE)]
NumBlocks = Annotated[
    int | None, typer.Option(help="Blocks in the pool, null included.", rich_help_panel=_ENGINE)
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest prompt and answer.", rich_help_panel=_ENGINE)
]
MaxNumSeqs = Annotated[int, typer.Option(help="Most requests in a step.", rich_help_panel=_ENGINE)]
MaxBatchedTokens = Annotated[
    int | None, typer.Option(help="Most tokens in a step.", rich_help_panel=_ENGINE)
]
PrefixCaching = Annotated[
    bool, typer.Option(help="Reuse blocks of equal prefixes.", rich_help_panel=_ENGINE)
]
ChunkedPrefill = Annotated[
    bool, typer.Option(help="Split long prompts over steps.", rich_help_panel=_ENGINE)
]
DraftTokens = Annotated[
    int | None,
    typer.Option(help="Guess ahead by n-gram look-up, check in one pass.", rich_help_panel=_ENGINE),
]
DType = Annotated[
    str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=_ENGINE)
]
AttentionBackend = Annotated[
    str | None,
    typer.Option(
        help="On a GPU: auto (measured), triton (ours), flashinfer or flash_attn.",
        rich_help_panel=_ENGINE,
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda[:n].", rich_help_panel=_ENGINE)]


def given(**options: Any) -> dict[str, Any]:
    """The options that were given (not None), as keyword arguments."""
    return {name: value for name, value in options.items() if value is not None}

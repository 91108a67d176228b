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
Eviction = Annotated[
    str | None, typer.Option(help="Which cached blocks go: lru or reuse.", rich_help_panel=_ENGINE)
]
RetainShare = Annotated[
    float | None, typer.Option(help="Share of the pool that hints keep.", rich_help_panel=_ENGINE)
]
Policy = Annotated[
    str | None, typer.Option(help="Who runs first: fcfs or priority.", rich_help_panel=_ENGINE)
]
Preemption = Annotated[
    str | None, typer.Option(help="A victim's blocks: recompute or swap.", rich_help_panel=_ENGINE)
]
HostBlocks = Annotated[
    int | None, typer.Option(help="Host blocks for --preemption swap.", rich_help_panel=_ENGINE)
]
EngineSeed = Annotated[
    int | None, typer.Option("--seed", help="Fixes draws and keys.", rich_help_panel=_ENGINE)
]
GpuMemory = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory-utilization", help="Share of a GPU to take.", rich_help_panel=_ENGINE
    ),
]
KVEvents = Annotated[
    str | None,
    typer.Option(help="Publish cache events, tcp://*:5557.", rich_help_panel=_ENGINE),
]
KVEventsReplay = Annotated[
    str | None,
    typer.Option(help="Where missed events are asked for.", rich_help_panel=_ENGINE),
]
RankTimeout = Annotated[float | None, typer.Option(help="Seconds until a silent rank is a fault.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda[:n].", rich_help_panel=_ENGINE)]


def given(**options: Any) -> dict[str, Any]:
    """The options that were given (not None), as keyword arguments."""
    return {name: value for name, value in options.items() if value is not None}

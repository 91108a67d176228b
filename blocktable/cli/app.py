"""The commands and their options. What they do lives beside this module and is imported late."""

from __future__ import annotations

from typing import Annotated

import typer

from blocktable.cli import options as opt

app = typer.Typer(
    name="blocktable",
    help="The memory system of LLM inference: paged KV cache, block tables, engine and server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.command()
def generate(
    model: opt.Model = "smollm2",
    prompts: Annotated[
        str | None, typer.Option(help="JSON-lines file of prompts, - for standard input.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt of every question.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Use no chat template.")] = False,
    n: Annotated[int, typer.Option("-n", help="Answers for each prompt.")] = 1,
    json_out: Annotated[
        bool, typer.Option("--json", help="One JSON object a request on standard output.")
    ] = False,
    max_tokens: opt.MaxTokens = 96,
    temperature: opt.Temperature = 0.0,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: Annotated[float, typer.Option(rich_help_panel="Sampling")] = 1.0,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    ignore_eos: opt.IgnoreEos = False,
    block_size: opt.BlockSize = 16,
    num_blocks: opt.NumBlocks = None,
    max_model_len: opt.MaxModelLen = None,
    max_num_seqs: opt.MaxNumSeqs = 64,
    max_num_batched_tokens: opt.MaxBatchedTokens = None,
    prefix_caching: opt.PrefixCaching = True,
    chunked_prefill: opt.ChunkedPrefill = True,
    dtype: opt.DType = "auto",
    device: opt.Device = None,
) -> None:
    """Answer many prompts at once and show what the block pool did."""
    from blocktable.cli.generate import generate as run
    from blocktable.engine.params import SamplingParams

    params = SamplingParams(
        n=n, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, repetition_penalty=repetition_penalty, seed=seed, stop=stop,
        ignore_eos=ignore_eos,
    )  # fmt: skip
    engine = opt.given(
        block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=prefix_caching, enable_chunked_prefill=chunked_prefill,
        dtype=dtype, device=device,
    )  # fmt: skip
    run(model, prompts, prompt or [], system, raw, params, engine, json_out)


@app.command()
def chat(
    model: opt.Model = "smollm2",
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: opt.MaxTokens = 512,
    temperature: opt.Temperature = 0.7,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 0.9,
    min_p: opt.MinP = 0.0,
    seed: opt.Seed = None,
    dtype: opt.DType = "auto",
    device: opt.Device = None,
) -> None:
    """Talk with a model; each turn reuses the blocks of the turns before it."""
    from blocktable.cli.chat import chat as run
    from blocktable.engine.params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        seed=seed,
    )  # fmt: skip
    run(model, system, params, opt.given(dtype=dtype, device=device))


@app.command()
def version() -> None:
    """Versions of blocktable and of what it runs on."""
    import importlib.metadata as metadata
    import platform

    import blocktable

    print(f"blocktable {blocktable.__version__}")
    print(f"python {platform.python_version()}")
    for package in ("numpy", "torch", "triton", "transformers"):
        try:
            print(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            print(f"{package} not installed")

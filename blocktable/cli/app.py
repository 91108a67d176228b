"""The commands and their options. What they do lives beside this module and is imported late."""

from __future__ import annotations

from pathlib import Path
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
def serve(
    model: opt.Model = "smollm2",
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="BLOCKTABLE_API_KEY", help="Key that clients must send.")
    ] = None,
    served_name: Annotated[str | None, typer.Option(help="The model's name in the API.")] = None,
    max_queue: Annotated[int, typer.Option(help="Completions that may wait; then 429.")] = 256,
    drain_seconds: Annotated[float, typer.Option(help="Time for answers at SIGTERM.")] = 30.0,
    inspector: Annotated[bool, typer.Option(help="Serve the page /inspect.")] = True,
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
    """Serve a model to OpenAI clients, with the inspector at /inspect."""
    from blocktable.serve.config import ServerConfig
    from blocktable.serve.run import serve as run

    config = ServerConfig(
        host=host, port=port, api_key=api_key, served_name=served_name, max_queue=max_queue,
        drain_seconds=drain_seconds, inspector=inspector,
    )  # fmt: skip
    engine = opt.given(
        block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=prefix_caching, enable_chunked_prefill=chunked_prefill,
        dtype=dtype, device=device,
    )  # fmt: skip
    run(model, config, engine)


@app.command()
def replay(
    script: Annotated[Path, typer.Argument(help="JSON-lines script of cache operations.")],
    answers: Annotated[Path, typer.Option(help="Where to write the state after each operation.")],
) -> None:
    """Run a script of cache operations through the real manager and scheduler."""
    from blocktable.check.replay import run

    run(script, answers)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="A config.json, a directory with one, or an id.")],
    gpu: Annotated[str, typer.Option(help="Device to plan for.")] = "h200",
    context: Annotated[int | None, typer.Option(help="Tokens of a request.")] = None,
    requests: Annotated[int, typer.Option(help="Requests at once.")] = 256,
    tensor_parallel_size: Annotated[int, typer.Option("--tp", help="Ranks.")] = 1,
    block_size: opt.BlockSize = 16,
    kv_dtype: Annotated[str | None, typer.Option(help="The model's own by default.")] = None,
    gpu_memory_bytes: Annotated[int | None, typer.Option(help="Instead of the device's.")] = None,
    weight_bytes: Annotated[int | None, typer.Option(help="Bytes of weights a rank.")] = None,
    json_out: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the plan into this picture.")] = None,
) -> None:
    """How many requests fit, and what each costs, from a model's configuration alone."""
    from blocktable import plan as planner

    made = planner.plan(
        model, gpu=gpu, context=context, requests=requests, block_size=block_size,
        tensor_parallel_size=tensor_parallel_size, kv_dtype=kv_dtype,
        gpu_memory_bytes=gpu_memory_bytes, weight_bytes=weight_bytes,
    )  # fmt: skip
    if plot is not None:
        planner.plot(made, plot)
    if json_out:
        print(planner.as_json(made))
    else:
        planner.render(made)


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

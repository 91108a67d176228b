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
    draft_tokens: opt.DraftTokens = None,
    dtype: opt.DType = "auto",
    device: opt.Device = None,
    attention_backend: opt.AttentionBackend = None,
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
        num_draft_tokens=draft_tokens, dtype=dtype, device=device,
        attention_backend=attention_backend,
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
    tool_call_parser: Annotated[
        str, typer.Option(help="auto, none, hermes, llama3_json or mistral.")
    ] = "auto",
    inspector: Annotated[bool, typer.Option(help="Serve the page /inspect.")] = True,
    role: Annotated[str, typer.Option(help="both, or half a server: prefill, decode.")] = "both",
    prefill: Annotated[
        list[str] | None, typer.Option(help="Endpoint of a prefill process; may be repeated.")
    ] = None,
    transfer_endpoint: Annotated[
        str, typer.Option(help="Where --role prefill answers decode servers.")
    ] = "tcp://127.0.0.1:*",
    tensor_parallel_size: Annotated[
        int | None, typer.Option("--tp", help="Ranks that share the model.")
    ] = None,
    context_parallel_size: Annotated[
        int | None, typer.Option("--cp", help="Ranks that share each sequence's KV cache.")
    ] = None,
    context_parallel_interleave: Annotated[
        int | None, typer.Option("--cp-interleave", help="Neighbouring positions on one rank.")
    ] = None,
    rank_timeout: opt.RankTimeout = None,
    ray: Annotated[bool, typer.Option("--ray", help="Replicas by Ray Serve, one router.")] = False,
    replicas: Annotated[int, typer.Option(help="How many with --ray.", min=1)] = 3,
    block_size: opt.BlockSize = 16,
    num_blocks: opt.NumBlocks = None,
    max_model_len: opt.MaxModelLen = None,
    max_num_seqs: opt.MaxNumSeqs = 64,
    max_num_batched_tokens: opt.MaxBatchedTokens = None,
    prefix_caching: opt.PrefixCaching = True,
    chunked_prefill: opt.ChunkedPrefill = True,
    draft_tokens: opt.DraftTokens = None,
    policy: opt.Policy = None,
    preemption: opt.Preemption = None,
    num_host_blocks: opt.HostBlocks = None,
    eviction: opt.Eviction = None,
    retain_share: opt.RetainShare = None,
    kv_events: opt.KVEvents = None,
    kv_events_replay: opt.KVEventsReplay = None,
    seed: opt.EngineSeed = None,
    dtype: opt.DType = "auto",
    device: opt.Device = None,
    gpu_memory_utilization: opt.GpuMemory = None,
    attention_backend: opt.AttentionBackend = None,
) -> None:
    """Serve a model to OpenAI clients, with the inspector at /inspect."""
    from blocktable.serve.config import ServerConfig
    from blocktable.serve.run import serve_role

    config = ServerConfig(
        host=host, port=port, api_key=api_key, served_name=served_name, max_queue=max_queue,
        drain_seconds=drain_seconds, tool_call_parser=tool_call_parser, inspector=inspector,
    )  # fmt: skip
    engine = opt.given(
        block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=prefix_caching, enable_chunked_prefill=chunked_prefill,
        num_draft_tokens=draft_tokens, policy=policy, preemption=preemption,
        num_host_blocks=num_host_blocks, eviction=eviction, retain_share=retain_share,
        kv_events=kv_events, kv_events_replay=kv_events_replay, seed=seed,
        dtype=dtype, device=device, gpu_memory_utilization=gpu_memory_utilization,
        attention_backend=attention_backend, tensor_parallel_size=tensor_parallel_size,
        context_parallel_size=context_parallel_size,
        context_parallel_interleave=context_parallel_interleave, rank_timeout=rank_timeout,
    )  # fmt: skip
    if ray:
        from blocktable.serve.ray_serve import serve_ray

        serve_ray(model, config, engine, replicas=replicas)
        return
    serve_role(model, role, config, engine, prefill=prefill or (), endpoint=transfer_endpoint)


@app.command()
def inspect(
    url: Annotated[str, typer.Argument(help="A blocktable server.")] = "http://127.0.0.1:8000",
    events: Annotated[
        str | None, typer.Option(help="Instead: KV events of another engine, tcp://host:5557.")
    ] = None,
    replay_events: Annotated[
        str | None, typer.Option("--replay", help="Its replay endpoint, to fill gaps.")
    ] = None,
    topic: Annotated[str, typer.Option(help="Only events of this topic.")] = "",
    host: Annotated[str, typer.Option(help="Address of the page over events.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the page over events.")] = 8001,
    api_key: Annotated[str | None, typer.Option(envvar="BLOCKTABLE_API_KEY")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and leave.")] = False,
) -> None:
    """Watch a server's block pool in this terminal, or another engine's events in a page."""
    if events is None:
        from blocktable.cli.inspect import inspect as run

        run(url, api_key, once)
        return
    from blocktable.serve.attach import attach
    from blocktable.serve.config import ServerConfig

    attach(events, replay_events, topic, ServerConfig(host=host, port=port))


@app.command()
def replay(
    script: Annotated[Path, typer.Argument(help="JSON-lines script of cache operations.")],
    answers: Annotated[Path, typer.Option(help="Where to write the state after each operation.")],
) -> None:
    """Run a script of cache operations through the real manager and scheduler."""
    from blocktable.check.replay import run

    run(script, answers)


@app.command()
def simulate(
    trace: Annotated[Path, typer.Option(help="JSON-lines trace of requests.")],
    blocks: Annotated[str | None, typer.Option(help="Usable blocks, or 'unbounded'.")] = None,
    memory_gb: Annotated[float, typer.Option(help="KV memory where no --blocks is given.")] = 80.0,
    tokens_per_hash: Annotated[int, typer.Option(help="Tokens of a hash id (= block size).")] = 512,
    eviction: Annotated[str, typer.Option(help="Eviction policy of the prefix cache.")] = "lru",
    policy: Annotated[str, typer.Option(help="fcfs or priority.")] = "fcfs",
    max_num_seqs: opt.MaxNumSeqs = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 8192,
    prefix_caching: opt.PrefixCaching = True,
    kv_bytes_per_token: Annotated[int, typer.Option(help="KV bytes of a token.")] = 131072,
    parameters: Annotated[float, typer.Option(help="Parameters of the model.")] = 8.0e9,
    devices: Annotated[int, typer.Option(help="Devices that share the model.")] = 4,
    limit: Annotated[int | None, typer.Option(help="Take only so many requests.")] = None,
    sweep: Annotated[
        str | None, typer.Option(help="Pool sizes in GB with commas, or 'default'.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG to draw.")] = Path("simulate.png"),
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.")
    ] = None,
) -> None:
    """Replay a request trace through the real manager and scheduler, on a stated step time."""
    from blocktable.sim.command import SimCommand, parse_sizes, run
    from blocktable.sim.simulator import SimOptions
    from blocktable.sim.step_time import StepTimeModel

    step_time = StepTimeModel(
        num_parameters=parameters, kv_bytes_per_token=kv_bytes_per_token, devices=devices
    )
    options = SimOptions(
        step_time=step_time, max_num_seqs=max_num_seqs, policy=policy, eviction=eviction,
        max_num_batched_tokens=max_num_batched_tokens, enable_caching=prefix_caching,
    )  # fmt: skip
    run(
        SimCommand(
            trace=trace, blocks=blocks, memory_gb=memory_gb, block_size=tokens_per_hash,
            limit=limit, sweep_gb=parse_sizes(sweep) if sweep else (), json_file=json_file,
            plot=plot, options=options,
        )
    )  # fmt: skip


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(help="How long.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Seed of the first round.")] = 0,
) -> None:
    """Random traffic over tiny pools; everything is recounted after each operation."""
    from blocktable.check.soak import main

    raise typer.Exit(main(["--minutes", str(minutes), "--seed", str(seed)]))


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="A config.json, its directory, an id, a .gguf, smollm2.")
    ],
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

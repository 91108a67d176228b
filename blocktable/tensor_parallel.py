"""Several ranks, one engine: the scheduler and sampler run on rank 0, the model on all.

::

    rank 0                                          ranks 1 ..
    schedule --> step message ------------------->  own tables change, are checked
        |            <------------ acknowledgement  |
    forward pass  <=====  all-reduce (gloo/NCCL) =====>  forward pass
    sample, update

The model is split by transformers' tensor-parallel plan. Ranks are processes started here, or by
torchrun; with torchrun every process runs the same script, and in the others `LLM` becomes the
rank's loop and leaves with the process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch

from blocktable.core.errors import BlocktableError, ConfigError, RankError
from blocktable.core.specs import KVCacheConfig
from blocktable.core.types import StepId
from blocktable.engine.build import Prepared, assemble_engine, make_runner, prepare_engine
from blocktable.engine.engine import Engine
from blocktable.engine.options import EngineOptions
from blocktable.engine.runner import ModelRunner
from blocktable.parallel.channel import FAILED, Ack, DriverChannel, RankChannel, world_is_alive
from blocktable.parallel.driver import StepWriter
from blocktable.parallel.handshake import RankGeometry, agree
from blocktable.parallel.rank import RankState, RankStep
from blocktable.parallel.torch_comm import TorchCommunicator
from blocktable.parallel.wire import encode_step
from blocktable.parallel.worker import serve_rank
from blocktable.sched.output import Fork, SchedulerOutput
from blocktable.shards import load_shard


class LeadingRunner:
    """Rank 0's runner: tells the other ranks of a step, then runs its own part of it.

    Raises RankError when a rank died, diverged or stayed silent; the engine is of no more use then.
    """

    def __init__(self, runner: ModelRunner, writer: StepWriter, channel: DriverChannel) -> None:
        self._runner, self._writer, self._channel = runner, writer, channel
        self._released: list[np.ndarray] = []

    scores_prompts = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, output: SchedulerOutput, also: None = None) -> torch.Tensor | None:
        """See `ModelRunner.execute`. The other ranks are not told of more lines of logits."""
        moves = len(output.copies) + len(output.swap_in) + len(output.swap_out)
        if output.is_empty and not moves:
            self._released.append(output.released)  # told with the next step that runs
            return self._runner.execute(output)
        if self._released:
            rows = np.unique(np.concatenate([*self._released, output.released]))
            output = output._replace(released=rows.astype(np.int32))
            self._released.clear()
        message = self._writer.write(output, self._runner.manager.tokens)
        self._channel.publish(encode_step(message))
        try:
            logits = self._runner.execute(output)
        except RuntimeError:
            self._channel.confirm(message.sequence, message.step, message.digest)
            raise
        self._channel.confirm(message.sequence, message.step, message.digest)
        return logits


def build_parallel_engine(
    model: Any, options: EngineOptions, *, tokenizer: Any = None, allow_download: bool = False
) -> Engine:
    """The engine of rank 0. In other ranks of a torchrun world this does not return.

    ``close_ranks`` of the engine's runner stops the other ranks; so does its end of life. Raises
    ConfigError, LoadError, UnsupportedModel as with one rank, and RankError for a rank that fails.
    """
    size = options.tensor_parallel_size
    options = _checked(model, options)
    environment = os.environ.get("WORLD_SIZE")
    if environment is not None and "RANK" in os.environ:
        return _join_torchrun(str(model), options, int(environment), tokenizer, allow_download)
    if torch.distributed.is_initialized():
        raise ConfigError("another tensor-parallel engine is alive in this process: close it first")
    address = f"127.0.0.1:{_free_port()}"
    context = multiprocessing.get_context("spawn")
    workers: list[Any] = []
    with _environment(0, size):
        for rank in range(1, size):
            arguments = (rank, address, str(model), options, allow_download)
            workers.append(context.Process(target=_worker_main, args=arguments, daemon=True))
            workers[-1].start()
        threads = torch.get_num_threads()
        _share_cpu(options)
        try:
            communicator = _join(options, 0, address)
            return _lead(str(model), options, communicator, tokenizer, allow_download, workers)
        except BaseException:
            _stop(None, workers, threads)
            raise


def _checked(model: Any, options: EngineOptions) -> EngineOptions:
    if not isinstance(model, str | os.PathLike):
        raise ConfigError("tensor parallelism needs a model directory or id, not a model object")
    if str(model).endswith(".gguf") or str(model) == "smollm2":
        raise ConfigError(f"tensor parallelism needs a Hugging Face model, not {model}")
    if options.async_steps:
        raise ConfigError("async_steps cannot be used with tensor_parallel_size > 1")
    if options.kv_events is not None:
        raise ConfigError("kv_events cannot be used with tensor_parallel_size > 1")
    return replace(options, async_steps=False, accelerate=False, compile=False, cuda_graphs=False)


def _join_torchrun(
    source: str, options: EngineOptions, world: int, tokenizer: Any, allow_download: bool
) -> Engine:
    rank = int(os.environ["RANK"])
    if world != options.tensor_parallel_size:
        raise ConfigError(
            f"torchrun started {world} ranks, but tensor_parallel_size is "
            f"{options.tensor_parallel_size}"
        )
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if torch.distributed.is_initialized():
        communicator = TorchCommunicator(timeout=options.rank_timeout)
    else:
        communicator = _join(options, rank, address)
    if rank == 0:
        return _lead(source, options, communicator, tokenizer, allow_download, [])
    parent = os.getppid()
    _follow(source, options, communicator, allow_download, lambda: os.getppid() == parent)


def _join(options: EngineOptions, rank: int, address: str) -> TorchCommunicator:
    if options.on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    return TorchCommunicator.join(
        rank, options.tensor_parallel_size, address,
        backend="nccl" if options.on_gpu else "gloo", timeout=options.rank_timeout,
    )  # fmt: skip


def _lead(
    source: str, options: EngineOptions, communicator: TorchCommunicator, tokenizer: Any,
    allow_download: bool, workers: list[Any],
) -> Engine:  # fmt: skip
    host = socket.gethostbyname(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    channel = DriverChannel(
        communicator.world_size, f"tcp://{host}:*", timeout=options.rank_timeout,
        is_alive=world_is_alive(workers) if workers else None,
    )  # fmt: skip
    try:
        communicator.broadcast_bytes(channel.endpoint.encode())
        prepared, capacities = _prepare(source, options, communicator, tokenizer, allow_download)
        channel.wait_for_ranks()

        def wrap(runner: ModelRunner) -> LeadingRunner:
            tables = runner.manager.tables
            shape = {"widths": [table.max_blocks_per_row for table in tables]}
            communicator.broadcast_bytes(json.dumps(shape).encode())
            writer = StepWriter(tables, capacities, drains=not options.on_gpu)
            return LeadingRunner(runner, writer, channel)

        engine = assemble_engine(prepared, wrap=wrap)
    except BaseException as error:
        _raise_rank_fault(channel, error)
        raise
    threads = torch.get_num_threads()
    stop = weakref.finalize(engine, _stop, channel, workers, threads, communicator)
    engine.runner.close_ranks = stop  # pyright: ignore[reportAttributeAccessIssue]
    return engine


def _raise_rank_fault(channel: DriverChannel, error: BaseException) -> None:
    """Where a rank has said what went wrong, that is the error; else the caller's stands."""
    try:
        if isinstance(error, RankError) or not isinstance(error, BlocktableError):
            channel.check(0)
    finally:
        channel.close()


def _prepare(
    source: str, options: EngineOptions, communicator: TorchCommunicator, tokenizer: Any,
    allow_download: bool,
) -> tuple[Prepared, list[int]]:  # fmt: skip
    """Load this rank's shard and size the pool all ranks have room for."""
    device = options.device
    if options.on_gpu:
        device = f"cuda:{torch.cuda.current_device()}"
        options = replace(options, device=device)
    loaded = load_shard(
        source, communicator.rank, communicator.world_size, dtype=options.dtype, device=device,
        allow_download=allow_download, tokenizer=tokenizer,
    )  # fmt: skip
    capacities: list[int] = []

    def agree_with_ranks(config: KVCacheConfig) -> int:
        geometry = RankGeometry.of(
            config, max_num_rows=options.max_num_seqs, max_model_len=options.max_model_len or 0
        )
        told = communicator.gather_objects(geometry.as_dict())
        capacities.extend(int(one["num_blocks"]) for one in told)
        return agree(told)

    return prepare_engine(loaded, options, agree=agree_with_ranks), capacities


def _follow(
    source: str, options: EngineOptions, communicator: TorchCommunicator, allow_download: bool,
    is_driver_alive: Callable[[], bool],
) -> NoReturn:  # fmt: skip
    """A rank's whole life after it joined."""
    rank = communicator.rank
    channel = RankChannel(rank, communicator.broadcast_bytes(None).decode())
    try:
        prepared, _ = _prepare(source, options, communicator, None, allow_download)
        shape = json.loads(communicator.broadcast_bytes(None))
        state = RankState(
            prepared.config, rank=rank, max_num_rows=options.max_num_seqs,
            max_model_len=prepared.max_model_len, widths=shape["widths"],
        )  # fmt: skip
        runner = make_runner(prepared, state)
    except Exception as error:
        channel.send(Ack(FAILED, rank, 0, 0, 0, 0, 0, f"rank {rank} cannot start: {error}"))
        raise
    serve_rank(state, channel, lambda step: _run(runner, step), is_driver_alive)
    _leave()


def _leave() -> NoReturn:
    """End this rank's process, its work done, without taking the process group apart.

    Both ends close at about the same time; when the other end is gone first, gloo's threads abort
    the process now and then (1 of 12 runs), and the launcher takes that for a failed rank.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(runner: ModelRunner, step: RankStep) -> None:
    message = step.message
    forks = zip(message.fork_rows.tolist(), message.fork_parents.tolist(), strict=True)
    sample_rows = step.rows[step.sample_index]
    drawn = len(sample_rows) - len(np.unique(sample_rows))
    if drawn:  # children that only draw a token come last; the message names their parents
        sample_rows[-drawn:] = message.fork_rows[-drawn:]
    nobody: Any = SimpleNamespace(request_id=None)
    runner.execute(
        SchedulerOutput(
            step_id=StepId(message.step),
            rows=step.rows,
            num_scheduled=step.num_scheduled,
            num_computed=step.num_computed,
            num_total=int(step.num_scheduled.sum()),
            sample_rows=sample_rows,
            sample_index=step.sample_index,
            forked=tuple(Fork(nobody, row, parent) for row, parent in forks),
            released=message.released,
            copies=step.copies,
            swap_out=step.swap_out,
            swap_in=step.swap_in,
        )
    )


def _worker_main(
    rank: int, address: str, source: str, options: EngineOptions, allow_download: bool
) -> None:
    parent = multiprocessing.parent_process()
    with _environment(rank, options.tensor_parallel_size):
        _share_cpu(options)
        communicator = _join(options, rank, address)
        alive = parent.is_alive if parent is not None else (lambda: True)
        try:
            _follow(source, options, communicator, allow_download, alive)
        except RankError:
            sys.exit(1)  # the driver was told


def _share_cpu(options: EngineOptions) -> None:
    if not options.on_gpu:
        share = (os.cpu_count() or 1) // options.tensor_parallel_size
        torch.set_num_threads(max(1, min(share, torch.get_num_threads())))


def _stop(
    channel: DriverChannel | None, workers: list[Any], threads: int, communicator: Any = None
) -> None:
    """End the other ranks; those that do not go within seconds are killed."""
    if channel is not None:
        channel.close()
    for worker in workers:
        worker.join(3 if channel is not None else 0.1)
        if worker.is_alive():
            worker.kill()
            worker.join(3)
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized() and (communicator is not None or workers):
        torch.distributed.destroy_process_group()


@contextmanager
def _environment(rank: int, world_size: int) -> Iterator[None]:
    """The variables by which transformers finds its place in the world, for a while."""
    values = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

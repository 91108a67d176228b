"""What each rank builds: the engine on rank 0, a runner that follows it on the others."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from transformers.utils.logging import disable_progress_bar

from blocktable.core.errors import BlocktableError, ConfigError, RankError
from blocktable.core.specs import KVCacheConfig
from blocktable.engine.build import Prepared, assemble_engine, make_runner, prepare_engine
from blocktable.engine.engine import Engine
from blocktable.engine.loader import LoadedModel, begin
from blocktable.engine.options import EngineOptions
from blocktable.engine.runner import ModelRunner
from blocktable.groups.keybook import CacheSink
from blocktable.parallel.channel import FAILED, Ack, DriverChannel, RankChannel, world_is_alive
from blocktable.parallel.context import ContextRank
from blocktable.parallel.driver import StepWriter
from blocktable.parallel.handshake import RankGeometry, agree
from blocktable.parallel.rank import RankState
from blocktable.parallel.torch_comm import TorchCommunicator
from blocktable.parallel.worker import serve_rank
from blocktable.ranks.launch import (
    environment,
    join,
    leave,
    meet,
    say_here,
    share_cpu,
    start_ranks,
    stop_ranks,
    torchrun_place,
    wait_for_processes,
)
from blocktable.ranks.local import make_local
from blocktable.ranks.same_model import check_config, check_weights
from blocktable.ranks.shards import load_shard, shardable
from blocktable.ranks.steps import FollowingRunner, LeadingRunner


class Source(NamedTuple):
    """What every rank loads: a name or path, and whether it may be downloaded."""

    model: str
    allow_download: bool


MakeSink = Callable[[KVCacheConfig], CacheSink]


def build_parallel_engine(
    model: Any, options: EngineOptions, *, tokenizer: Any = None, allow_download: bool = False,
    make_sink: MakeSink | None = None,
) -> Engine:  # fmt: skip
    """The engine of rank 0. In other ranks of a torchrun world this does not return.

    ``close_ranks`` of the engine's runner stops the other ranks; so does its end of life.
    ``make_sink`` makes what hears of the cache's changes. Raises ConfigError, LoadError,
    UnsupportedModel as with one rank, and RankError for a rank that fails.
    """
    if not isinstance(model, str | os.PathLike):
        raise ConfigError("several ranks need a model by its name or path, not a model object")
    place = torchrun_place(options)
    if place is None and torch.distributed.is_initialized():
        raise ConfigError(
            "another engine of several ranks is alive in this process: close it first, LLM.close()"
        )
    options = _for_ranks(options)
    with shardable(str(model), options) as (path, own_tokenizer):
        source = Source(path, allow_download)
        tokenizer = tokenizer or own_tokenizer
        if place is not None:
            communicator = join(options, place.rank, place.address)
            if place.rank == 0:
                return _lead(source, options, communicator, tokenizer, make_sink, [])
            parent = os.getppid()
            _follow(source, options, communicator, lambda: os.getppid() == parent)
        return _start(source, options, tokenizer, make_sink)


def _for_ranks(options: EngineOptions) -> EngineOptions:
    """Options of each rank: ranks on CPUs share one memory, and the compiler is not to look into
    the sums between ranks."""
    if options.tensor_parallel_size > 1:
        fuses = options.on_gpu and options.accelerate is not False
        options = replace(options, accelerate=fuses, compile=False)
    if not options.on_gpu:
        options = replace(options, memory_share=options.memory_share / options.num_ranks)
    return options


def _start(
    source: Source, options: EngineOptions, tokenizer: Any, make_sink: MakeSink | None
) -> Engine:
    """Start the other ranks as processes of this machine, and lead them."""
    threads = torch.get_num_threads()
    store = meet(options)
    with environment(0, options.num_ranks):
        workers = start_ranks(_worker_main, options, store.port, source)
        share_cpu(options)
        try:
            wait_for_processes(store, workers, options)
            communicator = join(options, 0, f"port {store.port}", store)
            return _lead(source, options, communicator, tokenizer, make_sink, workers)
        except BaseException:
            stop_ranks(None, workers, threads)
            raise


def _lead(
    source: Source, options: EngineOptions, communicator: TorchCommunicator, tokenizer: Any,
    make_sink: MakeSink | None, workers: list[Any],
) -> Engine:  # fmt: skip
    host = "127.0.0.1" if workers else socket.gethostbyname(os.environ["MASTER_ADDR"])
    channel = DriverChannel(
        communicator.world_size, f"tcp://{host}:*", timeout=options.rank_timeout,
        is_alive=world_is_alive(workers) if workers else None,
    )  # fmt: skip
    try:
        communicator.broadcast_bytes(channel.endpoint.encode())
        prepared, capacities = _prepare(source, options, communicator, tokenizer)
        channel.wait_for_ranks()

        def wrap(runner: ModelRunner) -> LeadingRunner:
            tables = runner.manager.tables
            shape = {"widths": [table.max_blocks_per_row for table in tables]}
            communicator.broadcast_bytes(json.dumps(shape).encode())
            writer = StepWriter(tables, capacities, drains=not options.on_gpu)
            return LeadingRunner(runner, writer, channel, communicator)

        engine = assemble_engine(prepared, wrap=wrap, make_sink=make_sink)
        communicator.limit(options.rank_timeout)
    except BaseException as error:
        _raise_rank_fault(channel, error)
        raise
    threads = torch.get_num_threads()
    graphs = getattr(engine.runner, "graph_pools", ())
    stop = weakref.finalize(engine, stop_ranks, channel, workers, threads, communicator, graphs)
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
    source: Source, options: EngineOptions, communicator: TorchCommunicator, tokenizer: Any
) -> tuple[Prepared, list[int]]:
    """Load this rank's part and size the pool all ranks have room for."""
    if options.on_gpu:
        options = replace(options, device=f"cuda:{torch.cuda.current_device()}")
    capacities: list[int] = []

    def agree_with_ranks(config: KVCacheConfig) -> int:
        geometry = RankGeometry.of(
            config, max_num_rows=options.max_num_seqs, max_model_len=options.max_model_len or 0
        )
        told = communicator.gather_objects(geometry.as_dict())
        capacities.extend(int(one["num_blocks"]) for one in told)
        return agree(told)

    share = None
    if options.context_parallel_size > 1:
        share = ContextRank(communicator, options.context_parallel_interleave)
    loaded = _load(source, options, communicator, tokenizer)
    check_weights(loaded.model, communicator)
    if options.tensor_parallel_size > 1 and not make_local(loaded.model, communicator):
        options = replace(options, cuda_graphs=False)  # ranks were seen to stall in a capture
    return prepare_engine(loaded, options, agree=agree_with_ranks, share=share), capacities


def _load(
    source: Source, options: EngineOptions, communicator: TorchCommunicator, tokenizer: Any
) -> LoadedModel:
    """This rank's shard of the model, or, where positions are dealt out, the whole model."""
    if options.tensor_parallel_size > 1:
        return load_shard(
            source.model, communicator.rank, communicator.world_size, dtype=options.dtype,
            device=options.device, allow_download=source.allow_download, tokenizer=tokenizer,
            check=partial(check_config, communicator=communicator),
        )  # fmt: skip
    loading = begin(source.model, allow_download=source.allow_download)
    loaded = loading.finish(options.dtype, options.device, tokenizer)
    check_config(loaded.model.config, communicator)
    return loaded


def _follow(
    source: Source, options: EngineOptions, communicator: TorchCommunicator,
    is_driver_alive: Callable[[], bool],
) -> NoReturn:  # fmt: skip
    """A rank's whole life after it joined."""
    rank = communicator.rank
    disable_progress_bar()  # rank 0 shows one
    channel = RankChannel(rank, communicator.broadcast_bytes(None).decode())
    try:
        prepared, _ = _prepare(source, options, communicator, None)
        shape = json.loads(communicator.broadcast_bytes(None))
        state = RankState(
            prepared.config, rank=rank, max_num_rows=options.max_num_seqs,
            max_model_len=prepared.max_model_len, widths=shape["widths"],
        )  # fmt: skip
        runner = FollowingRunner(
            make_runner(prepared, state), communicator, options.steps_in_flight
        )
        communicator.limit(options.rank_timeout)
    except Exception as error:
        channel.send(Ack(FAILED, rank, 0, 0, 0, 0, 0, f"rank {rank} cannot start: {error}"))
        raise
    serve_rank(state, channel, runner.run, is_driver_alive)
    leave()


def _worker_main(rank: int, options: EngineOptions, port: int, source: Source) -> None:
    parent = multiprocessing.parent_process()
    with environment(rank, options.num_ranks):
        share_cpu(options)
        store = meet(options, port)
        say_here(store, rank)
        communicator = join(options, rank, f"port {port}", store)
        alive = parent.is_alive if parent is not None else (lambda: True)
        try:
            _follow(source, options, communicator, alive)
        except RankError:
            sys.exit(1)  # the driver was told

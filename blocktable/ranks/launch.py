"""Processes of the ranks: where each stands in the world, how they share the CPU, how they end."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch

from blocktable.core.errors import ConfigError
from blocktable.engine.options import EngineOptions
from blocktable.parallel.channel import DriverChannel
from blocktable.parallel.torch_comm import TorchCommunicator

START_SECONDS = 120.0
"""How long ranks wait for each other while they start, where ``rank_timeout`` is less: importing
and loading take some longer than others. `TorchCommunicator.limit` ends that."""


class Place(NamedTuple):
    """A process in the world that torchrun made."""

    rank: int
    address: str


def torchrun_place(options: EngineOptions) -> Place | None:
    """This process's place, or None where torchrun did not start it. ConfigError where it started
    another number of ranks than the options ask for."""
    world = os.environ.get("WORLD_SIZE")
    if world is None or "RANK" not in os.environ:
        return None
    if int(world) != options.num_ranks:
        raise ConfigError(
            f"torchrun started {world} ranks, but tensor_parallel_size is "
            f"{options.tensor_parallel_size} and context_parallel_size "
            f"{options.context_parallel_size}"
        )
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return Place(int(os.environ["RANK"]), address)


def join(options: EngineOptions, rank: int, address: str) -> TorchCommunicator:
    """Enter the world at ``address``, over NCCL where the model runs on GPUs."""
    if torch.distributed.is_initialized():  # by the script that torchrun runs
        return TorchCommunicator(timeout=options.rank_timeout)
    if options.on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    return TorchCommunicator.join(
        rank, options.num_ranks, address, backend="nccl" if options.on_gpu else "gloo",
        timeout=max(options.rank_timeout, START_SECONDS),
    )  # fmt: skip


def start_ranks(target: Callable[..., None], options: EngineOptions, *arguments: Any) -> list[Any]:
    """Processes of ranks 1, 2, ..., each running ``target(rank, options, *arguments)``."""
    context = multiprocessing.get_context("spawn")
    workers = []
    for rank in range(1, options.num_ranks):
        workers.append(
            context.Process(target=target, args=(rank, options, *arguments), daemon=True)
        )
        workers[-1].start()
    return workers


def share_cpu(options: EngineOptions) -> None:
    """Leave the other ranks of this machine their part of the cores."""
    if not options.on_gpu:
        share = (os.cpu_count() or 1) // options.num_ranks
        torch.set_num_threads(max(1, min(share, torch.get_num_threads())))


def stop_ranks(
    channel: DriverChannel | None, workers: list[Any], threads: int, communicator: Any = None,
    graphs: Sequence[Any] = (),
) -> None:  # fmt: skip
    """End the other ranks; those that do not go within seconds are killed. ``graphs`` are pools of
    CUDA graphs that hold NCCL's kernels: they go before its communicator."""
    if channel is not None:
        channel.close()
    for worker in workers:
        worker.join(3 if channel is not None else 0.1)
        if worker.is_alive():
            worker.kill()
            worker.join(3)
    torch.set_num_threads(threads)
    for pool in graphs:
        pool.clear()
    if torch.distributed.is_initialized() and (communicator is not None or workers):
        _end_group()


def _end_group() -> None:
    """Take the process group apart. NCCL's would wait for kernels that wait for a dead rank, and
    for graphs that somebody still holds: it is aborted."""
    if torch.distributed.get_backend() == "nccl":
        torch.distributed.distributed_c10d._abort_process_group()
    else:
        torch.distributed.destroy_process_group()


def leave() -> NoReturn:
    """End this rank's process, its work done, without taking the process group apart.

    Both ends close at about the same time; when the other end is gone first, gloo's threads abort
    the process now and then (1 of 12 runs), and the launcher takes that for a failed rank.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def environment(rank: int, world_size: int) -> Iterator[None]:
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


def free_port() -> int:
    """A port of this machine that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

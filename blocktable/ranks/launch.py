"""Processes of the ranks: where each stands in the world, how they share the CPU, how they end."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from blocktable.core.errors import ConfigError, RankError
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
    another number of ranks than the options ask for, or where its variables are not all there."""
    found = os.environ
    if "WORLD_SIZE" not in found or "RANK" not in found:
        return None
    world, rank, port = (_number(found, name) for name in ("WORLD_SIZE", "RANK", "MASTER_PORT"))
    if world != options.num_ranks:
        raise ConfigError(
            f"torchrun started {world} ranks (WORLD_SIZE), but tensor_parallel_size is "
            f"{options.tensor_parallel_size} and context_parallel_size "
            f"{options.context_parallel_size}"
        )
    if not 0 <= rank < world:
        raise ConfigError(
            f"RANK must be in [0, {world - 1}], since WORLD_SIZE is {world}, got {rank}"
        )
    if not found.get("MASTER_ADDR"):
        raise ConfigError(_incomplete("MASTER_ADDR is not"))
    return Place(rank, f"{found['MASTER_ADDR']}:{port}")


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name)
    if text is None:
        raise ConfigError(_incomplete(f"{name} is not"))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(_incomplete(f"{name} is {text!r}, no integer")) from None


def _incomplete(fault: str) -> str:
    return (
        f"RANK and WORLD_SIZE are set, as torchrun does, but {fault}; unset both to let the ranks "
        "be started from here"
    )


def join(
    options: EngineOptions, rank: int, address: str, store: TCPStore | None = None
) -> TorchCommunicator:
    """Enter the world that meets at ``address`` or, where the ranks were started here, through
    ``store``; over NCCL where the model runs on GPUs."""
    if torch.distributed.is_initialized():  # by the script that torchrun runs
        return TorchCommunicator(timeout=options.rank_timeout)
    if options.on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    return TorchCommunicator.join(
        rank, options.num_ranks, address, backend="nccl" if options.on_gpu else "gloo",
        timeout=_start_seconds(options), store=store,
    )  # fmt: skip


def _start_seconds(options: EngineOptions) -> float:
    return max(options.rank_timeout, START_SECONDS)


def meet(options: EngineOptions, port: int | None = None) -> TCPStore:
    """Where the ranks started here find each other: made, at a free port of this machine, or, with
    its ``port``, entered."""
    return TCPStore(
        "127.0.0.1", port or 0, options.num_ranks, is_master=port is None,
        timeout=timedelta(seconds=_start_seconds(options)), wait_for_workers=False,
    )  # fmt: skip


def say_here(store: TCPStore, rank: int) -> None:
    """Tell rank 0 that this rank's process has come so far as to enter the world."""
    store.set(f"here/{rank}", "1")


def wait_for_processes(store: TCPStore, workers: Sequence[Any], options: EngineOptions) -> None:
    """Return once every rank has said that it is here: whoever enters the world waits for all.
    Raises RankError, naming the rank, as soon as one has ended instead."""
    deadline = time.monotonic() + _start_seconds(options)
    for rank, worker in enumerate(workers, 1):
        while not store.check([f"here/{rank}"]):
            if not worker.is_alive():
                raise RankError(
                    f"rank {rank} died at start-up: its process left with code {worker.exitcode}"
                )
            if time.monotonic() > deadline:
                raise RankError(f"rank {rank} did not join within {_start_seconds(options):g} s")
            time.sleep(0.02)


def start_ranks(target: Callable[..., None], options: EngineOptions, *arguments: Any) -> list[Any]:
    """Processes of ranks 1, 2, ..., each running ``target(rank, options, *arguments)``."""
    context = multiprocessing.get_context("spawn")
    workers = []
    with _without_script():
        for rank in range(1, options.num_ranks):
            workers.append(
                context.Process(target=target, args=(rank, options, *arguments), daemon=True)
            )
            workers[-1].start()
    return workers


@contextmanager
def _without_script() -> Iterator[None]:
    """A new process begins by running its parent's script once more, which would start ranks of
    its own (and is not there at all for a script read from standard input). A rank needs nothing
    of it, so it is not told of one."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


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

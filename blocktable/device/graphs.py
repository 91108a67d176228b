"""CUDA graphs: which batch sizes to capture, and input buffers that never move.

A captured graph replays fixed launches on fixed addresses. So a step is padded up to the next
captured size, and everything a graph reads lives in buffers made once::

    requests     5  -> captured 8:  rows 5..7 null, sequence length 0, no query tokens
    tokens       5  -> captured 8:  slots 5.. are -1, positions 0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from blocktable.core.errors import ConfigError
from blocktable.device.staging import StagingRing


def capture_sizes(max_size: int, *, dense_up_to: int = 8, step: int = 8) -> tuple[int, ...]:
    """Batch sizes worth capturing, ascending: powers of two up to ``dense_up_to``, multiples of
    ``step`` up to 256, of ``2 * step`` beyond, and ``max_size`` itself.

    Wasted padding stays below ``2 * step`` requests; 1,024 needs 84 graphs.
    """
    if max_size < 1:
        raise ConfigError(f"max_size must be at least 1, got {max_size}")
    powers = {1 << i for i in range(max(1, dense_up_to.bit_length()))}
    sizes = powers | set(range(step, 257, step)) | set(range(256, max_size + 1, 2 * step))
    return tuple(sorted({size for size in sizes if size <= max_size} | {max_size}))


def padded_size(size: int, sizes: Sequence[int]) -> int | None:
    """Smallest captured size >= ``size``; None when none is (run the step without a graph)."""
    at = int(np.searchsorted(sizes, size))
    return int(sizes[at]) if at < len(sizes) else None


class DeviceInputs(NamedTuple):
    """The device side of a step's inputs: slices of fixed buffers."""

    input_ids: torch.Tensor  # int32 [num_tokens_padded]
    positions: torch.Tensor  # int64 [num_tokens_padded]
    query_start_loc: torch.Tensor  # int32 [num_reqs_padded + 1]
    seq_lens: torch.Tensor  # int32 [num_reqs_padded]
    rows: torch.Tensor  # int32 [num_reqs_padded]: table row of each request, -1 padded


class StepInputs(NamedTuple):
    """One step's inputs: the device side in fixed buffers, padded as asked, and the host's."""

    input_ids: torch.Tensor  # int32 [num_tokens_padded]
    positions: torch.Tensor  # int64 [num_tokens_padded]
    query_start_loc: torch.Tensor  # int32 [num_reqs_padded + 1]
    seq_lens: torch.Tensor  # int32 [num_reqs_padded]
    rows: torch.Tensor  # int32 [num_reqs_padded]: table row of each request, -1 padded
    query_start_loc_cpu: torch.Tensor
    seq_lens_cpu: torch.Tensor
    rows_cpu: torch.Tensor
    num_tokens: int  # without padding


class StaticInputs:
    """Fixed device buffers for a step's inputs, filled by two copies from staging memory.

    Positions are worked out from the lengths, so a step is given as rows, query lengths,
    sequence lengths and token ids. The staging memory is a ring: a step in flight never sees
    the next step's values.
    """

    def __init__(self, max_num_reqs: int, max_num_tokens: int, device: torch.device | str) -> None:
        self.max_num_reqs, self.max_num_tokens = max_num_reqs, max_num_tokens
        self.device = torch.device(device)
        self._fields = _slices(max_num_reqs, max_num_tokens)
        ints = self._fields["input_ids"].stop
        self._buffer = torch.zeros(ints, dtype=torch.int32, device=self.device)
        self._ring = StagingRing(4 * ints, self.device)
        self._device = self._views(self._buffer)

    def _views(self, buffer: Any) -> dict[str, Any]:
        views = {name: buffer[at] for name, at in self._fields.items()}
        kind = torch.int64 if isinstance(buffer, torch.Tensor) else np.int64
        views["positions"] = views["positions"].view(kind)
        return views

    def stage(
        self,
        rows: np.ndarray,
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        input_ids: np.ndarray,
        *,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
    ) -> StepInputs:
        """Copy one step in and return its device tensors (the same addresses every time).

        ``rows``, ``query_lens``, ``seq_lens`` are [num_reqs], ``input_ids`` [num_tokens] in batch
        order. Padding must not be smaller than the step; ValueError when it, or the step, is
        larger than the buffers.
        """
        n, tokens = len(rows), int(np.sum(query_lens))
        reqs = n if num_reqs_padded is None else num_reqs_padded
        toks = tokens if num_tokens_padded is None else num_tokens_padded
        self._check(n, tokens, reqs, toks, len(input_ids))
        with self._ring.next() as slot:
            host = self._views(slot.array.view(np.int32))
            starts = host["query_start_loc"]
            starts[0] = 0
            np.cumsum(query_lens, out=starts[1 : n + 1])
            starts[n + 1 : reqs + 1] = tokens
            host["seq_lens"][:n], host["seq_lens"][n:reqs] = seq_lens, 0
            host["rows"][:n], host["rows"][n:reqs] = rows, -1
            host["input_ids"][:tokens], host["input_ids"][tokens:toks] = input_ids, 0
            first = np.asarray(seq_lens) - query_lens - starts[:n]
            positions = host["positions"]
            np.add(np.repeat(first, query_lens), np.arange(tokens), out=positions[:tokens])
            positions[tokens:toks] = 0
            cpu_starts, cpu_lens = starts[: reqs + 1].copy(), host["seq_lens"][:reqs].copy()
            cpu_rows = host["rows"][:reqs].copy()
            target = self._buffer.view(torch.uint8)
            slot.copy_to(target, 0, 4 * (self._fields["positions"].start + 2 * toks))
            ids = self._fields["input_ids"].start
            slot.copy_to(target, 4 * ids, 4 * (ids + toks))
        return StepInputs(
            *self.at(reqs, toks), torch.from_numpy(cpu_starts), torch.from_numpy(cpu_lens),
            torch.from_numpy(cpu_rows), tokens,
        )  # fmt: skip

    def at(self, num_reqs: int, num_tokens: int) -> DeviceInputs:
        """The buffers of a step of that padded size: what a graph is captured with."""
        views = self._device
        return DeviceInputs(
            views["input_ids"][:num_tokens], views["positions"][:num_tokens],
            views["query_start_loc"][: num_reqs + 1], views["seq_lens"][:num_reqs],
            views["rows"][:num_reqs],
        )  # fmt: skip

    def _check(self, n: int, tokens: int, reqs: int, toks: int, ids: int) -> None:
        if ids != tokens:
            raise ValueError(f"{ids} token ids for query lengths that add up to {tokens}")
        if not n <= reqs <= self.max_num_reqs:
            raise ValueError(f"{n} requests padded to {reqs}; buffers hold {self.max_num_reqs}")
        if not tokens <= toks <= self.max_num_tokens:
            raise ValueError(
                f"{tokens} tokens padded to {toks}; buffers hold {self.max_num_tokens}"
            )


def _slices(max_num_reqs: int, max_num_tokens: int) -> dict[str, slice]:
    """Where each field lies in the buffer, in int32 units. Fields by request come first, so that a
    step copies them and its share of the positions in one piece; positions are 8-byte aligned."""
    lengths = {
        "query_start_loc": max_num_reqs + 1,
        "seq_lens": max_num_reqs,
        "rows": max_num_reqs + (max_num_reqs + 1) % 2,
        "positions": 2 * max_num_tokens,
        "input_ids": max_num_tokens,
    }
    fields, at = {}, 0
    for name, length in lengths.items():
        fields[name], at = slice(at, at + length), at + length
    return fields


class GraphPool:
    """One captured CUDA graph for each batch size, made on demand; eager where there is no CUDA.

    ``run(size, fn)`` calls ``fn(padded_size)``: captured once for each padded size and replayed
    afterwards. ``fn`` must read its inputs from buffers at fixed addresses (``StaticInputs``, the
    device tables, the slot mapping) and return tensors, whose addresses are fixed too.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device | str) -> None:
        self.sizes = tuple(sorted(sizes))
        self.device = torch.device(device)
        self._graphs: dict[int, tuple[Any, Any]] = {}
        self._memory: Any = None

    @property
    def captured(self) -> Mapping[int, Any]:
        """What has been captured so far: size -> the outputs ``fn`` returned."""
        return {size: outputs for size, (_, outputs) in self._graphs.items()}

    def run(self, size: int, fn: Callable[[int], Any]) -> Any:
        """Outputs of ``fn`` at the padded size; without CUDA, or beyond the largest size, ``fn``
        runs as it is."""
        padded = padded_size(size, self.sizes)
        if padded is None:
            return fn(size)
        if self.device.type != "cuda":
            return fn(padded)
        if padded not in self._graphs:
            self._graphs[padded] = self._capture(padded, fn)
        graph, outputs = self._graphs[padded]
        graph.replay()
        return outputs

    def clear(self) -> None:
        """Give up all graphs. Those that hold NCCL's kernels must go before its communicator: its
        end waits for theirs."""
        self._graphs.clear()

    def _capture(self, padded: int, fn: Callable[[int], Any]) -> tuple[Any, Any]:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            fn(padded)  # warm up: compiles and allocates outside the graph
        torch.cuda.current_stream(self.device).wait_stream(stream)
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # other threads (NCCL's watchdog asks for events) must not spoil the capture
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            outputs = fn(padded)
        return graph, outputs

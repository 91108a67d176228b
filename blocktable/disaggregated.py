"""Prefill in one process, decode in another: ``blocktable serve --role prefill`` and ``decode``.

::

    decode                                           prefill
    request --> blocks of its own are taken
            ------- ask: tokens, salt ------------>  computes the prompt, holds its whole blocks
            <------ NIXL reads the memory =========
            keys are given to the blocks             blocks go back
    the request is queued: its prefix is cached

What arrives is put into the prefix cache like any computed prefix, and only once all of it is
there, so nothing of the scheduler changes. Whatever fails (no answer, a peer that dies, no free
blocks), the request is queued without it and computes its prompt here. Tokens of the last,
incomplete block are always computed here, so the text is the undivided server's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blocktable.core.errors import BlocktableError, ConfigError, OutOfBlocks
from blocktable.core.specs import FullAttentionSpec
from blocktable.core.types import BlockIds
from blocktable.engine.engine import Engine
from blocktable.engine.outputs import RequestOutput
from blocktable.engine.params import SamplingParams
from blocktable.transfer.fetch import BlockFetcher, Fetch
from blocktable.transfer.layout import CacheLayout
from blocktable.transfer.reader import NixlReader, Region
from blocktable.transfer.source import BlockSource

_IDLE_SECONDS = 0.002


def cache_layout(engine: Engine) -> CacheLayout:
    """An engine's cache for the handshake; ConfigError where it cannot be described."""
    layout = engine.layout
    specs = [group.kv_cache_spec for group in layout.groups] if layout is not None else []
    if layout is None or any(type(spec) is not FullAttentionSpec for spec in specs):
        raise ConfigError("only models with full attention in every layer can be split in two")
    if hasattr(engine.runner, "close_ranks"):
        raise ConfigError("splitting prefill from decode needs engines of one rank each")
    if engine.manager.index is None:
        raise ConfigError("splitting prefill from decode needs the prefix cache")
    spec: Any = specs[0]
    size_v = spec.head_size if spec.head_size_v is None else spec.head_size_v
    return CacheLayout(
        spec.dtype, layout.block_size, spec.num_kv_heads, 0, spec.num_kv_heads, spec.head_size,
        size_v, tuple(place.memory for place in layout.places),
        tuple(place.group for place in layout.places), layout.page_bytes,
    )  # fmt: skip


def _regions(engine: Engine) -> list[Region]:
    pages = engine.runner.memory.pages
    return [
        Region(page.data_ptr(), page.nbytes, page.device.index if page.is_cuda else None)
        for page in pages
    ]


def _reader(engine: Engine, role: str) -> NixlReader:
    return NixlReader(f"{role}-{os.getpid()}-{id(engine):x}", _regions(engine))


class PrefillWorker:
    """Computes prompts for decode processes and holds their blocks until they were read.

    ``endpoint`` is what ``--prefill`` of a decode server is given. One thread calls `step`.
    """

    def __init__(
        self, engine: Engine, endpoint: str = "tcp://127.0.0.1:*", *, lease_seconds: float = 60.0
    ) -> None:
        self._engine = engine
        self._layout = cache_layout(engine)
        self._reader = _reader(engine, "prefill")
        regions = _regions(engine)
        self.source = BlockSource(
            self._reader, self._layout, [r.address for r in regions], endpoint,
            lease_seconds=lease_seconds, device=regions[0].device, on_ask=self._asked,
        )  # fmt: skip
        self.endpoint = self.source.endpoint
        self._asked_for: dict[str, tuple[list[int], str | None]] = {}

    @property
    def num_held(self) -> int:
        """Requests whose blocks are held."""
        return self.source.num_held

    def _asked(self, request_id: str, fields: list[Any]) -> None:
        data, salt = fields
        tokens = np.frombuffer(data, "<i4").tolist()
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        self.source.expect(request_id)
        try:
            self._engine.add_request(request_id, tokens, params, streaming=False, salt=salt)
        except BlocktableError:  # the decode side will tell the client: it checks the same
            self.source.disappoint(request_id)
            return
        self._asked_for[request_id] = tokens, salt

    def step(self, wait: float = 0.0) -> None:
        """Answer peers and run one step of the engine; waits for a message when idle."""
        self.source.poll(0.0 if self._engine.has_unfinished else wait)
        if self._engine.has_unfinished:
            for output in self._engine.step():
                if output.finished:
                    self._offer(output.request_id)

    def _offer(self, request_id: str) -> None:
        tokens, salt = self._asked_for.pop(request_id)
        manager = self._engine.manager
        hit = manager.find_hit(manager.sequence(tokens, salt=salt))
        if not hit.num_tokens:
            self.source.disappoint(request_id)
            return
        held = np.concatenate(hit.blocks)
        manager.pool.touch(held)
        self.source.offer(
            request_id, hit.blocks, hit.num_tokens, lambda: manager.pool.release(held)
        )

    def close(self) -> None:
        """Give all blocks back and close."""
        self.source.close()
        self._reader.close()


@dataclass
class _Arriving:
    """A request that waits for its prefix."""

    request_id: str
    arguments: dict[str, Any]
    params: SamplingParams
    fetch: Fetch
    sequence: Any
    first_block: int
    own: list[BlockIds]  # taken for what arrives, one array a group
    hit: BlockIds  # touched meanwhile: cached blocks before them
    aborted: bool = False


class DecodeEngine:
    """An `Engine` that lets others compute its prompts; everything else is the engine's own.

    Prompts with fewer than ``least_blocks`` blocks to compute are computed here.
    """

    def __init__(
        self,
        engine: Engine,
        prefill: Sequence[str],
        *,
        timeout: float = 30.0,
        least_blocks: int = 1,
    ) -> None:
        if not prefill:
            raise ConfigError("a decode engine needs the endpoint of a prefill process")
        self._engine, self._endpoints = engine, list(prefill)
        self._least, self._turn = least_blocks, 0
        self._reader = _reader(engine, "decode")
        bases = [region.address for region in _regions(engine)]
        self.fetcher = BlockFetcher(self._reader, cache_layout(engine), bases, timeout=timeout)
        for endpoint in self._endpoints:
            self.fetcher.connect(endpoint)
        self._arriving: dict[str, _Arriving] = {}
        self._prefix = f"{os.getpid()}-{id(self):x}"
        self.fetched_tokens = 0
        self.failed_fetches = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def on_schedule(self) -> Any:
        """See `Engine`."""
        return self._engine.on_schedule

    @on_schedule.setter
    def on_schedule(self, watcher: Any) -> None:
        self._engine.on_schedule = watcher

    @property
    def has_unfinished(self) -> bool:
        """See `Engine.has_unfinished`; a request whose prefix is on its way counts."""
        return bool(self._arriving) or self._engine.has_unfinished

    def add_request(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams, **more: Any
    ) -> None:
        """See `Engine.add_request`. The prompt is asked for elsewhere first."""
        if request_id in self._arriving:
            self._engine.add_request(request_id, prompt, params, **more)  # raises: id in use
        tokens = self._engine.encode(prompt) if isinstance(prompt, str) else prompt
        arriving = self._ask(request_id, tokens, params, more)
        if arriving is None:
            self._engine.add_request(request_id, prompt, params, **more)
            return
        arriving.arguments["prompt"] = prompt
        self._arriving[request_id] = arriving

    def _ask(
        self, request_id: str, tokens: Any, params: SamplingParams, more: dict[str, Any]
    ) -> _Arriving | None:
        if params.prompt_logprobs is not None:
            return None  # its prompt must be computed where its scores are wanted
        manager = self._engine.manager
        try:
            sequence = manager.sequence(tokens, salt=more.get("salt"))
        except BlocktableError:
            return None  # the engine says what is wrong with it
        hit = manager.find_hit(sequence)
        size = self._engine.block_size
        first, last = hit.num_tokens // size, (len(sequence) - 1) // size
        groups = len(manager.groups)
        if last - first < self._least or len(sequence) >= self._engine.max_model_len:
            return None
        try:
            taken = manager.pool.take((last - first) * groups)
        except OutOfBlocks:
            return None
        touched = np.concatenate(hit.blocks) if first else taken[:0]
        if first:
            manager.pool.touch(touched)
        own = np.split(taken, groups)
        rows = [np.concatenate([hit.blocks[g][:first], own[g]]) for g in range(groups)]
        endpoint = self._endpoints[self._turn % len(self._endpoints)]
        self._turn += 1
        ask = [sequence.tokens.astype("<i4").tobytes(), more.get("salt")]
        fetch = self.fetcher.fetch(
            f"{self._prefix}-{self._turn}", [endpoint], rows, first_token=first * size,
            stop_token=last * size, ask=ask,
        )  # fmt: skip
        return _Arriving(request_id, dict(more), params, fetch, sequence, first, own, touched)

    def step(self) -> list[RequestOutput]:
        """See `Engine.step`. Prefixes that have arrived are put into the cache first."""
        self.fetcher.poll()
        for arriving in [a for a in self._arriving.values() if a.fetch.is_over]:
            self._arrived(arriving)
        if self._engine.has_unfinished:
            return self._engine.step()
        if self._arriving:
            self.fetcher.wait(_IDLE_SECONDS)
        return []

    def _arrived(self, arriving: _Arriving) -> None:
        """Key the blocks that came, let go of them all, and queue the request."""
        del self._arriving[arriving.request_id]
        manager, fetch = self._engine.manager, arriving.fetch
        if fetch.is_done:
            whole = min(fetch.num_tokens or 0, fetch.stop_token) // self._engine.block_size
            came = max(0, whole - arriving.first_block)
            for group, blocks in zip(manager.groups, arriving.own, strict=True):
                manager.import_blocks(
                    arriving.sequence, group.group_id, arriving.first_block, blocks[:came]
                )
            self.fetched_tokens += came * self._engine.block_size
        else:
            self.failed_fetches += 1
        for blocks in arriving.own:
            manager.pool.release(blocks[::-1])
        if len(arriving.hit):
            manager.pool.release(arriving.hit)
        if not arriving.aborted:
            prompt = arriving.arguments.pop("prompt")
            self._engine.add_request(
                arriving.request_id, prompt, arriving.params, **arriving.arguments
            )

    def abort(self, request_ids: Iterable[str]) -> None:
        """See `Engine.abort`. Blocks that are being written come back when that has ended."""
        here = []
        for request_id in request_ids:
            arriving = self._arriving.get(request_id)
            if arriving is None:
                here.append(request_id)
            else:
                arriving.aborted = True
                self.fetcher.abort(arriving.fetch)
        self._engine.abort(here)

    def close(self) -> None:
        """Give up what is on its way and close."""
        self.fetcher.close()
        self._reader.close()


def serve_prefill(
    engine: Engine, endpoint: str, is_stopped: Callable[[], bool], *, lease_seconds: float = 60.0,
    told: Callable[[str], None] = print,
) -> None:  # fmt: skip
    """Be a prefill process until ``is_stopped``; ``told`` gets the endpoint once it is open."""
    worker = PrefillWorker(engine, endpoint, lease_seconds=lease_seconds)
    told(f"prefill at {worker.endpoint}")
    try:
        while not is_stopped():
            worker.step(0.05)
    finally:
        worker.close()

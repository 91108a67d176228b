"""The engine in a thread of its own, seen from asyncio.

The engine is not thread-safe: everything that touches it runs in its thread, between two steps.
Handlers put jobs into an inbox; after each step the thread hands all new outputs to the event loop
in one call. A request's mailbox keeps the newest state only, so a client that reads slowly costs
no memory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from blocktable.core.errors import BlocktableError, RequestError
from blocktable.engine.engine import Engine
from blocktable.engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from blocktable.engine.params import SamplingParams
from blocktable.serve.errors import ApiError

_LOG = logging.getLogger("blocktable.serve")


Watcher: TypeAlias = Callable[[Engine, float, list[RequestOutput]], None]


class Part(NamedTuple):
    """One completion as of a step. ``token_ids`` and ``logprobs`` may have grown since: only the
    first ``num_tokens`` belong to ``text``."""

    index: int
    text: str
    num_tokens: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None


class Update(NamedTuple):
    """A request as of a step."""

    parts: tuple[Part, ...]
    finished: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    first_token: int  # of the prompt
    prompt_logprobs: list[TokenLogprobs | None] | None


def _part(output: CompletionOutput) -> Part:
    return Part(
        output.index, output.text, len(output.token_ids), output.token_ids, output.logprobs,
        output.finish_reason, output.stop_reason,
    )  # fmt: skip


def _update(output: RequestOutput) -> Update:
    parts = tuple(_part(completion) for completion in output.outputs)
    prompt = output.prompt_token_ids
    return Update(
        parts, output.finished, len(prompt), output.num_cached_tokens, prompt[0],
        output.prompt_logprobs,
    )  # fmt: skip


class Call:
    """The engine requests of one HTTP request, and the newest state of each."""

    def __init__(self, count: int, rows: int) -> None:
        self.latest: list[Update | None] = [None] * count
        self.rows = rows
        self.error: Exception | None = None
        self.renames: dict[str, str] = {}  # the client's words for fields in errors
        self.gone = False
        self._changed: set[int] = set()
        self._event = asyncio.Event()

    def put(self, place: int, update: Update) -> None:
        """Called in the event loop."""
        self.latest[place] = update
        self._changed.add(place)
        self._event.set()

    def fail(self, error: Exception) -> None:
        """End the call with an error; called in the event loop."""
        self.error = self.error or error
        self._event.set()

    def hang_up(self) -> None:
        """The client is gone."""
        self.gone = True
        self._event.set()

    @property
    def finished(self) -> bool:
        return all(update is not None and update.finished for update in self.latest)

    async def changes(self) -> list[tuple[int, Update]]:
        """Requests that changed since the last call, with their newest state; waits for one.

        Raises what the engine raised for one of the requests."""
        await self._event.wait()
        self._event.clear()
        if self.error is not None:
            raise self.error
        changed, self._changed = sorted(self._changed), set()
        return [(i, update) for i in changed if (update := self.latest[i]) is not None]


class EngineBridge:
    """Runs an engine and carries requests to it.

    Args:
        engine: touched by nobody else from now on.
        max_rows: completions that may run and wait.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_rows: int,
    ) -> None:
        self.engine, self.max_rows = engine, max_rows
        self._watchers: list[Watcher] = []
        self.rows = 0  # completions accepted and not finished
        self.failure: Exception | None = None
        self.mean_seconds = 1.0  # of a request, smoothed
        self._calls: dict[str, tuple[Call, int, float]] = {}
        self._inbox: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="blocktable-engine", daemon=True)
        self._count = 0

    def add_watcher(self, watcher: Watcher) -> None:
        """Call ``watcher(engine, seconds, outputs)`` in the engine's thread after every step."""
        self._watchers.append(watcher)

    # --- the event loop's side ---

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the engine's thread."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Abort what is left and end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=30)

    @property
    def alive(self) -> bool:
        """The thread runs and no step has failed."""
        return self.failure is None and self._thread.is_alive()

    def submit(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        salt: str | None = None,
        priority: int = 0,
        streaming: bool = True,
    ) -> Call:
        """Queue one engine request for each prompt.

        Raises ApiError 429 if the queue has no room for all of them, 503 if the engine failed.
        """
        if not self.alive:
            raise ApiError(503, f"the engine has stopped: {self.failure or 'shutting down'}")
        rows = len(prompts) * params.n
        if self.rows + rows > self.max_rows:
            wait = max(1, round(self.mean_seconds))
            raise ApiError(
                429, f"the server is full: {self.rows} completions run or wait, {rows} more were "
                f"asked for, the limit is {self.max_rows}",
                code="overloaded", headers={"Retry-After": str(wait)},
            )  # fmt: skip
        call = Call(len(prompts), rows)
        now = time.monotonic()
        for place, ids in enumerate(prompts):
            self._count += 1
            name = f"req-{self._count}"
            self._calls[name] = (call, place, now)
            self.rows += params.n
            self._put(
                lambda name=name, ids=ids: self._add(name, ids, params, salt, priority, streaming)
            )
        return call

    def cancel(self, call: Call) -> None:
        """Abort what is left of a call; its blocks are free before the next step but one."""
        names = [name for name, (owner, _, _) in self._calls.items() if owner is call]
        for name in names:
            self._forget(name)
        if names:
            self._put(lambda: self.engine.abort(names))

    async def ask(self, question: Callable[[Engine], Any]) -> Any:
        """The answer of a function that runs in the engine's thread between two steps."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def job() -> None:
            try:
                answer, error = question(self.engine), None
            except Exception as failure:
                answer, error = None, failure
            loop.call_soon_threadsafe(_settle, future, answer, error)

        if not self.alive:
            raise ApiError(503, f"the engine has stopped: {self.failure or 'shutting down'}")
        self._put(job)
        return await future

    def _put(self, job: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(job)
            self._wake.notify()

    def _forget(self, name: str) -> Call | None:
        found = self._calls.pop(name, None)
        if found is None:
            return None
        call, _, started = found
        self.rows -= call.rows // len(call.latest)
        self.mean_seconds += 0.1 * (time.monotonic() - started - self.mean_seconds)
        return call

    def _deliver(self, updates: list[tuple[str, Update]]) -> None:
        for name, update in updates:
            found = self._calls.get(name)
            if found is None:
                continue  # cancelled meanwhile
            failed = next((p for p in update.parts if p.finish_reason == "error"), None)
            if failed is not None:
                self._refuse(name, RequestError(str(failed.stop_reason)))
                continue
            found[0].put(found[1], update)
            if update.finished:
                self._forget(name)

    def _refuse(self, name: str, error: Exception) -> None:
        call = self._forget(name)
        if call is not None:
            call.fail(error)
            self.cancel(call)

    def _fail_all(self, error: Exception) -> None:
        for name in list(self._calls):
            call = self._forget(name)
            if call is not None:
                call.fail(ApiError(500, f"the engine failed: {error}"))

    # --- the engine's thread ---

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _add(
        self, name: str, ids: list[int], params: SamplingParams, salt: str | None, priority: int,
        streaming: bool,
    ) -> None:  # fmt: skip
        try:
            self.engine.add_request(
                name, ids, params, salt=salt, priority=priority, streaming=streaming
            )
        except BlocktableError as error:
            self._post(self._refuse, name, error)

    def _run(self) -> None:
        try:
            while self._take_jobs():
                if self.engine.has_unfinished:
                    self._step()
        except Exception as error:  # a step failed: nothing sensible can follow
            self.failure = error
            _LOG.exception("an engine step failed; the server must be restarted")
            self._post(self._fail_all, error)

    def _take_jobs(self) -> bool:
        """Run what is in the inbox; waits if there is nothing else to do. False at the end."""
        with self._wake:
            while not (self._inbox or self._stopping or self.engine.has_unfinished):
                self._wake.wait()
            jobs, self._inbox = self._inbox, []
        for job in jobs:
            job()
        return not self._stopping

    def _step(self) -> None:
        before = time.perf_counter()
        outputs = self.engine.step()
        seconds = time.perf_counter() - before
        for watcher in self._watchers:
            watcher(self.engine, seconds, outputs)
        if outputs:
            self._post(self._deliver, [(o.request_id, _update(o)) for o in outputs])


def _settle(future: asyncio.Future[Any], answer: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(answer)

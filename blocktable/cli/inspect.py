"""``blocktable inspect URL``: the inspector in a terminal."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from blocktable.cli.blockmap import PoolPicture, draw_map, legend, letter
from blocktable.core.errors import ConfigError

_FROM_CODE = np.array([1, 2, 3, 5, 4], np.uint8)  # free, cached, fenced, owned, shared
_REMEMBERED = 4000
_TIMEOUT = 15.0  # seconds; an idle server says something every five


class RemoteState:
    """The state of a server's pool, kept up to date by its stream of frames."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._base = url.rstrip("/").removesuffix("/inspect").removesuffix("/v1") + "/inspect"
        self._key = api_key
        self.lock = threading.Lock()
        self.problem: str | None = None
        self.notice = ""
        self.load()

    def load(self) -> None:
        """Read the whole state."""
        answer = self._open("state?history=1")
        try:
            with answer:
                state = json.load(answer)
            with self.lock:
                self._take(state)
        except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
            raise ConfigError(f"{self._base} is no inspector: {error!r:.200}") from None

    def _take(self, state: dict[str, Any]) -> None:
        self.model, self.block_size = state["model"], state["block_size"]
        self.codes = np.array(state["codes"], np.int32)
        self.requests = {r["number"]: r for r in state["requests"]}
        self.last: dict[str, Any] | None = state["frames"][-1] if state["frames"] else None
        self._since = state["sequence"]
        self.notice = (state["notice"] or {"text": ""})["text"]
        self.problem = None

    def _open(self, path: str) -> Any:
        try:
            request = urllib.request.Request(f"{self._base}/{path}")
            if self._key:
                request.add_header("Authorization", f"Bearer {self._key}")
            return urllib.request.urlopen(request, timeout=_TIMEOUT)
        except urllib.error.HTTPError as error:
            hint = ": give its key with --api-key" if error.code == 401 else ""
            raise ConfigError(f"cannot read {self._base}: {error}{hint}") from None
        except (ValueError, OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(f"cannot read {self._base}: {reason}") from None

    def follow(self) -> None:
        """Apply frames for ever; meant for a thread. Where the line breaks, or frames are missing,
        it begins anew: the server may be another one."""
        while True:
            try:
                self._follow_line()
                self.problem = "connection lost, trying again"
            except (ConfigError, OSError, ValueError, http.client.HTTPException) as error:
                self.problem = str(error)
            time.sleep(1.0)
            with contextlib.suppress(ConfigError):
                self.load()

    def _follow_line(self) -> None:
        with self._open(f"events?since={self._since}") as lines:
            for line in lines:
                told = json.loads(line[6:]) if line.startswith(b"data: ") else []
                if isinstance(told, dict):
                    self.notice, told = told["text"], []
                for frame in told:
                    if frame["n"] != self._since + 1:
                        self.load()
                        return
                    self.apply(frame)

    def apply(self, frame: dict[str, Any]) -> None:
        """Take one frame."""
        changes = np.array(frame["b"], np.int32).reshape(-1, 3)
        with self.lock:
            self.problem = None
            while len(changes) and changes[:, 0].max() >= len(self.codes):
                self.codes = np.concatenate([self.codes, np.zeros_like(self.codes)])
            self.codes[changes[:, 0]] = changes[:, 2]
            self.last, self._since = frame, frame["n"]
            for number, name, row, prompt, cached in frame["a"]:
                self.requests[number] = {
                    "number": number, "id": name, "row": row, "prompt": prompt, "cached": cached,
                    "reason": None,
                }  # fmt: skip
            for number, reason in frame["e"]:
                if number in self.requests:
                    self.requests[number]["reason"] = reason
            self._forget()

    def _forget(self) -> None:
        """Drop the oldest requests that ended, as the server does."""
        if len(self.requests) > 1.1 * _REMEMBERED:
            ended = [n for n, r in self.requests.items() if r["reason"] is not None]
            for number in ended[: len(self.requests) - _REMEMBERED]:
                del self.requests[number]

    def own_blocks(self) -> dict[int, int]:
        """Blocks that each request holds alone."""
        owners, counts = np.unique(self.codes[self.codes & 7 == 3] >> 11, return_counts=True)
        return dict(zip(owners.tolist(), counts.tolist(), strict=True))

    def picture(self) -> PoolPicture:
        """The pool as the map draws it."""
        kind = _FROM_CODE[self.codes & 7]
        kind[0] = 0
        return PoolPicture(kind, np.where(kind == 5, (self.codes >> 11) - 1, -1).astype(np.int32))


def inspect(url: str, api_key: str | None = None, once: bool = False) -> None:
    """Show a server's pool until Ctrl-C; ``once`` prints it and returns. ConfigError if the
    address does not answer."""
    if "://" not in url:
        url = f"http://{url}"
    state = RemoteState(url, api_key or os.environ.get("BLOCKTABLE_API_KEY"))
    console = Console()
    if once or not console.is_terminal:
        console.print(view(state, console.width, console.height or 40))
        return
    threading.Thread(target=state.follow, daemon=True).start()
    with Live(console=console, refresh_per_second=8, screen=True) as live:
        while True:
            with state.lock:
                live.update(view(state, console.width, console.height))
            time.sleep(0.15)


def view(state: RemoteState, width: int, height: int) -> RenderableType:
    """One screen: numbers, map, requests."""
    picture = state.picture()
    head = _numbers(state)
    pool_map = draw_map(picture, max(16, width - 6), max(4, height // 3))
    signs = legend(picture)
    taken = _lines(head, width) + _lines(pool_map, width - 4) + _lines(signs, width - 4) + 2
    table = _requests(state, max(3, height - taken - 2))
    pool = Panel(Group(pool_map, signs), title="block pool", title_align="left",
                 subtitle="Ctrl-C leaves", subtitle_align="right")  # fmt: skip
    return Group(head, pool, table)


def _lines(text: Text, width: int) -> int:
    """Lines that a text takes, about."""
    return sum(max(1, -(-len(line) // max(width, 1))) for line in text.plain.split("\n"))


def _numbers(state: RemoteState) -> Text:
    head = Text(f"{state.model}, {len(state.codes) - 1:,} blocks of {state.block_size} tokens")
    if state.last is not None:
        used, _, _, _, running, waiting = state.last["c"][:6]
        took = state.last["d"] / max(state.last["k"], 1) * 1000
        head.append(
            f"   step {state.last['s']:,}   running {running}   waiting {waiting}   "
            f"held {used:,}   step time {took:.1f} ms"
        )
    if state.problem or state.notice:
        head.append(f"   {state.problem or state.notice}", style="red")
    return head


def _requests(state: RemoteState, most: int) -> Table:
    """The requests, those that run first, each with its sign in the map."""
    table = Table(expand=True, box=None)
    for name in ("", "request", "row", "own blocks", "prompt", "hit", "state"):
        table.add_column(name, no_wrap=True, width=1 if not name else None)
    own = state.own_blocks()
    shown = sorted(state.requests.values(), key=lambda r: (r["reason"] is not None, -r["number"]))
    for r in shown[:most]:
        share = f"{r['cached']} ({100 * r['cached'] // max(r['prompt'], 1)}%)"
        ended = r["reason"] is not None
        sign, colour = letter(r["number"] - 1)
        table.add_row(
            "" if ended else Text(sign, style=colour), r["id"], "" if ended else str(r["row"]),
            "" if ended else str(own.get(r["number"], 0)), str(r["prompt"]), share,
            r["reason"] or "running", style="dim" if ended else "",
        )  # fmt: skip
    return table

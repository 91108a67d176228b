"""The road step messages take: driver to every rank, and each rank's word back, over ZeroMQ.

It is apart from the collectives of the model, so that a rank that hangs in one of those is still
found out. An acknowledgement is 56 bytes and an optional text:

    "BTAK" | version u8 | state u8 (0 done, 1 hello, 2 failed, 3 here, 4 lost) | rank u16 |
    sequence u32 | text bytes u32 | step u64 | table digest u64 | map digest u64 |
    blocks available u64 | text (utf-8) | XXH3-64 of all before

Nothing is executed and no type is named. The default endpoint is on the local machine; across
machines bind one on a private network, for the messages are checked but not encrypted.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import xxhash
import zmq

from blocktable.core.errors import RankError, WireError

DONE, HELLO, FAILED, HERE, LOST = range(5)
# LOST: a rank that others left alone in a collective, which is not the rank to name
_ACK = struct.Struct("<4sBBHIIQQQQ")
_ACK_MAGIC, _ACK_VERSION = b"BTAK", 1
_LONGEST_TEXT = 4096
_POLL_SECONDS = 0.05
_ROLL_SECONDS, _WATCH_SECONDS = 2.0, 2e-5
STOP, CALL = b"BTSTOP", b"BTCALL"


class Ack(NamedTuple):
    """A rank's word about one message."""

    state: int
    rank: int
    sequence: int
    step: int
    digest: int
    map_digest: int
    available: int
    text: str = ""


def encode_ack(ack: Ack) -> bytes:
    """Bytes of an acknowledgement."""
    text = ack.text.encode()[:_LONGEST_TEXT]
    head = _ACK.pack(
        _ACK_MAGIC, _ACK_VERSION, ack.state, ack.rank, ack.sequence & 0xFFFFFFFF, len(text),
        ack.step, ack.digest, ack.map_digest, ack.available,
    )  # fmt: skip
    return head + text + xxhash.xxh3_64_digest(head + text)


def decode_ack(data: bytes) -> Ack:
    """The acknowledgement in ``data``; WireError when there is none."""
    if len(data) < _ACK.size + 8 or data[:4] != _ACK_MAGIC or data[4] != _ACK_VERSION:
        raise WireError(f"not an acknowledgement: {len(data)} bytes that begin with {data[:5]!r}")
    if xxhash.xxh3_64_digest(data[:-8]) != data[-8:]:
        raise WireError("a corrupted acknowledgement: its checksum does not match")
    _, _, state, rank, sequence, size, step, digest, own, available = _ACK.unpack_from(data)
    if len(data) != _ACK.size + size + 8 or state > LOST:
        raise WireError(f"an acknowledgement of {len(data)} bytes with {size} bytes of text")
    text = data[_ACK.size : -8].decode(errors="replace")
    return Ack(state, rank, sequence, step, digest, own, available, text)


class DriverChannel:
    """The driver's end. ``timeout`` is how long a rank may stay silent when its word is due.

    ``is_alive`` tells of a rank whether its process lives (where the driver can know): a death is
    then reported at once and not after the time-out.
    """

    def __init__(
        self,
        world_size: int,
        endpoint: str = "tcp://127.0.0.1:*",
        *,
        timeout: float = 30.0,
        is_alive: Callable[[int], bool] | None = None,
    ) -> None:
        self._ranks = range(1, world_size)
        self._timeout, self._is_alive = timeout, is_alive
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._heard: dict[int, Ack] = {}
        self._here: set[int] = set()
        self._lost: dict[int, str] = {}  # what ranks said whose collective failed

    def wait_for_ranks(self) -> None:
        """Return once every rank has said hello; RankError names those that have not."""
        self._collect(lambda ack: True, "did not join", step=None)

    def publish(self, data: bytes) -> None:
        """Send a message to every rank. Does not block. RankError once the channel is closed."""
        if self._socket.closed:
            raise RankError("this engine was closed: its other ranks have ended")
        for rank in self._ranks:
            self._socket.send_multipart([_identity(rank), data])

    def confirm(self, sequence: int, step: int, digest: int) -> list[Ack]:
        """Return when every rank has taken message ``sequence``.

        Raises RankError that names the rank and the step: what a rank itself reported, a digest
        that differs, a dead process, or silence for the time-out.
        """
        wanted = sequence & 0xFFFFFFFF
        acks = self._collect(
            lambda ack: ack.state == DONE and ack.sequence == wanted, "did not confirm", step
        )
        for ack in acks:
            if ack.digest != digest:
                raise RankError(
                    f"rank {ack.rank} diverged at step {step}: digest {ack.digest:#018x}, "
                    f"the driver's {digest:#018x}"
                )
        return acks

    def check(self, step: int) -> None:
        """Raise RankError if a rank has reported a failure or died; does not wait."""
        while self._socket.poll(0):
            self._receive(step)
        self._find_dead(step)

    def blame(self, step: int) -> None:
        """After a collective failed here too: RankError that names the ranks which have not said
        the same, if there are any."""
        silent = [rank for rank in self._ranks if rank not in self._lost]
        if silent:
            names = ", ".join(map(str, silent))
            raise RankError(f"rank {names} left step {step}: a collective failed on all others")

    def watch(self, step: int, is_done: Callable[[], bool]) -> None:
        """Return when ``is_done``, which asks a device for the end of a step that all ranks have
        taken. Raises RankError after the time-out, naming the ranks that then do not answer, or at
        once where a rank's process died."""
        deadline, asked = time.monotonic() + self._timeout, time.monotonic()
        while not is_done():
            now = time.monotonic()
            if now > asked + _POLL_SECONDS:
                self.check(step)
                asked = now
            if now > deadline:
                self._call_roll(step)
            time.sleep(_WATCH_SECONDS)

    def _call_roll(self, step: int) -> NoReturn:
        """RankError that names the ranks which give no word when asked for one."""
        self._here.clear()
        self.publish(CALL)
        deadline = time.monotonic() + _ROLL_SECONDS
        while len(self._here) < len(self._ranks) and time.monotonic() < deadline:
            if self._socket.poll(int(_POLL_SECONDS * 1000)):
                self._receive(step)
        silent = ", ".join(str(rank) for rank in self._ranks if rank not in self._here)
        who = f"rank {silent} is silent" if silent else "all ranks answer"
        raise RankError(f"step {step} did not end within {self._timeout:g} s: {who}")

    def _collect(self, due: Callable[[Ack], bool], fault: str, step: int | None) -> list[Ack]:
        deadline = time.monotonic() + self._timeout
        while True:
            missing = [r for r in self._ranks if r not in self._heard or not due(self._heard[r])]
            if missing and self._lost.keys() >= set(missing):
                raise RankError(self._lost[missing[0]])
            if not missing:
                return [self._heard[rank] for rank in self._ranks]
            if self._socket.poll(int(_POLL_SECONDS * 1000)):
                self._receive(step)
                continue
            self._find_dead(step)
            if time.monotonic() > deadline:
                at = "" if step is None else f" step {step}"
                names = ", ".join(str(rank) for rank in missing if rank not in self._lost)
                raise RankError(f"rank {names} {fault}{at} within {self._timeout:g} s")

    def _receive(self, step: int | None) -> None:
        frames = self._socket.recv_multipart()
        try:
            ack = decode_ack(frames[-1])
        except WireError as error:
            raise RankError(
                f"peer {frames[0]!r} sent what is no acknowledgement: {error}"
            ) from error
        if ack.state == FAILED:
            raise RankError(ack.text or f"rank {ack.rank} failed at step {ack.step}")
        if ack.state == LOST:
            self._lost[ack.rank] = ack.text
            return
        if ack.state == HERE:
            self._here.add(ack.rank)
            return
        known = self._heard.get(ack.rank)
        if known is None or ack.state == DONE:
            self._heard[ack.rank] = ack

    def _find_dead(self, step: int | None) -> None:
        if self._is_alive is None:
            return
        dead = [rank for rank in self._ranks if not self._is_alive(rank)]
        if not dead:
            return
        while self._socket.poll(int(_POLL_SECONDS * 1000)):  # their last words
            self._receive(step)
        names = ", ".join(str(rank) for rank in dead if rank not in self._lost)
        if names:
            raise RankError(
                f"rank {names} died {'at start-up' if step is None else f'at step {step}'}"
            )

    def close(self) -> None:
        """Tell the ranks to stop and close; idempotent."""
        if not self._socket.closed:
            self._socket.linger = 200
            self.publish(STOP)
            self._socket.close()


class RankChannel:
    """A rank's end."""

    def __init__(self, rank: int, endpoint: str) -> None:
        self.rank = rank
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 500
        self._socket.setsockopt(zmq.IDENTITY, _identity(rank))
        self._socket.connect(endpoint)
        self.send(Ack(HELLO, rank, 0, 0, 0, 0, 0))

    def receive(
        self, is_driver_alive: Callable[[], bool], timeout: float | None = None
    ) -> bytes | None:
        """The next message, or None when the driver has stopped. Waits while the driver lives;
        RankError when it does not, or after ``timeout`` seconds of silence."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            while not self._socket.poll(1000 if timeout is None else 100):
                if not is_driver_alive():
                    raise RankError(f"rank {self.rank}: the driver is gone")
                if deadline is not None and time.monotonic() > deadline:
                    raise RankError(f"rank {self.rank}: no message for {timeout:g} s")
            data = self._socket.recv()
            if data != CALL:
                return None if data == STOP else data
            self.send(Ack(HERE, self.rank, 0, 0, 0, 0, 0))

    def send(self, ack: Ack) -> None:
        """Send an acknowledgement; RankError when the driver is gone. Does not block."""
        try:
            self._socket.send(encode_ack(ack), zmq.NOBLOCK)
        except zmq.Again as error:
            raise RankError(f"rank {self.rank}: the driver is gone") from error

    def close(self) -> None:
        """Close; idempotent."""
        self._socket.close()


def _identity(rank: int) -> bytes:
    return b"rank" + rank.to_bytes(4, "big")


def world_is_alive(processes: Sequence[object]) -> Callable[[int], bool]:
    """An ``is_alive`` for `DriverChannel` from multiprocessing processes of ranks 1, 2, ..."""

    def is_alive(rank: int) -> bool:
        return bool(getattr(processes[rank - 1], "is_alive", lambda: True)())

    return is_alive

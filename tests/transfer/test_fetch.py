"""A fetch from beginning to end, and every way in which it can go wrong, with blocks counted."""

import threading
import time

import msgspec
import numpy as np
import pytest
import zmq
from caches import Cache, copy_runs, layout, value

from blocktable.core.errors import TransferError
from blocktable.transfer.fetch import BlockFetcher
from blocktable.transfer.source import BlockSource


class MemoryReader:
    """Reads in one process. ``mode``: "now", "never" (until cancelled), "fail"; ``stubborn``: a
    cancel takes effect only later."""

    def __init__(self):
        self.mode, self.stubborn, self.cancelled = "now", False, 0

    def metadata(self):
        return b"meta"

    def add_peer(self, metadata):
        return "peer"

    def start(self, peer, device, runs):
        if self.mode == "refuse":
            raise TransferError("no route")
        if self.mode == "now":
            copy_runs(runs)
        return self.mode

    def state(self, handle):
        return {"now": "done", "never": "busy", "fail": "failed"}[handle]

    def cancel(self, handle):
        self.cancelled += 1
        return not self.stubborn

    def close(self):
        pass


class Setup:
    def __init__(self, *, target=None, sources=None, **options):
        self.now = 0.0
        self.target = Cache(target or layout(), 65)
        self.reader = MemoryReader()
        self.fetcher = BlockFetcher(
            self.reader, self.target.layout, self.target.bases, timeout=5, clock=self.clock
        )
        self.caches = [Cache(made, 65) for made in sources or [layout()]]
        self.sources = [
            BlockSource(MemoryReader(), c.layout, c.bases, lease_seconds=60, clock=self.clock)
            for c in self.caches
        ]
        self.released = []
        self.free = 64

    def clock(self):
        return self.now

    def close(self):
        self.fetcher.close()
        for source in self.sources:
            source.close()

    @property
    def endpoints(self):
        return [source.endpoint for source in self.sources]

    def connect(self):
        stop = threading.Event()

        def serve():
            while not stop.is_set():
                for source in self.sources:
                    source.poll(0.01)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            for endpoint in self.endpoints:
                self.fetcher.connect(endpoint)
        finally:
            stop.set()
            thread.join()

    def offer(self, name="r", num_tokens=50, base=5):
        for cache, source in zip(self.caches, self.sources, strict=True):
            count = -(-num_tokens // cache.layout.block_size)
            rows = [np.arange(base, base + count, dtype=np.int32)]
            cache.fill_request(rows, num_tokens)
            source.offer(name, rows, num_tokens, lambda: self.released.append(name))

    def begin(self, name="r", count=10):
        """Ten blocks of the target's 64 wait for the load."""
        self.rows = [np.arange(64, 64 - count, -1, dtype=np.int32)]
        self.free -= count
        return self.fetcher.fetch(name, self.endpoints, self.rows)

    def turn(self, times=4):
        """Some turns of both loops, for what must not happen in them."""
        for _ in range(times):
            time.sleep(0.005)
            for source in self.sources:
                source.poll()
            for fetch in self.fetcher.poll():
                self.free += len(fetch.rows[0])

    def until(self, condition):
        """Turns until the condition holds: how many a message takes is the machine's affair."""
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, "it did not come to that within 30 s"
            self.turn(1)

    def arrived(self, num_tokens=50):
        return all(
            np.array_equal(vector, np.float32(value(*args, len(vector))))
            for args, vector in self.target.vectors(self.rows, num_tokens)
        )


@pytest.fixture
def setup():
    made = []

    def make(**options):
        made.append(Setup(**options))
        made[-1].connect()
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_fetch(setup):
    s = setup()
    s.offer()
    fetch = s.begin()
    assert not fetch.is_over and s.free == 54
    s.until(lambda: fetch.is_over)
    assert fetch.is_done and fetch.num_tokens == 50 and s.arrived()
    assert s.released == ["r"] and s.sources[0].num_held == 0
    assert fetch.num_bytes == 50 * 2 * 2 * 4 * 8 * 4


def test_two_sources_with_half_the_heads_and_other_blocks_each(setup):
    s = setup(sources=[layout(8, (0, 2), "THD"), layout(32, (2, 4))])
    s.offer()
    fetch = s.begin()
    s.until(lambda: fetch.is_over)
    assert fetch.is_done and s.arrived() and len(fetch.parts) == 2


def test_a_rank_reads_only_from_the_sources_that_hold_its_heads(setup):
    s = setup(target=layout(16, (2, 4)), sources=[layout(16, (0, 2)), layout(16, (2, 4)), layout()])
    s.offer()
    fetch = s.begin()
    assert [part.peer.endpoint for part in fetch.parts] == [s.endpoints[1]]
    s.until(lambda: fetch.is_over)
    assert fetch.is_done and s.arrived()


def test_heads_nobody_holds(setup):
    s = setup(sources=[layout(16, (0, 2))])
    with pytest.raises(TransferError, match=r"no source holds KV heads \[2, 3\]"):
        s.begin()


def test_a_layout_that_cannot_be_converted_is_refused_at_the_handshake():
    s = Setup(sources=[layout(dtype="float16")])
    with pytest.raises(TransferError, match="dtype is float16 at the source"):
        s.connect()
    s.close()


def test_aborts_in_either_order_leak_nothing(setup):
    """10 of 64 blocks wait; they come back once, when the load is known to be over; 20 times."""
    s = setup()
    for number in range(20):
        kind = ("before", "during", "after")[number % 3]
        s.reader.mode = "never" if kind == "during" else "now"
        s.offer(f"r{number}")
        fetch = s.begin(f"r{number}")
        assert s.free == 54
        if kind == "during":
            s.until(lambda: fetch.parts[0].state == "reading")  # noqa: B023
        elif kind == "after":
            s.until(lambda: fetch.is_over)  # noqa: B023
        s.fetcher.abort(fetch)
        s.until(lambda: fetch.is_over and len(s.released) == number + 1)  # noqa: B023
        s.turn(1)
        assert s.free == 64
        assert s.sources[0].num_held == 0 and len(s.released) == number + 1


def test_blocks_stay_held_until_a_cancelled_read_has_ended(setup):
    s = setup()
    s.reader.mode, s.reader.stubborn = "never", True
    s.offer()
    fetch = s.begin()
    s.until(lambda: fetch.parts[0].state == "reading")
    s.fetcher.abort(fetch)
    s.turn()
    assert not fetch.is_over and s.free == 54 and s.sources[0].num_held == 1
    s.reader.stubborn = False
    s.until(lambda: fetch.is_over and s.released)
    assert fetch.is_over and not fetch.is_done and s.free == 64 and s.released == ["r"]


@pytest.mark.parametrize("mode", ["fail", "refuse"])
def test_a_failed_read(setup, mode):
    s = setup()
    s.reader.mode = mode
    s.offer()
    fetch = s.begin()
    s.until(lambda: fetch.is_over and s.released)
    assert not fetch.is_done and s.free == 64 and s.released == ["r"]
    assert ("failed" if mode == "fail" else "no route") in fetch.error


def test_a_request_nobody_offers(setup):
    s = setup()
    fetch = s.begin("other")
    s.until(lambda: fetch.is_over)
    assert fetch.is_over and "does not hold it" in fetch.error and s.free == 64


def test_a_source_that_never_answers_and_then_does(setup):
    s = setup()
    s.offer()
    fetch = s.begin()
    s.fetcher.poll()
    s.now = 5.1  # the source has not been polled: it has not answered
    s.free += sum(len(f.rows[0]) for f in s.fetcher.poll())
    assert fetch.is_over and "within 5 s" in fetch.error and s.free == 64
    # the late answer changes nothing here, and the source gets its blocks back
    s.until(lambda: s.released)
    assert s.free == 64 and s.released == ["r"] and not s.arrived()


def test_a_lease_that_ended_before_the_confirmation_is_no_success(setup):
    """The source gave the blocks away while they were read: what was read is not used."""
    s = setup()
    s.offer()
    fetch = s.begin()
    s.until(lambda: fetch.parts[0].state == "confirming")  # held, and read at once
    s.now = 4.0
    assert s.sources[0].withdraw("r")
    s.until(lambda: fetch.is_over)
    assert fetch.is_over and not fetch.is_done and "let it go" in fetch.error
    assert s.released == ["r"]


def test_offers_nobody_takes_end_with_their_lease(setup):
    s = setup()
    s.offer()
    s.now = 59.0
    s.sources[0].poll()
    assert s.sources[0].num_held == 1
    s.now = 60.0
    s.sources[0].poll()
    assert s.sources[0].num_held == 0 and s.released == ["r"]
    assert not s.sources[0].withdraw("r") and s.released == ["r"]


def test_offering_twice_is_refused(setup):
    s = setup()
    s.offer()
    with pytest.raises(TransferError, match="offered already"):
        s.offer()


def test_foreign_messages_do_not_disturb_a_source(setup):
    s = setup()
    s.offer()
    with zmq.Context.instance().socket(zmq.DEALER) as stranger:
        stranger.connect(s.endpoints[0])
        for data in (b"\xc1", b"GET /", msgspec.msgpack.encode(["take"]),
                     msgspec.msgpack.encode(["confirm", 1, [1]]),
                     msgspec.msgpack.encode(["fly", 1])):  # fmt: skip
            stranger.send(data)
            s.until(lambda: stranger.poll(0))
            assert msgspec.msgpack.decode(stranger.recv())[0] in ("refused", "gone")
    fetch = s.begin()
    s.until(lambda: fetch.is_over)
    assert fetch.is_done

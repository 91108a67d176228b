"""The page over another engine's events: what is shown is what the events say, gaps included."""

import io
import threading
import time

import httpx
import numpy as np
from rich.console import Console
from serving import run_app

from blocktable.cli.inspect import RemoteState, view
from blocktable.parallel.event_stream import EventPublisher, EventSubscriber, Received
from blocktable.parallel.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from blocktable.serve.attach import build_attached
from blocktable.serve.attached import AttachedSource, Follower


def stored(hashes, parent=None, size=2):
    tokens = list(range(size * len(hashes)))
    return BlockStored(hashes, parent, tokens, size, None, "GPU", None)


def batch(*events, **more):
    return Received(0, EventBatch(1.0, list(events)), **more)


def cached(source):
    return np.flatnonzero(source.codes).tolist()


def test_blocks_come_and_go_and_copies_are_counted():
    source = AttachedSource(2**20, num_blocks=4)
    source.apply(batch(stored([11, 12])))
    source.apply(batch(stored([13, 14], parent=12), stored([12], parent=11)))
    assert cached(source) == [1, 2, 3, 4, 5]
    assert source.num_blocks == 8
    assert source.place[:6].tolist() == [-1, 0, 1, 2, 3, 1]
    assert source.block(4)["tokens"] == [2, 3]
    source.apply(batch(BlockRemoved([12], "GPU"), BlockRemoved([99], "GPU")))
    assert cached(source) == [1, 2, 3, 4]  # one of the two copies
    source.apply(batch(BlockRemoved([12], "GPU")))
    assert cached(source) == [1, 3, 4]
    source.apply(batch(AllBlocksCleared()))
    assert cached(source) == []
    codes = np.zeros(8, np.int32)
    for frame in source.ring.since(0):
        assert np.array_equal(codes[frame.blocks], frame.old)
        codes[frame.blocks] = frame.new
    assert not codes.any()


def test_a_gap_forgets_what_was_known_and_is_told():
    source = AttachedSource(2**20)
    source.apply(batch(stored([1, 2, 3])))
    source.apply(batch(stored([4]), missed=7))
    assert len(cached(source)) == 1
    assert source.snapshot()["missed"] == 7
    assert source.ring.since(0)[-1].as_json()["m"] == 7


def test_what_whoever_looks_must_know():
    """Silence, what cannot be read, gaps and restarts are told, and no longer than they hold."""
    source = AttachedSource(2**20, endpoint="tcp://there:5557")
    assert source.notice["text"].startswith("no events yet from tcp://there:5557")
    source.problem = "a batch of an unknown kind"
    assert "cannot be read: a batch of an unknown kind" in source.notice["text"]
    source.apply(batch(stored([1])))
    assert source.notice == {"text": "", "time": None}
    source.apply(batch(stored([2]), missed=7))
    assert source.notice["text"].startswith("7 batches of events were lost; all before")
    source.apply(batch(stored([3]), restarted=True))
    assert (
        "7 batches of events were lost and the publisher began anew once" in source.notice["text"]
    )
    assert abs(source.notice["time"] - time.time()) < 60
    assert len(cached(source)) == 1


def test_a_notice_reaches_the_page_and_the_terminal():
    source = AttachedSource(2**20, endpoint="tcp://there:5557")
    silent = EventSubscriber("tcp://127.0.0.1:9")
    with run_app(build_attached(source, Follower(source, silent), "events")) as url:
        state = RemoteState(url, None)
        assert "no events yet" in state.notice
        console = Console(width=200, file=io.StringIO())
        console.print(view(state, 200, 30))
        assert "no events yet from tcp://there:5557" in console.file.getvalue()
        threading.Thread(target=state.follow, daemon=True).start()
        for missed, word in ((0, ""), (3, "3 batches of events were lost")):
            source.apply(batch(stored([missed + 1]), missed=missed))
            deadline = time.monotonic() + 10
            while not state.notice.startswith(word) or bool(state.notice) != bool(word):
                assert time.monotonic() < deadline, state.notice
                time.sleep(0.02)
        with state.lock:
            assert np.array_equal(state.codes, source.codes)


def test_the_page_follows_a_publisher_and_fills_gaps_from_its_buffer():
    publisher = EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    publisher.publish(EventBatch(1.0, [stored([1, 2])]))  # before anybody listens
    subscriber = EventSubscriber(publisher.endpoint, publisher.replay_endpoint, first_sequence=0)
    source = AttachedSource(2**20)
    app = build_attached(source, Follower(source, subscriber), "events")
    with run_app(app) as url, httpx.Client(base_url=url) as http:
        for i in range(100):
            publisher.publish(EventBatch(2.0, [stored([100 + i], parent=2)]))
            time.sleep(0.02)
            if source.batches > 3:
                break
        state = http.get("/inspect/state").json()
        assert sum(code != 0 for code in state["codes"]) >= 5
        assert state["missed"] == 0
        tree = http.get("/inspect/tree").json()
        assert tree[0]["blocks"] == 2 and tree[0]["children"] >= 3
        assert http.get("/inspect").status_code == 200
    publisher.close()

"""KV events: the bytes vLLM's classes give, sockets, gaps, replay, restarts, and foreign frames."""

import importlib.util
import json
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from blocktable.core.errors import ConfigError, WireError
from blocktable.core.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from blocktable.manager import KVCacheManager
from blocktable.parallel import connecting, events
from blocktable.parallel.event_stream import (
    EventPublisher,
    EventSubscriber,
    binds,
    endpoint_of_rank,
)
from blocktable.prefix.keys import KeySource, MediaItem

HERE = Path(__file__).parent
SPEC = importlib.util.spec_from_file_location("recorded", HERE / "make_recorded_frames.py")
recorded = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(recorded)
FRAMES = [bytes.fromhex(line) for line in json.loads((HERE / "recorded_frames.json").read_text())]


def test_bytes_equal_the_recorded_frames():
    assert [bytes.fromhex(f) for f in recorded.frames(events, events.EventBatch)] == FRAMES


def test_recorded_frames_decode_and_encode_unchanged():
    for payload in FRAMES:
        assert events.encode_batch(events.decode_batch(payload)) == payload


def test_the_peers_own_decoder_reads_ours_where_it_is_installed():
    """Without the peer the recorded frames, which it wrote, stand for it."""
    peer = recorded.load_peer()
    decode = events.decode_batch
    if peer is not None:
        decode = msgspec.msgpack.Decoder(peer.KVEventBatch).decode
    recorder = events.EventRecorder(config(2))
    keys = np.random.default_rng(0).integers(0, 256, (3, 32)).astype(np.uint8)
    recorder.stored(told(1, [0, 1, 2], keys, np.roll(keys, 1, axis=0), np.ones((3, 8), int)))
    recorder.removed(SimpleNamespace(groups=np.array([1]), keys=keys[:1]))
    recorder.cleared()
    batch = decode(events.encode_batch(recorder.take(2.0)))
    stored, removed, cleared = batch.events
    assert stored.block_hashes == [int.from_bytes(k.tobytes(), "big") % 2**64 for k in keys]
    assert (stored.parent_block_hash, stored.block_size, stored.group_idx) == (None, 8, 1)
    assert stored.kv_cache_spec_kind == "sliding_window"
    assert stored.kv_cache_spec_sliding_window == 40
    assert removed.block_hashes == stored.block_hashes[:1] and removed.group_idx == 1
    assert type(cleared).__name__ == "AllBlocksCleared"


EXTRA_KEYS = [  # what vLLM 0.25.1 gives for `recorded.SOURCES`
    [None, None, None, None],
    [("sql",), ("sql",), ("sql",), ("sql",)],
    [("s",), None, None, None],
    [("sql", ("img", 2), "s"), ("sql", ("img", -2), ("pic", 1)), ("sql", ("pic", -3)), ("sql",)],
    [None, (("a", 0),), (("b", 0), ("c", 1)), None],
    [(("all", 0),), (("all", -4),), (("all", -8),), (("all", -12),)],
]


def test_extra_keys_are_the_peers():
    """Recorded, and asked again where the peer is installed."""
    generate = recorded.load_extra_keys()
    if generate is not None:
        assert recorded.extra_keys(generate) == EXTRA_KEYS
    for (adapter, salt, media), expected in zip(recorded.SOURCES, EXTRA_KEYS, strict=True):
        source = KeySource(adapter, salt, tuple(MediaItem(*item) for item in media))
        assert [source.of_block(at, at + 4) for at in range(0, 16, 4)] == expected


def test_events_say_what_keys_depend_on_through_the_whole_cache():
    """Adapter, salt and media of rows that are admitted, grow, fork and move."""
    recorder = events.EventRecorder(config(1))
    manager = KVCacheManager(config(1), max_num_rows=4, max_model_len=36, seed=0, sink=recorder)
    media = [MediaItem(2, 5, b"\x01\x02")]
    sequence = manager.sequence(np.arange(3, 13), salt="s", adapter="sql", media=media)
    manager.admit(1, manager.find_hit(sequence), 10)
    manager.append_tokens(np.array([1]), np.array([20]))
    manager.allocate(np.array([1]), np.array([1]))
    manager.append_tokens(np.array([1]), np.array([21]))
    manager.allocate(np.array([1]), np.array([1]))
    told = [e for e in recorder.take(0.0).events if isinstance(e, events.BlockStored)]
    assert [e.lora_name for e in told] == ["sql", "sql"]
    first = [("sql", (b"\x01\x02", 2), "s"), ("sql", (b"\x01\x02", -2))]
    assert [e.extra_keys for e in told] == [first, [("sql",)]]
    manager.release(np.array([1]))
    plain = manager.sequence(np.arange(30, 40))
    manager.admit(1, manager.find_hit(plain), 10)
    (stored,) = recorder.take(0.0).events
    assert (stored.lora_name, stored.extra_keys) == (None, [None, None])


def told(group, columns, keys, parents, tokens, sources=()):
    return SimpleNamespace(
        group=group, columns=np.array(columns), keys=keys, parents=parents, tokens=tokens,
        sources=sources,
    )  # fmt: skip


def config(groups: int) -> KVCacheConfig:
    heads = {"num_kv_heads": 1, "head_size": 8}
    specs = [
        FullAttentionSpec(block_size=4, **heads),
        SlidingWindowSpec(block_size=8, sliding_window=40, **heads),
        MambaSpec(block_size=16, shapes=((4,),), dtypes=("float32",)),
    ]
    named = [KVCacheGroupSpec((f"layer{i}",), spec) for i, spec in enumerate(specs[:groups])]
    return KVCacheConfig(10, tuple(named))


def test_recorder_joins_chains_and_only_chains():
    recorder = events.EventRecorder(config(1), hash_form="bytes", medium=None)
    keys = np.arange(5 * 32).reshape(5, 32).astype(np.uint8)
    parents = np.concatenate([keys[4:], keys[:1], keys[1:2], keys[:1], keys[3:4]])
    tokens = np.arange(20).reshape(5, 4)
    recorder.stored(told(0, [0, 1, 2, 1, 2], keys, parents, tokens))
    batch = recorder.take()
    assert recorder.take() is None
    first, second = batch.events
    assert first.block_hashes == [k.tobytes() for k in keys[:3]]
    assert (first.parent_block_hash, first.token_ids) == (None, list(range(12)))
    assert second.block_hashes == [k.tobytes() for k in keys[3:]]
    assert second.parent_block_hash == keys[0].tobytes()
    assert first.group_idx == 0 and first.medium is None


def test_counter_counts_copies():
    """Storing 3 keys twice and removing one of them once leaves all three findable."""
    counter = events.BlockCounter()
    stored = recorded.batches(events)[0][0]
    stored.block_hashes = [1, 2, 3]
    counter.apply([stored, stored, stored])
    assert len(counter) == 3
    removal = events.BlockRemoved([3], "GPU")
    counter.apply([removal, removal])
    assert counter.holds(3)
    counter.apply([removal, removal, removal])
    assert not counter.holds(3) and counter.holds(2) and not counter.holds(2, group=1)
    counter.apply([events.AllBlocksCleared()])
    assert len(counter) == 0


def batch(number: int) -> events.EventBatch:
    return events.EventBatch(float(number), [events.BlockRemoved([number], "GPU")])


@pytest.fixture
def publisher(tmp_path):
    made = EventPublisher(
        f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay", topic="kv", buffer_batches=8
    )
    yield made
    made.close()


def test_subscriber_sees_all_in_order_and_fills_the_past(publisher):
    for number in range(3):
        publisher.publish(batch(number))
    subscriber = EventSubscriber(
        publisher.endpoint, publisher.replay_endpoint, topic="kv", first_sequence=0
    )
    time.sleep(0.2)  # a PUB socket does not keep messages for a subscriber still connecting
    for number in range(3, 6):
        publisher.publish(batch(number))
    got = [subscriber.receive(5.0) for _ in range(6)]
    assert [(g.sequence, g.batch.ts, g.missed, g.restarted) for g in got] == [
        (n, float(n), 0, False) for n in range(6)
    ]
    assert got[0].batch.data_parallel_rank == 0
    assert subscriber.receive(0.05) is None
    subscriber.close()


def test_what_the_buffer_lost_is_reported(publisher):
    for number in range(20):
        publisher.publish(batch(number))
    while publisher._pending:
        time.sleep(0.01)
    time.sleep(0.1)
    subscriber = EventSubscriber(
        publisher.endpoint, publisher.replay_endpoint, topic="kv", first_sequence=2
    )
    time.sleep(0.2)
    publisher.publish(batch(20))
    got = [subscriber.receive(5.0) for _ in range(8)]
    assert [(g.sequence, g.missed) for g in got] == [(13, 11)] + [(n, 0) for n in range(14, 21)]
    subscriber.close()


def raw_publisher(tmp_path):
    socket = zmq.Context.instance().socket(zmq.PUB)
    socket.bind(f"ipc://{tmp_path}/raw")
    return socket, f"ipc://{tmp_path}/raw"


def send(socket, sequence, payload=None):
    payload = events.encode_batch(batch(sequence)) if payload is None else payload
    socket.send_multipart((b"", sequence.to_bytes(8, "big"), payload))


def test_gap_without_replay_and_restart(tmp_path):
    socket, endpoint = raw_publisher(tmp_path)
    subscriber = EventSubscriber(endpoint)
    time.sleep(0.2)
    for sequence in (5, 6, 9, 0, 1):
        send(socket, sequence)
    got = [subscriber.receive(5.0) for _ in range(5)]
    assert [(g.sequence, g.missed, g.restarted) for g in got] == [
        (5, 0, False), (6, 0, False), (9, 2, False), (0, 0, True), (1, 0, False),
    ]  # fmt: skip
    subscriber.close()
    socket.close(linger=0)


def test_batches_before_the_first_one_wanted_are_skipped(tmp_path):
    socket, endpoint = raw_publisher(tmp_path)
    subscriber = EventSubscriber(endpoint, first_sequence=6)
    time.sleep(0.2)
    for sequence in (4, 5, 6, 7, 0):
        send(socket, sequence)
    got = [subscriber.receive(5.0) for _ in range(3)]
    assert [(g.sequence, g.restarted) for g in got] == [(6, False), (7, False), (0, True)]
    subscriber.close()
    socket.close(linger=0)


def test_dead_replay_socket_does_not_hang(tmp_path):
    socket, endpoint = raw_publisher(tmp_path)
    subscriber = EventSubscriber(endpoint, f"ipc://{tmp_path}/nobody", replay_timeout=0.2)
    time.sleep(0.2)
    send(socket, 1)
    send(socket, 4)
    began = time.monotonic()
    assert [subscriber.receive(5.0)[2] for _ in range(2)] == [0, 2]
    assert time.monotonic() - began < 2
    subscriber.close()
    socket.close(linger=0)


def test_foreign_frames_raise(tmp_path):
    socket, endpoint = raw_publisher(tmp_path)
    subscriber = EventSubscriber(endpoint)
    time.sleep(0.2)
    socket.send_multipart((b"", b"short", b"x"))
    send(socket, 0, b"not msgpack \xc1")
    for _ in range(2):
        with pytest.raises(WireError):
            subscriber.receive(5.0)
    subscriber.close()
    socket.close(linger=0)


def test_a_plain_vllm_style_client_can_replay(publisher):
    """A DEALER that speaks only the documented protocol."""
    for number in range(4):
        publisher.publish(batch(number))
    time.sleep(0.2)
    with zmq.Context.instance().socket(zmq.DEALER) as dealer:
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart([b"nonsense"])
        dealer.send_multipart([b"", (2).to_bytes(8, "big")])
        assert dealer.poll(5000)
        replies = [dealer.recv_multipart() for _ in range(3)]
    assert [r[1] for r in replies] == [(2).to_bytes(8, "big"), (3).to_bytes(8, "big"), b"\xff" * 8]
    assert replies[2][2] == b"" and events.decode_batch(replies[0][2]).ts == 2.0


def test_endpoints_of_ranks_and_bad_endpoints():
    assert endpoint_of_rank("tcp://*:5557", 3) == "tcp://*:5560"
    assert endpoint_of_rank("inproc://kv", 1) == "inproc://kv_dp1"
    with pytest.raises(ConfigError, match="ipc://x"):
        endpoint_of_rank("ipc://x", 1)
    with pytest.raises(ConfigError, match="nowhere"):
        EventPublisher("nowhere://x")


@given(st.binary(max_size=64), st.integers(0, len(FRAMES) - 1), st.integers(0, 200))
def test_any_bytes_decode_or_raise_wire_error(noise, which, at):
    payload = FRAMES[which]
    for data in (noise, payload[:at] + noise + payload[at + len(noise) :]):
        try:
            events.decode_batch(data)
        except WireError:
            continue


def test_what_the_manager_tells_is_what_it_holds():
    """Follow a manager through growth and eviction by its events alone."""
    from blocktable.manager import KVCacheManager

    cache = KVCacheConfig(
        20,
        (KVCacheGroupSpec(("a",), FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8)),),
    )
    recorder, counter = events.EventRecorder(cache), events.BlockCounter()
    manager = KVCacheManager(cache, max_num_rows=4, max_model_len=64, seed=0, sink=recorder)
    rng, row = np.random.default_rng(0), np.array([1], np.int32)
    for _ in range(30):
        sequence = manager.sequence(rng.integers(0, 3, 4 * int(rng.integers(1, 9))))
        manager.admit(1, manager.find_hit(sequence), len(sequence) - manager.find_hit(sequence)[0])
        manager.release(row)
        batch = recorder.take()
        if batch is not None:
            for event in events.decode_batch(events.encode_batch(batch)).events:
                if isinstance(event, events.BlockStored):
                    assert len(event.token_ids) == 4 * len(event.block_hashes)
                counter.apply([event])
        stats = manager.stats()
        assert len(counter) == stats.cached_keys
        assert sum(counter.counts.values()) == stats.cached_blocks
        if stats.removed_blocks > 10:
            break
    assert manager.reset_prefix_cache()
    counter.apply(recorder.take().events)
    assert len(counter) == 0


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://*:5557", True), ("tcp://127.0.0.1:*", True), ("tcp://[::]:5557", True),
        ("ipc:///tmp/events", True), ("inproc://events", True),
        ("tcp://127.0.0.1:5557", False), ("tcp://host.example:5557", False),
    ],
)  # fmt: skip
def test_a_wildcard_is_bound_and_a_host_is_connected_to(endpoint, bound):
    assert binds(endpoint) == bound


@pytest.fixture
def warnings(caplog, monkeypatch):
    """Warnings of a publisher that does not wait long for a subscriber, once it has looked."""
    monkeypatch.setattr(connecting, "SECONDS_TO_FIND", 0.3)

    def after(seconds=0.6):
        time.sleep(seconds)
        return [r.getMessage() for r in caplog.records if r.name == "blocktable"]

    return after


def test_one_warning_where_nobody_listens(warnings):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    publisher = EventPublisher(endpoint)
    for i in range(5):
        publisher.publish(events.EventBatch(float(i), []))
        time.sleep(0.1)
    (line,) = warnings()
    assert endpoint in line and "nobody listens" in line and "tcp://*:PORT" in line
    assert publisher.endpoint == endpoint
    publisher.close()


@pytest.mark.parametrize("pattern", ["tcp://127.0.0.1:*", "ipc://{}/events"])
def test_no_warning_where_the_publisher_binds(pattern, tmp_path, warnings):
    publisher = EventPublisher(pattern.format(tmp_path))
    assert warnings() == []
    publisher.close()


def test_a_subscriber_that_binds_is_found_and_told(warnings):
    subscriber = EventSubscriber("tcp://127.0.0.1:*", bind=True)
    publisher = EventPublisher(subscriber.endpoint)
    assert warnings() == []
    assert reaches(publisher, subscriber)
    publisher.close()
    subscriber.close()


def test_a_subscriber_that_comes_after_the_warning_is_told(warnings):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    publisher = EventPublisher(endpoint)
    assert len(warnings()) == 1
    subscriber = EventSubscriber(endpoint, bind=True)
    assert reaches(publisher, subscriber)
    assert len(warnings(0)) == 1
    publisher.close()
    subscriber.close()


def test_a_publisher_that_waits_for_a_subscriber_can_be_closed():
    start = time.monotonic()
    EventPublisher(f"tcp://127.0.0.1:{free_port()}").close()
    assert time.monotonic() - start < 2


def reaches(publisher, subscriber):
    """Whether something that is published comes: a SUB socket that is bound asks for it only once
    it receives."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        publisher.publish(events.EventBatch(8.0, []))
        if subscriber.receive(0.2) is not None:
            return True
    return False


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]

"""A rank that is killed, stalls, diverges or gets other messages than were sent: an error that
names it within the stated time, and never a hang."""

import multiprocessing
import os
import signal
import threading
import time
import uuid

import numpy as np
import pytest

from blocktable.core.errors import PeerLost, RankError, WireError
from blocktable.parallel.channel import (
    DONE,
    LOST,
    Ack,
    DriverChannel,
    RankChannel,
    decode_ack,
    encode_ack,
    world_is_alive,
)
from blocktable.parallel.driver import StepWriter
from blocktable.parallel.rank import RankState
from blocktable.parallel.wire import encode_step
from blocktable.parallel.worker import is_left_alone, serve_rank

from test_ranks import World, config, request  # isort: skip

TIMEOUT = 1.5
ROWS, LENGTH, BLOCKS = 8, 256, 60


def rank_process(rank, endpoint, stall_at):
    """A rank in a process of its own; its step takes a moment. It stalls at a step if told so."""
    state = rank_state(rank)
    parent = multiprocessing.parent_process()

    def run(step):
        if step.message.step >= stall_at:
            time.sleep(3600)

    serve_rank(state, RankChannel(rank, endpoint), run, parent.is_alive)


def rank_state(rank, widths=None):
    return RankState(
        config(BLOCKS), rank=rank, max_num_rows=ROWS, max_model_len=LENGTH, widths=widths,
        free_ids=np.random.default_rng(rank).permutation(BLOCKS - 1) + 1,
    )  # fmt: skip


class Driver:
    """The scheduler's side with ranks 1 .. n behind channels; ``tamper`` may change the bytes."""

    def __init__(self, channel, tamper=None):
        self.world = World(config(BLOCKS), ranks=1, rows=ROWS, length=LENGTH)
        self.world.writer = StepWriter(self.world.manager.tables, [BLOCKS])
        for number in range(4):
            self.world.scheduler.add(request(f"r{number}", 40 + number, tokens=100))
        self.channel, self.tamper = channel, tamper

    def step(self):
        output = self.world.scheduler.schedule()
        message = self.world.writer.write(output, self.world.manager.tokens)
        for data in self.bytes_to_send(message):
            self.channel.publish(data)
        self.channel.confirm(message.sequence, message.step, message.digest)
        tokens = np.full(len(output.sample_rows), 5, np.int32)
        self.world.scheduler.update(output, tokens)

    def bytes_to_send(self, message):
        data = encode_step(message)
        return [data] if self.tamper is None else self.tamper(message, data)

    def run_until_error(self, limit=TIMEOUT + 2.0):
        began = time.monotonic()
        with pytest.raises(RankError) as caught:
            for _ in range(60):
                self.step()
        assert time.monotonic() - began < limit + 1.0
        return str(caught.value)


@pytest.fixture
def threads():
    """Start ranks as threads; the channel closes at the end and they leave."""
    made = []

    def start(tamper=None, ranks=2, on_state=None):
        endpoint = f"inproc://{uuid.uuid4()}"
        channel = DriverChannel(ranks + 1, endpoint, timeout=TIMEOUT)
        states = [rank_state(rank) for rank in range(1, ranks + 1)]

        def serve(state):
            def run(step):
                if on_state is not None:
                    on_state(state, step)

            try:
                serve_rank(state, RankChannel(state.rank, endpoint), run, lambda: True)
            except (RankError, WireError):
                return  # told to the driver

        workers = [threading.Thread(target=serve, args=(state,)) for state in states]
        made.append((channel, workers))
        for worker in workers:
            worker.start()
        channel.wait_for_ranks()
        return Driver(channel, tamper)

    yield start
    for channel, workers in made:
        channel.close()
        for worker in workers:
            worker.join(10)
            assert not worker.is_alive()


def test_a_sound_world_runs_on(threads):
    driver = threads()
    for _ in range(50):
        driver.step()
    acks = driver.channel._heard
    assert acks[1].digest == acks[2].digest and acks[1].map_digest != acks[2].map_digest


def test_a_device_that_never_ends_a_step_is_reported_with_the_rank_that_is_silent(threads):
    """A rank took the step and stopped: nothing but its silence tells, to those who ask."""
    held = threading.Event()

    def stall(state, step):
        if state.rank == 2 and step.message.step >= 3:
            held.wait(20.0)

    driver = threads(on_state=stall)
    try:
        while driver.channel._heard[2].step < 3:
            driver.step()
        driver.channel.watch(3, lambda: True)  # a step that has ended is not waited for
        began = time.monotonic()
        with pytest.raises(RankError, match=r"step 3 did not end within 1\.5 s: rank 2 is silent"):
            driver.channel.watch(3, lambda: False)
        assert time.monotonic() - began < TIMEOUT + 4.0
    finally:
        held.set()


def test_a_step_that_never_ends_though_all_ranks_answer(threads):
    driver = threads()
    driver.step()
    with pytest.raises(RankError, match=r"step 1 did not end within 1\.5 s: all ranks answer"):
        driver.channel.watch(1, lambda: False)
    driver.step()  # being asked does not disturb the ranks


def at_step(number, change):
    def tamper(message, data):
        return change(data) if message.step == number else [data]

    return tamper


def test_a_dropped_message(threads):
    text = threads(at_step(6, lambda data: [])).run_until_error()
    assert "did not confirm step 6 within 1.5 s" in text and "rank 1, 2" in text


def test_a_repeated_message(threads):
    text = threads(at_step(6, lambda data: [data, data])).run_until_error()
    assert "expected message" in text and "(step 6)" in text


def test_messages_in_another_order(threads):
    held = []

    def tamper(message, data):
        if message.step == 6:
            held.append(data)
            return []
        return [data]

    driver = threads(tamper)
    confirm = driver.channel.confirm
    driver.channel.confirm = lambda seq, step, digest: (
        None if step == 6 else confirm(seq, step, digest)
    )  # the driver runs ahead, so that step 7 overtakes step 6
    text = driver.run_until_error()
    assert "expected message" in text and "(step 7)" in text


@pytest.mark.parametrize("byte", [0, 4, 20, 40, -1])
def test_a_flipped_bit_in_a_message(threads, byte):
    def flip(data):
        changed = bytearray(data)
        changed[byte] ^= 4
        return [bytes(changed)]

    text = threads(at_step(6, flip)).run_until_error()
    assert "rank" in text and "failed at step 5" in text and "WireError" in text


def test_a_flipped_bit_in_one_ranks_table(threads):
    def flip(state, step):
        if state.rank == 2 and step.message.step == 6:
            row = int(step.rows[1])
            state.tables[0].rows[row, 1] ^= 1 << 3

    text = threads(on_state=flip).run_until_error()
    assert "rank 2, step 7: row" in text and "changed without being told" in text


def test_a_rank_that_raises(threads):
    def fail(state, step):
        if state.rank == 1 and step.message.step == 4:
            raise RankError("rank 1: out of paper")

    assert threads(on_state=fail).run_until_error() == "rank 1: out of paper"


@pytest.fixture
def processes():
    made = []

    def start(stall_at=1 << 60, know=True):
        context = multiprocessing.get_context("spawn")
        workers: list = []
        channel = DriverChannel(3, timeout=30.0, is_alive=world_is_alive(workers) if know else None)
        workers += [
            context.Process(
                target=rank_process, args=(r, channel.endpoint, stall_at if r == 2 else 1 << 60)
            )
            for r in (1, 2)
        ]
        for worker in workers:
            worker.start()
        made.append((channel, workers))
        channel.wait_for_ranks()
        channel._timeout = TIMEOUT
        return Driver(channel), workers

    yield start
    for channel, workers in made:
        channel.close()
        for worker in workers:
            worker.join(5)
            if worker.is_alive():
                worker.kill()
                worker.join()


def test_a_killed_rank_is_reported_at_once(processes):
    driver, workers = processes()
    for _ in range(5):
        driver.step()
    os.kill(workers[1].pid, signal.SIGKILL)
    workers[1].join(5)
    text = driver.run_until_error(limit=0.5)
    assert "rank 2 died at step" in text


def test_a_killed_rank_whose_process_is_elsewhere(processes):
    driver, workers = processes(know=False)
    driver.step()
    os.kill(workers[0].pid, signal.SIGKILL)
    workers[0].join(5)
    assert "rank 1 did not confirm step" in driver.run_until_error()


def test_a_stalled_rank(processes):
    driver, _ = processes(stall_at=5)
    text = driver.run_until_error()
    assert text == "rank 2 did not confirm step 6 within 1.5 s"


def test_a_rank_leaves_when_the_driver_is_gone():
    channel = DriverChannel(2, timeout=5)
    rank = RankChannel(1, channel.endpoint)
    channel.wait_for_ranks()
    with pytest.raises(RankError, match="rank 1: the driver is gone"):
        rank.receive(lambda: False)
    with pytest.raises(RankError, match=r"rank 1: no message for 0.2 s"):
        rank.receive(lambda: True, timeout=0.2)
    rank.close()
    channel.close()


def left_alone(rank):
    return Ack(LOST, rank, 0, 5, 0, 0, 0, f"rank {rank}: all_reduce failed")


@pytest.mark.parametrize("dead", [False, True], ids=["process elsewhere", "process known"])
def test_ranks_that_another_left_alone_are_not_the_ones_to_name(dead):
    """Their collectives fail and they end too, mostly before anyone hears of the first."""
    channel = DriverChannel(3, timeout=2, is_alive=(lambda rank: False) if dead else None)
    ranks = [RankChannel(rank, channel.endpoint) for rank in (1, 2)]
    channel.wait_for_ranks()
    ranks[0].send(left_alone(1))
    with pytest.raises(RankError, match=r"^rank 2 (died at|left|did not confirm) step 5"):
        channel.confirm(0, 5, 0)
    with pytest.raises(RankError, match=r"^rank 2 left step 5: a collective failed on all others"):
        channel.blame(5)
    ranks[1].send(left_alone(2))
    with pytest.raises(RankError, match="all_reduce failed"):
        channel.confirm(0, 5, 0)
    channel.blame(5)  # every rank has said the same: there is none to name
    for end in (*ranks, channel):
        end.close()


@pytest.mark.parametrize(
    ("error", "alone"),
    [
        (PeerLost("rank 1: all_reduce failed"), True),
        (RuntimeError("[.../gloo/transport/tcp/pair.cc:537] Connection closed by peer"), True),
        (RuntimeError("out of memory"), False), (RankError("rank 1 diverged"), False),
        (ValueError("gloo"), False),
    ],
)  # fmt: skip
def test_which_failures_are_anothers(error, alone):
    assert is_left_alone(error) == alone


def test_acknowledgements_round_trip_and_refuse_the_rest():
    ack = Ack(DONE, 3, 2**32 - 1, 2**63, 2**64 - 1, 7, 9, "grüße")
    data = encode_ack(ack)
    assert decode_ack(data) == ack
    for bit in range(len(data) * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            decode_ack(bytes(changed))
    for end in range(len(data)):
        with pytest.raises(WireError):
            decode_ack(data[:end])


def test_a_foreign_peer_is_named():
    channel = DriverChannel(2, timeout=2)
    with pytest.raises(RankError, match="no acknowledgement"):
        import zmq

        with zmq.Context.instance().socket(zmq.DEALER) as stranger:
            stranger.connect(channel.endpoint)
            stranger.send(b"GET / HTTP/1.1")
            channel.wait_for_ranks()
    channel.close()

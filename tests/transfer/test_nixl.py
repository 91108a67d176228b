"""The same over NIXL (UCX on host memory) between two processes."""

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
from caches import Cache, layout, value

from blocktable.transfer.fetch import BlockFetcher
from blocktable.transfer.reader import NixlReader, Region
from blocktable.transfer.source import BlockSource

TOKENS = 100


def source_process(pipe, made, seconds):
    cache = Cache(made, 200)
    rows = [np.arange(1, 1 + -(-TOKENS // made.block_size), dtype=np.int32)]
    cache.fill_request(rows, TOKENS)
    reader = NixlReader(f"source-{os.getpid()}", [Region(*r) for r in cache.regions])
    source = BlockSource(reader, made, cache.bases, lease_seconds=30)
    released = []
    for number in range(3):
        source.offer(f"r{number}", rows, TOKENS, lambda: released.append(1))
    pipe.send(source.endpoint)
    end = time.monotonic() + seconds
    while time.monotonic() < end and not pipe.poll(0):
        source.poll(0.01)
    pipe.send(len(released))


@pytest.fixture
def start():
    context = multiprocessing.get_context("spawn")
    made = []

    def begin(*layouts):
        endpoints = []
        for one in layouts:
            ours, theirs = context.Pipe()
            process = context.Process(target=source_process, args=(theirs, one, 60))
            process.start()
            made.append((process, ours))
        for _, pipe in made:
            assert pipe.poll(60)
            endpoints.append(pipe.recv())
        return endpoints, made

    yield begin
    for process, _ in made:
        if process.is_alive():
            process.kill()
        process.join(10)


def wait(fetcher, fetch, seconds=20):
    end = time.monotonic() + seconds
    while not fetch.is_over and time.monotonic() < end:
        fetcher.poll()
        time.sleep(0.001)
    return fetch


def test_between_processes_with_other_blocks_and_heads(start):
    endpoints, processes = start(layout(16, (0, 2)), layout(8, (2, 4), "THD"))
    cache = Cache(layout(32), 200)
    reader = NixlReader(f"target-{os.getpid()}", [Region(*r) for r in cache.regions])
    fetcher = BlockFetcher(reader, cache.layout, cache.bases, timeout=15)
    rows = [np.array([9, 4, 7, 2], np.int32)]
    fetch = wait(fetcher, fetcher.fetch("r0", endpoints, rows))
    assert fetch.is_done, fetch.error
    for args, vector in cache.vectors(rows, TOKENS):
        assert np.array_equal(vector, np.float32(value(*args, len(vector))))
    for process, pipe in processes:
        pipe.send("stop")
        assert pipe.poll(10) and pipe.recv() == 1
        process.join(10)
    fetcher.close()
    reader.close()


def test_a_killed_source_fails_the_fetch_within_the_time_out(start):
    endpoints, processes = start(layout())
    cache = Cache(layout(), 200)
    reader = NixlReader(f"victim-{os.getpid()}", [Region(*r) for r in cache.regions])
    fetcher = BlockFetcher(reader, cache.layout, cache.bases, timeout=3)
    fetcher.connect(endpoints[0])
    os.kill(processes[0][0].pid, signal.SIGKILL)
    processes[0][0].join(5)
    began = time.monotonic()
    fetch = wait(fetcher, fetcher.fetch("r1", endpoints, [np.arange(1, 9, dtype=np.int32)]))
    assert fetch.is_over and not fetch.is_done and "within 3 s" in fetch.error
    assert time.monotonic() - began < 6
    fetcher.close()
    reader.close()

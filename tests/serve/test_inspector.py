"""What the inspector is told equals what the pool is, at every frame, in both directions."""

import gc
import io
import json
import threading
import time

import httpx
import numpy as np
import pytest
from rich.console import Console
from serving import make_llm

from blocktable import SamplingParams
from blocktable.cli import run
from blocktable.cli.inspect import RemoteState, view
from blocktable.core.pool import EVICTABLE, FENCED, OWNED
from blocktable.engine.tracking import Tracked
from blocktable.serve import frames as f
from blocktable.serve.recorder import TableRecorder
from blocktable.serve.ring import FrameRing
from blocktable.serve.tree import prefix_tree

SMALL = {"num_blocks": 60, "max_num_seqs": 4, "max_model_len": 128}


def add_requests(engine, count, rng):
    for i in range(count):
        text = "a shared beginning " * int(rng.integers(0, 3)) + f"request {i}"
        engine.add_request(
            f"r{i}", engine.encode(text),
            SamplingParams(max_tokens=int(rng.integers(1, 40)), ignore_eos=True, n=1 + i % 2),
        )  # fmt: skip


def expected_kind(pool):
    kind = np.zeros(pool.num_blocks, np.int32)
    kind[pool.state == EVICTABLE] = f.CACHED
    kind[pool.state == FENCED] = f.FENCED
    kind[(pool.state == OWNED) & (pool.ref == 1)] = f.OWNED
    kind[(pool.state == OWNED) & (pool.ref > 1)] = f.SHARED
    return kind


@pytest.mark.parametrize("options", [{}, {"async_steps": True}, {"enable_prefix_caching": False}])
def test_every_frame_equals_the_pool_and_time_runs_both_ways(options):
    engine = make_llm(**SMALL, **options).engine
    recorder = TableRecorder(engine, 2**24, share=float("inf"))
    start = recorder.codes.copy()
    rng = np.random.default_rng(0)
    add_requests(engine, 14, rng)
    states = []
    for step in range(10_000):
        if not engine.has_unfinished:
            break
        if step % 17 == 5:
            engine.abort([f"r{int(rng.integers(14))}"])
        engine.step()
        recorder.after_step(engine, 0.01)
        pool = engine.manager.pool
        assert np.array_equal(f.kind_of(recorder.codes)[1:], expected_kind(pool)[1:])
        check_owners(engine, recorder)
        states.append(recorder.codes.copy())
    frames = recorder.ring.since(0)
    assert len(frames) == len(states)
    codes = start.copy()
    for frame, state in zip(frames, states, strict=True):
        assert np.array_equal(codes[frame.blocks], frame.old)
        codes[frame.blocks] = frame.new
        assert np.array_equal(codes, state)
    for frame in reversed(frames):
        codes[frame.blocks] = frame.old
    assert np.array_equal(codes, start)
    assert frames[-1].counts[0] == 0
    assert sum(frame.counts[7] for frame in frames) == engine.scheduler.stats.generated_tokens


def check_owners(engine, recorder):
    """A block that one row holds is shown at its place, as that row's request's own: also where
    another filled it and left."""
    for row, request in enumerate(engine.scheduler.requests):
        if request is None:
            continue
        for table in engine.manager.tables:
            for place, block in enumerate(table.rows[row, : table.counts[row]].tolist()):
                assert recorder.place[block] == place
                if engine.manager.pool.ref[block] == 1:
                    owner = recorder.requests[int(f.number_of(recorder.codes[block]))]
                    assert (owner.row, owner.request_id) == (row, request.request_id)


def test_steps_are_joined_where_recording_would_cost_too_much():
    engine = make_llm(**SMALL).engine
    recorder = TableRecorder(engine, 2**24, share=0.001)
    add_requests(engine, 6, np.random.default_rng(1))
    steps = 0
    while engine.has_unfinished:
        engine.step()
        before = recorder.sequence
        recorder.after_step(engine, 1e-4)
        steps += 1
        if recorder.sequence > before:
            check_owners(engine, recorder)
    frames = recorder.ring.since(0)
    assert 1 <= len(frames) < steps / 4
    assert frames[-1].counts[0] == 0  # the last step, after which nothing runs, is always seen


def test_the_ring_is_bounded():
    ring = FrameRing(10_000)
    blocks = np.arange(100, dtype=np.int32)
    for i in range(1, 100):
        ring.append(f.Frame(i, i, 0.0, 0.0, 1, blocks, blocks, blocks, (0,) * 10))
    kept = ring.since(0)
    assert 5 <= len(kept) <= 10_000 // 1200  # three arrays of 400 bytes each, and its numbers
    assert kept[-1].sequence == 99
    assert [x.sequence for x in ring.since(97)] == [98, 99]
    assert len(ring.life(5)) == len(kept)


def test_the_tree_joins_runs_and_counts_hits():
    # 1-2-3 is a run; 3 branches into 4 and 5-6; 9's parent is gone
    blocks = np.array([1, 2, 3, 4, 5, 6, 9], np.int32)
    parents = np.array([0, 1, 2, 3, 3, 5, 8], np.int32)
    hits = np.array([7, 7, 7, 1, 5, 5, 0], np.int32)
    places = np.array([0, 1, 2, 3, 3, 4, 6], np.int32)
    nodes = prefix_tree(blocks, parents, hits, np.zeros(7, np.int32), places, lambda run: f"t{run}")
    seen = [(n["depth"], n["block"], n["blocks"], n["hits"], n["children"]) for n in nodes]
    assert seen == [(0, 1, 3, 7, 2), (1, 5, 2, 5, 0), (1, 4, 1, 1, 0), (0, 9, 1, 0, 0)]
    assert nodes[0]["text"] == "t[1, 2, 3]"


def test_the_page_needs_nothing_from_elsewhere(server):
    with httpx.Client(base_url=server.url) as http:
        page = http.get("/inspect").text
        for part in ("inspect/static/inspect.js", "inspect/static/inspect.css"):
            assert part in page
            text = http.get("/" + part)
            assert text.status_code == 200
            assert "http://" not in text.text and "https://" not in text.text
        assert http.get("/inspect/static/../app.py").status_code == 404


def test_state_events_blocks_requests_and_tree_over_http(server):
    with httpx.Client(base_url=server.url, timeout=20) as http:
        body = {"model": "tiny", "prompt": "inspect me, please, at length", "max_tokens": 12,
                "ignore_eos": True}  # fmt: skip
        before = http.get("/inspect/state?history=0").json()["sequence"]
        for _ in range(2):
            assert http.post("/v1/completions", json=body).status_code == 200
        time.sleep(0.1)
        state = http.get("/inspect/state").json()
        assert state["num_blocks"] == len(state["codes"]) == 400
        assert state["sequence"] > before
        request = state["requests"][-1]
        assert request["prompt"] == 29 and request["cached"] == 28
        with http.stream("GET", f"/inspect/events?since={before}") as stream:
            line = next(line for line in stream.iter_lines() if line.startswith("data: "))
        frames = json.loads(line[6:])
        assert frames[0]["n"] > before
        changed = next(frame["b"][0] for frame in frames if frame["b"])
        block = http.get(f"/inspect/block/{changed}").json()
        assert block["life"] and block["slots"] == [changed * 4, changed * 4 + 3]
        assert len(block["tokens"]) == 4
        facts = http.get(f"/inspect/request/{request['number']}").json()
        assert facts["reason"] == "length" and facts["text"].startswith("inspect me")
        tree = http.get("/inspect/tree").json()
        assert any(n["hits"] and n["text"].startswith("inspect me") for n in tree)
        assert http.get("/inspect/block/400").status_code == 404
        assert http.get("/inspect/block/-1").status_code == 404
        assert http.get("/inspect/block/x").status_code in (400, 422)
        assert http.get("/inspect/request/99999").status_code == 404


def test_the_terminal_shows_the_pool_and_follows_it(server, capsys):
    body = {"model": "tiny", "prompt": "seen from a terminal", "max_tokens": 6, "ignore_eos": True}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=20)
    assert run(["inspect", server.url, "--once"]) == 0
    shown = capsys.readouterr().out
    assert "tiny, 399 blocks of 4 tokens" in shown
    assert "req-" in shown and "cached, free to take" in shown
    state = RemoteState(server.url + "/inspect", None)
    threading.Thread(target=state.follow, daemon=True).start()
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=20)
    recorder = server.app.state.recorder
    deadline = time.monotonic() + 10
    while state.last is None or state.last["n"] < recorder.sequence:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with state.lock:
        assert np.array_equal(state.codes, recorder.codes)
        console = Console(width=120, height=40, file=io.StringIO())
        console.print(view(state, 120, 40))


def test_a_request_that_ends_while_it_waits_leaves_its_tokens_only():
    """It was preempted, so it ends outside of a row."""
    engine = make_llm(**SMALL).engine
    recorder = TableRecorder(engine, 2**20, share=float("inf"))
    add_requests(engine, 1, np.random.default_rng(0))
    for _ in range(3):
        engine.step()
        recorder.after_step(engine, 0.01)
    engine.scheduler.preempt(["r0"])
    recorder.after_step(engine, 0.01)
    (seen,) = recorder.requests.values()
    assert (seen.reason, seen.source is None) == ("preempted", False)
    engine.abort(["r0"])
    engine.step()
    recorder.after_step(engine, 0.01)
    assert (seen.reason, seen.source, len(seen.tokens) > 5) == ("abort", None, True)
    assert recorder.ring.since(0)[-1].ended == ((seen.number, "abort"),)


def test_requests_that_ended_leave_their_tokens_only(server):
    with httpx.Client(base_url=server.url, timeout=20) as http:
        body = {"model": "tiny", "prompt": "gone soon", "max_tokens": 5, "n": 2, "logprobs": 3,
                "ignore_eos": True}  # fmt: skip
        for _ in range(5):
            assert http.post("/v1/completions", json=body).status_code == 200
        server.wait_idle()
        http.get("/inspect/state")  # the last step is recorded by now
        gc.collect()
        # one may still be in the hands of the step loop
        assert sum(type(thing) is Tracked for thing in gc.get_objects()) <= 1
        last = http.get("/inspect/state").json()["requests"][-1]
        facts = http.get(f"/inspect/request/{last['number']}").json()
        assert facts["text"].startswith("gone soon") and len(facts["text"]) > 9

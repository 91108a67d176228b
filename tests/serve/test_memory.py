"""A request of any kind leaves nothing behind: no object of ours, no memory of the C heap.

Each kind is sent until every store is full (they are made small here), and then as often again.
"""

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from collections import Counter

import httpx
import pytest
import uvicorn
from serving import make_llm, running

from blocktable.core.errors import ConfigError
from blocktable.serve import recorder, run
from blocktable.serve.config import ServerConfig
from blocktable.serve.heap import HeapTrimmer, find_trim

TIMES = 60
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}},
          "required": ["a"], "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
PROMPT = {"prompt": "a prompt of some length", "max_tokens": 6, "ignore_eos": True}
MESSAGES = {"messages": [{"role": "user", "content": "tell me"}], "max_tokens": 6}
KINDS = {
    "plain": (COMPLETIONS, PROMPT),
    "stream": (COMPLETIONS, PROMPT | {"stream": True}),
    "several": (COMPLETIONS, PROMPT | {"n": 3, "temperature": 1}),
    "lists": (COMPLETIONS, PROMPT | {"prompt": ["one", "two"]}),
    "scores": (COMPLETIONS, PROMPT | {"logprobs": 2, "echo": True}),
    "salt": (COMPLETIONS, PROMPT | {"cache_salt": "mine"}),
    "penalties": (COMPLETIONS, PROMPT | {"repetition_penalty": 1.3, "presence_penalty": 0.5}),
    "stop": (COMPLETIONS, PROMPT | {"stop": ["e", "xyz"], "min_tokens": 2}),
    "bias": (COMPLETIONS, PROMPT | {"logit_bias": {"65": 5}}),
    "regex": (COMPLETIONS, {"prompt": "x", "max_tokens": 9, "guided_regex": "[a-z]{1,5}"}),
    "schema": (COMPLETIONS, {"prompt": "x", "max_tokens": 20, "response_format": {
        "type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    "chat": (CHAT, MESSAGES),
    "chat stream": (CHAT, MESSAGES | {"stream": True, "stream_options": {"include_usage": True}}),
    "tools": (CHAT, MESSAGES | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 20}),
    "priority": (COMPLETIONS, PROMPT | {"priority": 2}),
    "retention": (COMPLETIONS, PROMPT | {"retention": {"priority": 1, "seconds": 5}}),
    "wrong field": (COMPLETIONS, PROMPT | {"max_tokens": -1}),
    "wrong guide": (COMPLETIONS, PROMPT | {"guided_regex": "((("}),
    "too long": (COMPLETIONS, PROMPT | {"prompt": "x" * 600}),
    "unknown model": (COMPLETIONS, PROMPT | {"model": "other"}),
    "tokens": ("/tokenize", {"prompt": "some text"}),
    "left in a stream": (COMPLETIONS, PROMPT | {"stream": True, "max_tokens": 400}),
    "left waiting": (COMPLETIONS, PROMPT | {"max_tokens": 400, "n": 2, "temperature": 1}),
    "left in the queue": (COMPLETIONS, PROMPT | {"max_tokens": 60, "n": 8, "temperature": 1}),
}  # fmt: skip

HTTP_SIDE = ("_Body", "Shape", "Call", "Update", "Part")


@pytest.fixture(scope="module")
def small():
    """A server whose stores are full after a few requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "_REMEMBERED", 10)
        with running(ServerConfig(port=0, ring_bytes=20_000), num_blocks=130) as made:
            for kind in KINDS:  # what is made once and kept
                send(made, kind, 5)
            yield made


def send(server, kind, times):
    path, body = KINDS[kind]
    with httpx.Client(base_url=server.url, timeout=20) as http:
        for _ in range(times):
            if kind == "left in a stream":
                with http.stream("POST", path, json=body) as answer:
                    next(answer.iter_bytes())
            elif kind.startswith("left"):
                leave(http, path, body, 3 if kind == "left in the queue" else 1)
            else:
                assert http.post(path, json=body).status_code < 500
    server.wait_idle(20)


def leave(http, path, body, others):
    """Several clients that all leave, most of them while they wait for a row."""

    def one():
        with contextlib.suppress(httpx.TimeoutException):
            http.post(path, json=body, timeout=0.03)

    threads = [threading.Thread(target=one) for _ in range(others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Info(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost",
    )]  # fmt: skip


MALLINFO = getattr(ctypes.CDLL(None), "mallinfo2", None)
if MALLINFO is not None:
    MALLINFO.restype = Info


def ours():
    """Objects of our types, by type."""
    return Counter(
        type(thing).__qualname__ for thing in gc.get_objects()
        if str(type(thing).__module__).startswith("blocktable")
    )  # fmt: skip


def held():
    """Objects of ours by type, Python's memory blocks, bytes that malloc has given out (0 where the
    C library does not tell)."""
    time.sleep(0.05)  # connections that were closed are dropped by the event loop
    gc.collect()
    info = Info() if MALLINFO is None else MALLINFO()
    return ours(), sys.getallocatedblocks(), info.hblkhd + info.uordblks


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_leaves_nothing(small, kind):
    """Less than one Python object and 1 KB a request; the best of five rounds, since what leaves
    something does so in each, and other threads of this process allocate what they like."""
    send(small, kind, TIMES)
    grown = []
    for _ in range(5):
        objects, blocks, heap = held()
        send(small, kind, TIMES)
        after = held()
        more = {name: count for name, count in (after[0] - objects).items() if count > 3}
        grown.append((more, after[1] - blocks, after[2] - heap))
        if not more and grown[-1][1] < TIMES and grown[-1][2] < 1024 * TIMES:
            return
    raise AssertionError(f"objects, blocks, heap bytes for {TIMES} requests each: {grown}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_goes_without_the_cycle_collector(small, kind):
    """Python looks for circles among old objects so seldom that a server would grow by what hangs
    on them: texts, scores, prompts. Where a client leaves a stream, the exception that starlette's
    tasks end with is such a circle and holds the HTTP side of the request, not the engine's."""
    send(small, kind, 2)
    before = held()[0]
    gc.disable()
    try:
        send(small, kind, 20)
        deadline = time.monotonic() + 5  # connections are dropped by the event loop
        while (more := left_over(before, kind)) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        gc.enable()
    assert not more


def left_over(before, kind):
    """Our types with more objects than before, but for what a server at rest may hold."""
    others = HTTP_SIDE if kind == "left in a stream" else ()
    more = ours() - before
    return {name: count for name, count in more.items() if count > 3 and name not in others}


def test_the_collector_does_not_look_at_the_model_again(monkeypatch):
    frozen = []
    monkeypatch.setattr("blocktable.llm.LLM", lambda *_, **__: make_llm())
    monkeypatch.setattr(
        uvicorn.Server, "run", lambda *_, sockets: frozen.append(gc.get_freeze_count())
    )
    gc.unfreeze()
    try:
        run.serve("tiny", ServerConfig(port=0), {})
        assert frozen[0] > 10_000
    finally:
        gc.unfreeze()


def test_what_the_inspector_remembers_has_a_limit_of_tokens(small, monkeypatch):
    """Many long requests are remembered by their numbers; tokens only of the newest."""
    monkeypatch.setattr(recorder, "_REMEMBERED_TOKENS", 100)
    send(small, "plain", 30)
    seen = list(small.app.state.recorder.requests.values())
    kept = [len(x.tokens) for x in seen if x.source is None]
    assert 0 < sum(kept) <= 100 + 30 and kept[-1] > 0 and kept[0] == 0
    with httpx.Client(base_url=small.url) as http:
        assert http.get(f"/inspect/request/{seen[0].number}").json()["text"] == ""


def test_the_heap_is_trimmed_after_steps_and_left_alone_when_idle():
    trims = []
    trimmer = HeapTrimmer(0.02, lambda: trims.append(1))
    trimmer.start()
    time.sleep(0.1)
    assert not trims
    for _ in range(3):
        trimmer.after_step(None, 0.0, [])
    deadline = time.monotonic() + 10
    while not trims and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(trims) == 1
    trimmer.stop()
    trimmer.after_step()
    time.sleep(0.05)
    assert len(trims) == 1


@pytest.mark.parametrize(("seconds", "trim"), [(0.0, lambda: 1 / 0), (0.01, None)])
def test_no_thread_where_there_is_nothing_to_trim(seconds, trim):
    before = threading.active_count()
    trimmer = HeapTrimmer(seconds, trim)
    trimmer.start()
    assert threading.active_count() == before
    trimmer.stop()


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(seconds):
    with pytest.raises(ConfigError, match="trim_seconds must be in"):
        ServerConfig(trim_seconds=seconds)


SPLIT_HEAP = """
import ctypes, psutil
from blocktable.serve.heap import find_trim
malloc = ctypes.CDLL(None).malloc
malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
free = ctypes.CDLL(None).free
free.argtypes = [ctypes.c_void_p]
resident, large = lambda: psutil.Process().memory_info().rss / 2**20, []
for _ in range(2000):  # what stays lies between what goes
    large.append(malloc(100_000))
    ctypes.memset(large[-1], 1, 100_000)
    malloc(64)
for block in large:
    free(block)
before = resident()
find_trim()()
print(before - resident())
"""


@pytest.mark.skipif(find_trim() is None, reason="this C library keeps nothing back")
def test_a_trim_gives_back_what_is_free_in_the_middle_of_the_heap():
    done = subprocess.run([sys.executable, "-c", SPLIT_HEAP], capture_output=True, text=True,
                         check=True)  # fmt: skip
    assert float(done.stdout) > 150, f"{done.stdout} MiB of 190 were given back"


THREADS_HEAP = """
import ctypes, psutil, threading
from blocktable.serve.heap import find_trim, use_one_arena
use_one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
resident = lambda: psutil.Process().memory_info().rss / 2**20
def work():
    libc.free(libc.malloc(30 * 2**20))  # from now on the heap is used for pieces of this size
    blocks = [libc.malloc(100_000) for _ in range(500)]
    for block in blocks:
        ctypes.memset(block, 1, 100_000)
    for block in blocks:
        libc.free(block)
    freed.set()
    measured.wait()
freed, measured = threading.Event(), threading.Event()
before = resident()
threading.Thread(target=work).start()
freed.wait()
find_trim()()
print(resident() - before)
measured.set()
"""


@pytest.mark.skipif(find_trim() is None, reason="this C library keeps nothing back")
def test_a_trim_reaches_what_a_thread_freed():
    env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", THREADS_HEAP], capture_output=True, text=True,
                          check=True, env=env)  # fmt: skip
    assert float(done.stdout) < 2, f"{done.stdout} MiB of 48 were kept"

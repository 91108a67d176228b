"""The step message beside pickle, JSON and msgpack: bytes, and microseconds to encode and decode.

    python bench/wire.py [--requests 1024] [--seconds 0.5] [--json]

Each codec carries the same decision and gives back NumPy arrays. Times are medians of alternating
rounds in one process; nothing here needs a second machine.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from blocktable.parallel.digest import TableDigest
from blocktable.parallel.wire import GroupDelta, StepMessage, decode_step, encode_step


class Codec(NamedTuple):
    name: str
    encode: Callable[[StepMessage], bytes]
    decode: Callable[[bytes], Any]


def decode_message(requests: int, crossing: int, seed: int = 0) -> StepMessage:
    """A decode step: a token for each request, a new block for ``crossing`` of them."""
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.choice(requests, crossing, replace=False)).astype(np.int32)
    delta = GroupDelta(
        append_rows=rows,
        append_counts=np.ones(crossing, np.int32),
        append_ids=rng.integers(1, 1 << 20, crossing).astype(np.int32),
    )
    return StepMessage(
        step=1, sequence=1, digest=2**63, groups=(delta,),
        rows=np.arange(requests, dtype=np.int32), num_scheduled=np.ones(requests, np.int32),
        token_ids=rng.integers(0, 151_936, requests).astype(np.int32),
    )  # fmt: skip


def table_message(ids: np.ndarray) -> StepMessage:
    """A whole table, as for a rank that joins."""
    rows, width = ids.shape
    delta = GroupDelta(
        append_rows=np.arange(rows, dtype=np.int32),
        append_counts=np.full(rows, width, np.int32),
        append_ids=ids.ravel().astype(np.int32),
    )
    return StepMessage(0, 0, 0, (delta,))


def plain(message: StepMessage) -> list[Any]:
    """The message as lists of integers."""
    groups = [[column.tolist() for column in delta] for delta in message.groups]
    return [*message[:3], groups, *(column.tolist() for column in message[4:])]


def arrays(values: list[Any]) -> StepMessage:
    """The inverse of `plain`."""
    groups = tuple(GroupDelta(*(np.array(c, np.int32) for c in g)) for g in values[3])
    return StepMessage(*values[:3], groups, *(np.array(c, np.int32) for c in values[4:]))


def codecs() -> list[Codec]:
    found = [
        Codec("blocktable", encode_step, decode_step),
        Codec("pickle 5", lambda m: pickle.dumps(m, 5), pickle.loads),
        Codec(
            "JSON", lambda m: json.dumps(plain(m)).encode(), lambda data: arrays(json.loads(data))
        ),
    ]
    try:
        import msgpack
    except ImportError:
        return found
    return [
        *found,
        Codec("msgpack", lambda m: msgpack.packb(plain(m)),
              lambda data: arrays(msgpack.unpackb(data))),
    ]  # fmt: skip


def measure(codec: Codec, message: StepMessage, seconds: float) -> dict[str, Any]:
    data = codec.encode(message)
    encode, decode = [], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(encode) < 5:
        start = time.perf_counter()
        codec.encode(message)
        middle = time.perf_counter()
        codec.decode(data)
        decode.append(time.perf_counter() - middle)
        encode.append(middle - start)
    micro = [statistics.median(times) * 1e6 for times in (encode, decode)]
    return {"codec": codec.name, "bytes": len(data), "encode_us": round(micro[0], 1),
            "decode_us": round(micro[1], 1), "both_us": round(sum(micro), 1)}  # fmt: skip


def messages(requests: int) -> dict[str, StepMessage]:
    rng = np.random.default_rng(0)
    contiguous = rng.permutation(16_000)[:1000, None] * 64 + 1 + np.arange(64)
    fours = (rng.permutation(1 << 18)[:16_000, None] * 4 + np.arange(4)).reshape(1000, 64)
    scattered = rng.permutation(1 << 20)[:64_000].reshape(1000, 64)
    return {
        f"decode step, {requests} requests, 1 in 16 crosses": decode_message(
            requests, max(1, requests // 16)
        ),
        f"decode step, {requests} requests, all cross": decode_message(requests, requests),
        "table 1,000 x 64, contiguous rows": table_message(contiguous),
        "table 1,000 x 64, runs of 4": table_message(fours),
        "table 1,000 x 64, random of 2**20": table_message(scattered),
    }


def digest_times(requests: int, seconds: float) -> dict[str, float]:
    """Microseconds to follow a decode step in the rolling digest, and to recount the table."""
    digest, width = TableDigest(requests), 64
    table = np.random.default_rng(0).integers(1, 1 << 20, (requests, width)).astype(np.int32)
    counts = np.full(requests, width, np.int32)
    message = decode_message(requests, max(1, requests // 16)).groups[0]
    starts = np.full(len(message.append_rows), width)
    rolling, recount = [], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        digest.append(message.append_rows, starts, message.append_counts, message.append_ids)
        middle = time.perf_counter()
        digest.recompute(table, counts)
        recount.append(time.perf_counter() - middle)
        rolling.append(middle - start)
    return {"rolling_us": round(statistics.median(rolling) * 1e6, 1),
            "recount_us": round(statistics.median(recount) * 1e6, 1)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=0.5, help="a codec and message")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: dict[str, Any] = {
        name: [measure(codec, message, options.seconds) for codec in codecs()]
        for name, message in messages(options.requests).items()
    }
    digest = digest_times(options.requests, options.seconds)
    if options.json:
        print(json.dumps(results | {"digest": digest}, indent=1))
        return
    for name, rows in results.items():
        print(name)
        for row in rows:
            print(
                f"  {row['codec']:<12}{row['bytes']:>10,} B{row['encode_us']:>10,.1f} us encode"
                f"{row['decode_us']:>10,.1f} us decode{row['both_us']:>10,.1f} us both"
            )
    print(f"digest of a decode step: {digest['rolling_us']} us; recount: {digest['recount_us']} us")


if __name__ == "__main__":
    main()

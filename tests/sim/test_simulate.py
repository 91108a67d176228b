"""The simulator: exact bounds, clear errors, figures that add up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from blocktable.core.errors import BlocktableError, ConfigError
from blocktable.sim.command import SimCommand, parse_sizes, run
from blocktable.sim.simulator import SimOptions, simulate, sweep
from blocktable.sim.step_time import StepTimeModel
from blocktable.sim.trace import TraceError, read_trace


def entry(time: float, length: object, output: object, ids: object) -> dict:
    return {"timestamp": time, "input_length": length, "output_length": output, "hash_ids": ids}


def write(path: Path, entries: list) -> Path:
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries))
    return path


def made_trace(path: Path, seed: int = 0, count: int = 200) -> Path:
    """Conversations that grow: each turn's prompt begins with an earlier one."""
    rng = np.random.default_rng(seed)
    past: list[list[int]] = [[0]]
    entries, fresh, now = [], 1, 0.0
    for _ in range(count):
        now += float(rng.exponential(400))
        ids = list(past[rng.integers(len(past))])
        for _ in range(int(rng.integers(1, 6))):
            ids.append(10**12 + fresh)
            fresh += 1
        past.append(ids)
        length = 512 * len(ids) - int(rng.integers(0, 511))
        entries.append(entry(now, length, int(rng.integers(1, 60)), ids))
    return write(path, entries)


def bound(path: Path) -> int:
    """Whole blocks below the last prompt token that an earlier request had, in a plain loop."""
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for line in path.read_text().splitlines():
        one = json.loads(line)
        ids, length = tuple(one["hash_ids"]), one["input_length"]
        cap = (length - 1) // 512
        run_of = next((k for k in range(cap) if ids[: k + 1] not in seen), cap)
        hits += 512 * run_of
        seen |= {ids[: k + 1] for k in range(length // 512)}
    return hits


def test_unbounded_pool_gives_the_exact_bound(tmp_path: Path) -> None:
    path = made_trace(tmp_path / "t.jsonl")
    trace = read_trace(path)
    report = simulate(trace, SimOptions())
    assert report.hit_tokens == bound(path) > 0
    assert report.query_tokens == trace.prompt_tokens
    assert report.finished == 200 and report.preemptions == 0
    assert report.generated_tokens == int(trace.output_length.sum())
    assert report.scheduled_tokens == (
        report.query_tokens - report.hit_tokens + report.generated_tokens - report.finished
    )


def test_small_pools_hit_less_and_still_finish(tmp_path: Path) -> None:
    trace = read_trace(made_trace(tmp_path / "t.jsonl"))
    slow = SimOptions(step_time=StepTimeModel(bandwidth=2e11, compute=2e13), watermark=0.0)
    reports = sweep(trace, slow, (5.0, 20.0, 400.0))
    rates = [report.hit_share for report in reports]
    assert rates == sorted(rates) and rates[0] < rates[-1]
    assert reports[-1].usable_blocks is None
    for report in reports:
        assert report.finished + report.refused == 200
        used = report.pool_use["used_blocks"]
        usable = report.usable_blocks or report.peak_used_blocks
        assert max(used) <= report.peak_used_blocks <= usable
        assert report.ttft_s.p50 <= report.ttft_s.p99 <= report.ttft_s.max


def test_no_caching_no_hits(tmp_path: Path) -> None:
    trace = read_trace(made_trace(tmp_path / "t.jsonl", count=30))
    assert simulate(trace, SimOptions(enable_caching=False)).hit_tokens == 0


def test_command_writes_json_and_plots(tmp_path: Path) -> None:
    path = made_trace(tmp_path / "t.jsonl", count=40)
    console = Console(file=(tmp_path / "log").open("w"), width=100)
    out, plot = tmp_path / "out.json", tmp_path / "use.png"
    run(SimCommand(trace=path, blocks="60", json_file=out, plot=plot), console)
    body = json.loads(out.read_text())
    assert body["query_tokens"] > body["hit_tokens"] > 0
    assert body["preemptions"] == 0 and body["usable_blocks"] == 60
    assert set(body["ttft_s"]) == {"mean", "p50", "p90", "p99", "max"}
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    run(SimCommand(trace=path, sweep_gb=(4.0, 8.0), json_file=out, plot=plot), console)
    assert len(json.loads(out.read_text())["sweep"]) == 3
    console.file.close()
    assert "unbounded" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: expected an object, got list"),
        ({"timestamp": 0}, "line 2: field 'input_length' is missing"),
        (entry(0, 0, 1, []), "input_length must be a number >= 1, got 0"),
        (entry(-1, 5, 1, [1]), "timestamp must be a number >= 0, got -1"),
        (entry(0, 5, 1.5, [1]), "output_length must be a number >= 0, got 1.5"),
        (entry(0, True, 1, [1]), "input_length must be a number >= 1, got True"),
        ({"timestamp": 0, "input_length": 5, "output_length": 1}, "field 'hash_ids' is missing"),
        (entry(0, 5, 10**11, [1]), "output_length 100000000000 is above 8388608"),
        (entry(0, 10**9, 1, [1]), "input_length 1000000000 is above 8388608"),
        (entry(float("nan"), 5, 1, [1]), "timestamp must be a number >= 0, got nan"),
        (entry(0, 5, 1, ["x"]), "hash_ids must be a list of integers"),
        (entry(0, 600, 1, [1]), "1 hash_ids for input_length 600, but 512 tokens each make 2"),
    ],
)
def test_bad_lines_are_named(line: object, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", [entry(0, 5, 1, [1]), line])
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_missing_and_empty_traces(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read trace"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(write(tmp_path / "empty.jsonl", ["", ""]))


def test_lines_in_any_order_and_other_block_sizes(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [entry(9, 40, 0, [7, 8, 9]), entry(1, 32, 3, [7, 8])])
    trace = read_trace(path, block_size=16)
    assert trace.arrival.tolist() == [0.001, 0.009]
    assert trace.prompt(1).tolist() == [0] * 16 + [1] * 16 + [2] * 8
    report = simulate(trace, SimOptions(num_blocks=20))
    assert report.hit_tokens == 32 and report.finished == 2


def test_bound_by_hand(tmp_path: Path) -> None:
    """Every case of the bound in one trace; the comments are whole blocks hit."""
    entries = [
        entry(0, 1536, 2, [1, 2, 3]),  # 0: the first
        entry(10_000, 1536, 2, [1, 2, 3]),  # 2: the last prompt token is always computed
        entry(20_000, 1537, 0, [1, 2, 3, 4]),  # 3: it is in the fourth block
        entry(30_000, 2000, 1, [1, 2, 9, 3]),  # 2: the same id behind another one is another block
        entry(40_000, 1024, 1, [2, 3]),  # 0: so is one at the beginning
        entry(50_000, 2048, 1, [5, 5, 5, 5]),  # 0: a repeated id is a block for each place
        entry(60_000, 2048, 1, [5, 5, 5, 5]),  # 3
        entry(60_001, 700, 1, [1, 2]),  # 1: 188 tokens of id 2 are no whole block
        entry(60_002, 1300, 1, [1, 2, 7]),  # 2
        entry(5_000, 1100, 1, [6, 2, 8]),  # 0: comes second, and brings nothing that is hit
    ]
    path = write(tmp_path / "hand.jsonl", entries)
    report = simulate(read_trace(path), SimOptions())
    assert bound(path) == 512 * (2 + 3 + 2 + 3 + 1 + 2) == report.hit_tokens == 6656
    assert report.query_tokens == 14_829 and report.finished == 10
    assert simulate(read_trace(path), SimOptions(eviction="reuse")).hit_tokens == 6656


def test_one_line(tmp_path: Path) -> None:
    report = simulate(read_trace(write(tmp_path / "t.jsonl", [entry(7, 1, 0, [3])])), SimOptions())
    assert (report.requests, report.finished, report.query_tokens, report.hit_tokens) == (
        1,
        1,
        1,
        0,
    )


def test_bad_options(tmp_path: Path) -> None:
    path = made_trace(tmp_path / "t.jsonl", count=3)
    with pytest.raises(ConfigError, match="number or 'unbounded', got 'many'"):
        run(SimCommand(trace=path, blocks="many"))
    with pytest.raises(ConfigError, match="num_blocks must be >= 1"):
        run(SimCommand(trace=path, blocks="0"))
    with pytest.raises(ConfigError, match="hold no block"):
        run(SimCommand(trace=path, memory_gb=0.001))
    with pytest.raises(ConfigError, match="smaller than one block"):
        run(SimCommand(trace=path, sweep_gb=(0.001,)))
    with pytest.raises(ConfigError, match="numbers of GB"):
        parse_sizes("1,x")
    with pytest.raises(ConfigError, match="bandwidth must be positive"):
        StepTimeModel(bandwidth=0.0)
    with pytest.raises(BlocktableError, match="cannot write"):
        run(SimCommand(trace=path, json_file=tmp_path / "no" / "x.json"))


def test_production_trace_bound(shared_dir: Path) -> None:
    path = shared_dir / "traces" / "conversation_trace.jsonl"
    assert bound(path) == 54_063_104
    report = simulate(read_trace(path), SimOptions())
    assert (report.requests, report.finished, report.preemptions) == (12031, 12031, 0)
    assert (report.query_tokens, report.hit_tokens) == (144_793_823, 54_063_104)

"""Replay: own scripts, random scripts against the naive model, recorded ones where present."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from naive_model import run_naive
from random_scripts import random_script

from blocktable.check.replay import replay, run
from blocktable.check.script import ScriptError, parse_script

SCRIPTS = sorted(
    path
    for path in (Path(__file__).parent / "scripts").glob("*.jsonl")
    if "answers" not in path.name
)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_own_scripts(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    run(path, out)
    assert lines_of(out) == lines_of(path.with_suffix(".answers.jsonl"))


def test_recorded_scripts(shared_dir: Path, tmp_path: Path) -> None:
    scripts = sorted((shared_dir / "oracle").glob("*script_*.jsonl"))
    assert len(scripts) == 40
    for path in scripts:
        run(path, tmp_path / "out.jsonl")
        right = lines_of(path.with_name(path.name.replace("script", "answer")))
        for mine, theirs in zip(lines_of(tmp_path / "out.jsonl"), right, strict=True):
            assert mine == theirs, path.name


@pytest.mark.parametrize("spec", ["full", "swa", "hybrid"])
@pytest.mark.parametrize("first", [0, 10])
def test_random_scripts_equal_the_naive_model(spec: str, first: int) -> None:
    for seed in range(first, first + 10):
        script = random_script(seed, 80, spec)
        answers = replay(parse_script([json.dumps(line) for line in script]))
        for mine, right in zip(answers, run_naive(script), strict=True):
            assert mine == right, f"seed {seed}"


CONFIG = {
    "op": "config", "num_blocks": 8, "block_size": 4, "caching": True, "max_model_len": 28,
    "budget": 64, "spec": "full", "window": None, "watermark": 0.0, "full_fit": False,
}  # fmt: skip
NEW = {"op": "new", "id": "a", "tokens": [1, 2], "max_tokens": 2}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        (["{"], "line 1: not JSON"),
        (["[1]"], "line 1: expected an object, got list"),
        ([{"op": "step"}], "first line must have op 'config'"),
        ([{**CONFIG, "num_blocks": 1}], "num_blocks must be an integer >= 2, got 1"),
        ([{**CONFIG, "block_size": True}], "block_size must be an integer >= 1, got True"),
        ([{**CONFIG, "spec": "mamba"}], "spec must be full, swa or hybrid, got 'mamba'"),
        ([{**CONFIG, "spec": "swa"}], "window must be an integer >= 1, got None"),
        ([{**CONFIG, "watermark": 1.5}], r"watermark must be in \[0, 1\), got 1.5"),
        ([{**CONFIG, "caching": 1}], "caching must be true or false, got 1"),
        ([CONFIG, {"op": "jump"}], "line 2: unknown op 'jump'"),
        ([CONFIG, {"op": "new", "id": 3}], "line 2: id must be a string, got 3"),
        ([CONFIG, {"op": "new", "id": "a", "tokens": []}], "tokens must be a list of at least 1"),
        ([CONFIG, {"op": "new", "id": "a", "tokens": [-1]}], "token id -1 is outside"),
        (
            [CONFIG, {"op": "new", "id": "a", "tokens": [1], "max_tokens": 0}],
            "max_tokens must be an integer >= 1, got 0",
        ),
        ([CONFIG, {"op": "probe", "tokens": [1], "salt": 4}], "salt must be a string or null"),
        ([CONFIG, {"op": "sample", "tokens": [1]}], "tokens must map request ids"),
        *(
            ([{**CONFIG, name: 10**20}], f"line 1: {name} must be at most 2147483647")
            for name in ("num_blocks", "block_size", "max_model_len", "budget")
        ),
        ([{**CONFIG, "spec": "swa", "window": 10**20}], "window must be at most 2147483647"),
        ([CONFIG, {**NEW, "max_tokens": 10**20}], "line 2: max_tokens must be at most"),
        ([CONFIG, NEW, {"op": "step"}, NEW], "line 4: request id 'a' is in use"),
        ([CONFIG, {**NEW, "tokens": [1] * 29}], "line 2: .*29"),
    ],
)
def test_broken_scripts_are_refused_with_the_line(
    lines: list, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "script.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts))
    with pytest.raises(ScriptError, match=message):
        run(path, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_missing_script_and_unwritable_answers(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="cannot read script"):
        run(tmp_path / "none.jsonl", tmp_path / "out.jsonl")
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps(CONFIG))
    with pytest.raises(ScriptError, match="cannot write answers"):
        run(script, tmp_path / "no" / "folder.jsonl")


@pytest.mark.parametrize("caching", [True, False])
def test_a_probe_may_be_longer_than_any_request(caching: bool) -> None:
    ids = list(range(40))
    script = [
        {**CONFIG, "caching": caching}, {**NEW, "tokens": ids[:27], "salt": None}, {"op": "step"},
        {"op": "probe", "tokens": ids, "salt": None}, {"op": "probe", "tokens": [], "salt": None},
    ]  # fmt: skip
    found = list(replay(parse_script([json.dumps(line) for line in script])))
    assert found == list(run_naive(script))
    assert found[2]["result"] == {"hit_tokens": 24 if caching else 0}


@pytest.mark.parametrize("error", [MemoryError("59 GiB"), ValueError("array is too big")])
def test_sizes_that_memory_does_not_hold_are_one_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("blocktable.check.replay.KVCacheManager", refuse)
    with pytest.raises(ScriptError, match=f"script, line 1: {error}"):
        list(replay(parse_script([json.dumps(CONFIG)])))

"""Which library serves which kind of step: by name, by (made-up) timings, from the file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import library_stand_ins as libraries
import pytest
import torch

from blocktable.attention.adapters import ADAPTERS, LayerKind
from blocktable.attention.adapters import choose as choosing
from blocktable.attention.adapters.choose import Choice, Trial, best, choose, try_out
from blocktable.attention.adapters.decisions import DecisionFile, default_path
from blocktable.attention.adapters.problems import difference, make_problems
from blocktable.attention.reference import paged_attention_reference
from blocktable.core.errors import ConfigError

CPU = torch.device("cpu")
KIND = LayerKind(
    num_heads=4, num_kv_heads=2, head_size=64, head_size_v=64, block_size=16,
    dtype=torch.bfloat16, cache_dtype=torch.bfloat16, scale=0.125,
)  # fmt: skip


def times(decode: float, prefill: float, mixed: float) -> Trial:
    return Trial({"decode": decode, "prefill": prefill, "mixed": mixed})


class Fake:
    """A measurement that counts how often it is asked."""

    def __init__(self, **trials: Trial) -> None:
        self.trials, self.asked = trials, []

    def __call__(
        self, kind: LayerKind, device: torch.device, names: Sequence[str]
    ) -> dict[str, Trial]:
        self.asked.append(list(names))
        return {name: self.trials[name] for name in ("triton", *names)}


def no_measure(*_: Any) -> Any:
    raise AssertionError("nothing is to be measured")


@pytest.fixture
def file(tmp_path: Path) -> DecisionFile:
    return DecisionFile(tmp_path / "deep" / "attention.json")


def test_each_kind_of_step_goes_to_its_fastest() -> None:
    trials = {"triton": times(100, 100, 100), "flashinfer": times(90, 120, 94.9),
              "flash_attn": times(93, 80, 95.1)}  # fmt: skip
    assert best(trials) == Choice("flashinfer", "flash_attn", "flashinfer")


def test_a_win_of_five_percent_is_none() -> None:
    assert best({"triton": times(100, 100, 100), "flashinfer": times(95, 95.1, 99)}) == Choice()


def test_a_candidate_with_a_fault_is_out() -> None:
    fast = times(1, 1, 1)._replace(fault="wrong")
    assert best({"triton": times(100, 100, 100), "flashinfer": fast}) == Choice()


def test_nothing_installed_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, file: DecisionFile
) -> None:
    libraries.install(monkeypatch)
    monkeypatch.setattr(DecisionFile, "_read", no_measure)
    assert choose("auto", KIND, CPU, decisions=file, measure=no_measure) == Choice()
    assert choose("triton", KIND, CPU, decisions=file, measure=no_measure) == Choice()


def test_what_is_not_able_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, file: DecisionFile
) -> None:
    libraries.install(monkeypatch, "flashinfer", "flash_attn")  # pages of 256: not able
    fake = Fake(triton=times(10, 10, 10), flashinfer=times(5, 50, 50))
    assert choose("auto", KIND, CPU, decisions=file, measure=fake) == Choice("flashinfer")
    assert fake.asked == [["flashinfer"]]


def test_later_starts_read_the_file(monkeypatch: pytest.MonkeyPatch, file: DecisionFile) -> None:
    libraries.install(monkeypatch, "flashinfer")
    fake = Fake(triton=times(10, 10, 10), flashinfer=times(5, 5, 50))
    first = choose("auto", KIND, CPU, decisions=file, measure=fake)
    again = DecisionFile(file.path)
    assert choose("auto", KIND, CPU, decisions=again, measure=no_measure) == first
    assert first == Choice("flashinfer", "flashinfer")
    for other in (replace(KIND, softcap=2.0), replace(KIND, head_size=128, head_size_v=128)):
        choose("auto", other, CPU, decisions=file, measure=fake)
    assert len(fake.asked) == 3
    assert not [name for name in os.listdir(file.path.parent) if name != "attention.json"]


def test_another_version_is_measured_anew(
    monkeypatch: pytest.MonkeyPatch, file: DecisionFile
) -> None:
    libraries.install(monkeypatch, "flashinfer")
    fake = Fake(triton=times(10, 10, 10), flashinfer=times(5, 5, 5))
    choose("auto", KIND, CPU, decisions=file, measure=fake)
    monkeypatch.setattr(ADAPTERS["flashinfer"], "versions", lambda: "flashinfer 9")
    choose("auto", KIND, CPU, decisions=file, measure=fake)
    assert len(fake.asked) == 2


def test_a_library_installed_later_is_measured_beside_the_others(
    monkeypatch: pytest.MonkeyPatch, file: DecisionFile
) -> None:
    libraries.install(monkeypatch, "flashinfer")
    fake = Fake(triton=times(10, 10, 10), flashinfer=times(5, 5, 5), flash_attn=times(4, 4, 4))
    choose("auto", KIND, CPU, decisions=file, measure=fake)
    libraries.install(monkeypatch, "flashinfer", "flash_attn_interface")
    assert choose("auto", KIND, CPU, decisions=file, measure=fake) == Choice(*["flash_attn"] * 3)
    assert fake.asked[1] == ["flashinfer", "flash_attn"]


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"x": 3}', "\x00"])
def test_a_broken_file_is_an_empty_one(
    monkeypatch: pytest.MonkeyPatch, file: DecisionFile, text: str
) -> None:
    libraries.install(monkeypatch, "flashinfer")
    file.path.parent.mkdir()
    file.path.write_text(text)
    fake = Fake(triton=times(10, 10, 10), flashinfer=times(5, 5, 5))
    choose("auto", KIND, CPU, decisions=file, measure=fake)
    assert choose("auto", KIND, CPU, decisions=file, measure=no_measure).decode == "flashinfer"


@pytest.mark.parametrize("entry", [{"times": 3}, {"times": {"decode": "fast"}}, {}, {"fault": 1}])
def test_an_entry_of_another_shape_is_measured_anew(
    monkeypatch: pytest.MonkeyPatch, file: DecisionFile, entry: dict[str, Any]
) -> None:
    libraries.install(monkeypatch, "flashinfer")
    fake = Fake(triton=times(10, 10, 10), flashinfer=times(5, 5, 5))
    choose("auto", KIND, CPU, decisions=file, measure=fake)
    entries = json.loads(file.path.read_text())
    file.path.write_text(json.dumps({key: entry for key in entries}))
    choose("auto", KIND, CPU, decisions=file, measure=fake)
    assert len(fake.asked) == 2


def test_a_folder_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    libraries.install(monkeypatch, "flashinfer")
    (tmp_path / "file").write_text("not a folder")
    blocked = DecisionFile(tmp_path / "file" / "attention.json")
    fake = Fake(triton=times(10, 10, 10), flashinfer=times(5, 5, 5))
    assert choose("auto", KIND, CPU, decisions=blocked, measure=fake).decode == "flashinfer"


def test_where_the_file_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "blocktable" / "attention.json"
    for relative in ("", "some/folder"):  # the standard says that these do not count
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert default_path() == Path.home() / ".cache" / "blocktable" / "attention.json"


def test_forced_by_name(monkeypatch: pytest.MonkeyPatch, file: DecisionFile) -> None:
    libraries.install(monkeypatch, "flashinfer", "flash_attn_interface")
    fake = Fake(triton=times(10, 10, 10), flash_attn=times(50, 50, 50))
    got = choose("flash_attn", KIND, CPU, decisions=file, measure=fake)
    assert got == Choice(*["flash_attn"] * 3) and fake.asked == [["flash_attn"]]
    assert choose("flash_attn", KIND, CPU, decisions=file, measure=no_measure) == got


@pytest.mark.parametrize(
    ("wanted", "change", "text"),
    [("flashinfer", {}, "FlashInfer is not installed"),
     ("flash_attn", {"has_sinks": True}, "serve layers .4/2 heads, size 64.*attention sinks"),
     ("cuda", {}, "'cuda'; it may be auto, triton, flashinfer, flash_attn")],
)  # fmt: skip
def test_forced_and_not_possible(
    monkeypatch: pytest.MonkeyPatch, file: DecisionFile, wanted: str, change: dict[str, Any],
    text: str,
) -> None:  # fmt: skip
    libraries.install(monkeypatch, "flash_attn_interface")
    with pytest.raises(ConfigError, match=text):
        choose(wanted, replace(KIND, **change), CPU, decisions=file, measure=no_measure)


def test_forced_with_wrong_results_is_refused_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, file: DecisionFile
) -> None:
    libraries.install(monkeypatch, "flashinfer")
    wrong = Fake(triton=times(10, 10, 10), flashinfer=Trial({}, "its output differs"))
    for _ in range(2):
        with pytest.raises(ConfigError, match="its output differs"):
            choose("flashinfer", KIND, CPU, decisions=file, measure=wrong)
    assert len(wrong.asked) == 2
    assert choose("auto", KIND, CPU, decisions=file, measure=no_measure) == Choice()
    mended = Fake(triton=times(10, 10, 10), flashinfer=times(9, 9, 9))
    assert choose("flashinfer", KIND, CPU, decisions=file, measure=mended).decode == "flashinfer"


def test_where_ours_could_not_run_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, file: DecisionFile
) -> None:
    libraries.install(monkeypatch, "flashinfer")
    fake = Fake(triton=Trial({}), flashinfer=Trial({}, "no memory"))
    for _ in range(2):
        assert choose("auto", KIND, CPU, decisions=file, measure=fake) == Choice()
    assert len(fake.asked) == 2


# -- the measurement itself, with the reference in the place of our kernels -----------------------


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """try_out on a CPU: small problems, the reference for our kernels, made-up times."""

    def reference(kind: LayerKind, problem: Any, *, in_graph: bool) -> Any:
        def attend(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            batch = problem.batch
            lens, n = torch.from_numpy(batch.lens), len(batch.lens)
            table = torch.from_numpy(problem.tables.host[:n].copy())
            found = paged_attention_reference(
                query, k, v, table, torch.from_numpy(batch.starts), lens, scale=kind.scale,
                sliding_window=kind.sliding_window, softcap=kind.softcap,
            )  # fmt: skip
            return torch.from_numpy(found.out).to(query.dtype)

        return attend

    seconds = {"ours": 10.0, "theirs": 9.0}
    monkeypatch.setattr(choosing, "our_attend", reference)
    monkeypatch.setattr(
        choosing, "make_problems", lambda kind, device: make_problems(kind, device, key_bytes=1)
    )
    monkeypatch.setattr(
        choosing, "_time",
        lambda attend, problem: seconds["ours" if "reference" in repr(attend) else "theirs"],
    )  # fmt: skip
    return seconds


@pytest.mark.parametrize("change", [{}, {"sliding_window": 7}, {"softcap": 4.0}])
@pytest.mark.parametrize("name", ["flashinfer", "flash_attn"])
def test_candidates_are_run_and_compared(
    monkeypatch: pytest.MonkeyPatch, on_cpu: dict[str, float], file: DecisionFile, name: str,
    change: dict[str, Any],
) -> None:  # fmt: skip
    installed = {"flashinfer": "flashinfer", "flash_attn": "flash_attn_interface"}[name]
    libraries.install(monkeypatch, installed)
    trials = try_out(replace(KIND, **change), CPU, [name])
    assert trials[name] == times(9.0, 9.0, 9.0) and trials["triton"] == times(10.0, 10.0, 10.0)
    assert choose("auto", replace(KIND, **change), CPU, decisions=file) == Choice(*[name] * 3)


@pytest.mark.parametrize("fault", ["wrong", "nan"])
def test_a_candidate_that_differs_is_dropped_with_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, on_cpu: dict[str, float], file: DecisionFile,
    caplog: pytest.LogCaptureFixture, fault: str,
) -> None:  # fmt: skip
    libraries.install(monkeypatch, "flashinfer")
    libraries.BROKEN[fault] = True
    assert choose("auto", KIND, CPU, decisions=file) == Choice()
    assert "flashinfer is not used: in a decode step its output differs" in caplog.text
    with pytest.raises(ConfigError, match="output differs from ours"):
        choose("flashinfer", KIND, CPU, decisions=file)


def test_a_candidate_that_raises_is_dropped_until_it_works(
    monkeypatch: pytest.MonkeyPatch, on_cpu: dict[str, float], file: DecisionFile
) -> None:
    libraries.install(monkeypatch, "flashinfer")
    working = libraries.BatchDecodeWithPagedKVCacheWrapper.plan

    def no_compiler(*_: Any, **__: Any) -> None:
        raise RuntimeError("Ninja build failed\nand much more")

    monkeypatch.setattr(libraries.BatchDecodeWithPagedKVCacheWrapper, "plan", no_compiler)
    assert choose("auto", KIND, CPU, decisions=file) == Choice()
    with pytest.raises(ConfigError, match=r"RuntimeError: Ninja build failed$"):
        choose("flashinfer", KIND, CPU, decisions=file)
    monkeypatch.setattr(libraries.BatchDecodeWithPagedKVCacheWrapper, "plan", working)
    assert choose("auto", KIND, CPU, decisions=file) == Choice(*["flashinfer"] * 3)


def test_problems_poison_what_no_row_may_read() -> None:
    for name, problem in make_problems(KIND, CPU, key_bytes=1).items():
        cache = torch.stack([problem.k_cache, problem.v_cache])
        assert bool(cache[:, 0].isnan().all())
        batch, table = problem.batch, problem.tables.host
        for row, length in zip(batch.rows, batch.lens, strict=False):
            at = torch.arange(int(length))
            blocks = torch.from_numpy(table[row].astype("int64"))[at // 16]
            assert not bool(cache[:, blocks, :, at % 16].isnan().any()), name
            last = table[row, (length - 1) // 16]
            assert bool(cache[:, int(last), :, (int(length) - 1) % 16 + 1 :].isnan().all())
        assert problem.query.shape[0] == batch.num_tokens
    assert batch.starts[1] > 1 and (batch.starts[2:] - batch.starts[1:-1] == 1).all()  # mixed


def test_difference_is_the_worst_tokens() -> None:
    want = torch.ones(3, 2, 4)
    got = want.clone()
    got[1] *= 1.1
    assert difference(got, want) == pytest.approx(0.1)
    got[1, 0, 0] = float("nan")
    assert difference(got, want) == float("inf") == difference(want[:2], want)
    assert difference(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2)) == 0.0

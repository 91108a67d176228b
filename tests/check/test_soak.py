"""Random traffic over tiny pools, and the soak command."""

from __future__ import annotations

import pytest

from blocktable.check import soak
from blocktable.check.traffic import run_traffic


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_traffic_ends_with_every_block_free(first: int) -> None:
    for seed in range(first, first + 10):
        run_traffic(seed, operations=120)


def test_soak_command_runs_and_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--minutes", "0", "--rounds", "2", "--operations", "40"]) == 0
    assert "soak passed: 1 rounds, 40 operations" in capsys.readouterr().out


def test_soak_names_the_seed_of_a_failing_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(seed: int, operations: int) -> None:
        raise RuntimeError("a block is lost")

    monkeypatch.setattr(soak, "run_traffic", fail)
    assert soak.main(["--minutes", "0", "--seed", "77"]) == 1
    assert "seed 77 (300 operations) failed: RuntimeError: a block is lost" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--minutes", "-1"], ["--minutes", "nan"], ["--minutes", "inf"],
        ["--minutes", "0", "--operations", "0"],
    ],
)  # fmt: skip
def test_soak_refuses_bad_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        soak.main(arguments)
    assert stop.value.code == 2

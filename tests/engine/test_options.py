"""Options and parameters of any type: taken as what they mean, or refused in one line by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from blocktable import LLM, SamplingParams
from blocktable.core.errors import ConfigError, RequestError
from blocktable.engine.option_checks import KINDS
from blocktable.engine.options import EngineOptions

STRANGE: list[Any] = [
    None, True, False, -1, 0, 1.5, float("nan"), float("inf"), -(10**30), 10**30, 10**400, "x", "",
    b"x", [], {}, (), object(), np.int64(3), np.float32(0.5), np.bool_(True), np.array([1]),
    np.array([1.5, 2.0]), np.array(2),
]  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(EngineOptions)])
def test_an_option_is_taken_or_named(name: str) -> None:
    for value in STRANGE:
        try:
            taken = getattr(EngineOptions(**{name: value}), name)
        except ConfigError as error:
            assert "\n" not in str(error) and (name in str(error) or "proposer" in str(error))
        else:
            assert taken is None or type(taken) in (bool, int, float, str), (name, value)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_a_parameter_is_taken_or_refused(name: str) -> None:
    for value in STRANGE:
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            assert "\n" not in str(error)


def test_every_option_has_a_check() -> None:
    names = {field.name for field in dataclasses.fields(EngineOptions)}
    assert names - KINDS.keys() == {"proposer"} and KINDS.keys() <= names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seqs": 4}, "there is no option 'max_seqs'; did you mean max_num_seqs?"),
        ({"zzz": 4}, "there is no option 'zzz'; known are "),
        ({"seed": "x"}, "seed must be an integer, got 'x'"),
        ({"seed": -1}, "seed must be in [0, 18446744073709551615], got -1"),
        ({"num_host_blocks": -1}, "num_host_blocks must be in [0, 2147483647], got -1"),
        ({"policy": "lifo"}, "policy must be one of fcfs, priority, got 'lifo'"),
        ({"rank_timeout": float("nan")}, "rank_timeout must be in (0, 1e+09], got nan"),
        ({"draft_ngram_min": 5}, "draft_ngram_min 5 is above draft_ngram_max 4"),
    ],
)
def test_a_bad_option_is_refused_before_a_model_is_looked_for(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM("there/is/no/such/model", **options)
    assert str(caught.value).startswith(message)


def test_numpy_scalars_are_numbers() -> None:
    given: dict[str, Any] = {
        "num_blocks": np.int64(7), "memory_share": np.float32(0.5), "seed": np.uint8(3)
    }  # fmt: skip
    options = EngineOptions(**given)
    assert (options.num_blocks, options.memory_share, options.seed) == (7, 0.5, 3)
    assert type(options.num_blocks) is int and type(options.memory_share) is float

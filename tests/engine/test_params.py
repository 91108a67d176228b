"""Bad parameters are refused once, at the border, with the field, the value and the limit."""

import numpy as np
import pytest

from blocktable.core.errors import RequestError
from blocktable.engine.params import SamplingLimits, SamplingParams, check_prompt_ids

BAD = [
    ({"n": 0}, "n must be in [1, 128], got 0"),
    ({"n": 10**9}, "n must be in [1, 128], got 1000000000"),
    ({"n": True}, "n must be an integer, got True"),
    ({"n": 1.5}, "n must be an integer, got 1.5"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"max_tokens": -1}, "max_tokens must be at least 1, got -1"),
    ({"max_tokens": "9"}, "max_tokens must be an integer, got '9'"),
    ({"min_tokens": -1}, "min_tokens must be at least 0, got -1"),
    ({"min_tokens": 17}, "min_tokens must be at most max_tokens (16), got 17"),
    ({"temperature": -1}, "temperature must be in [0, 100], got -1"),
    ({"temperature": float("nan")}, "temperature must be in [0, 100], got nan"),
    ({"temperature": float("inf")}, "temperature must be in [0, 100], got inf"),
    ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ({"top_k": -2}, "top_k must be in [-1, 2147483647], got -2"),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0"),
    ({"top_p": 1.01}, "top_p must be in (0, 1], got 1.01"),
    ({"min_p": -0.1}, "min_p must be in [0, 1], got -0.1"),
    ({"repetition_penalty": 0}, "repetition_penalty must be in (0, 100], got 0"),
    ({"presence_penalty": 2.1}, "presence_penalty must be in [-2, 2], got 2.1"),
    ({"frequency_penalty": -3}, "frequency_penalty must be in [-2, 2], got -3"),
    ({"seed": 2**63}, "seed must be in"),
    ({"seed": 0.5}, "seed must be an integer, got 0.5"),
    ({"logprobs": 101}, "logprobs must be in [0, 100], got 101"),
    ({"stop": [""]}, "stop[0] must be a string that is not empty, got ''"),
    ({"stop": 5}, "stop must be a string or a list of strings, got 5"),
    ({"stop": ["a" * 1025]}, "stop[0] has 1025 characters, the limit is 1024"),
    ({"stop": ["a"] * 65}, "stop has 65 strings, the limit is 64"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0] must be in [0, 2147483647], got -1"),
    ({"stop_token_ids": "ab"}, "stop_token_ids must be a list of token ids, got 'ab'"),
    ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
    ({"logit_bias": {1: 101}}, "logit_bias[1] must be in [-100, 100], got 101"),
    ({"logit_bias": {"x": 1}}, "logit_bias key must be a token id, got 'x'"),
    ({"logit_bias": [1]}, "logit_bias must map token ids to numbers, got [1]"),
    ({"allowed_token_ids": []}, "allowed_token_ids must name at least 1 token, got 0"),
    (
        {"allowed_token_ids": [1], "bad_token_ids": [1]},
        "bad_token_ids forbids every token of allowed_token_ids",
    ),
    ({"json_schema": {}}, "json_schema must be a text that is not empty, got {}"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[str(b[0])[:40] for b in BAD])
def test_a_bad_field_is_named_with_its_limit(fields, message):
    with pytest.raises(RequestError) as error:
        SamplingParams(**fields)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_good_values_are_brought_to_one_form():
    params = SamplingParams(
        temperature=0, top_k=-1, stop="end", logit_bias={"5": 1}, max_tokens=np.int64(7)
    )
    assert params.greedy
    assert (params.top_k, params.stop_strings, params.logit_bias) == (0, ("end",), {5: 1.0})
    assert type(params.max_tokens) is int
    assert SamplingParams(max_tokens=None, min_tokens=10**6).max_tokens is None
    assert params.replace(top_k=3).top_k == 3


def test_limits_are_configurable():
    assert SamplingParams(n=500, limits=SamplingLimits(max_n=1000)).n == 500
    with pytest.raises(RequestError, match=r"n must be in \[1, 4\], got 5"):
        SamplingParams(n=5, limits=SamplingLimits(max_n=4))


@pytest.mark.parametrize("field", ["stop_token_ids", "bad_token_ids", "allowed_token_ids"])
def test_ids_past_the_vocabulary_are_refused_for_the_model(field):
    SamplingParams(**{field: [99]}).check_model(100)
    with pytest.raises(RequestError, match=f"{field} holds token id 100, the vocabulary has 100"):
        SamplingParams(**{field: [100]}).check_model(100)
    with pytest.raises(RequestError, match="logit_bias holds token id 100"):
        SamplingParams(logit_bias={100: 1}).check_model(100)


def test_bans_must_leave_a_token():
    with pytest.raises(RequestError, match="forbids all 3 tokens"):
        SamplingParams(bad_token_ids=[0, 1, 2]).check_model(3)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt is empty: at least 1 token is needed"),
        ([-1], "token id -1 at position 0 is outside the vocabulary [0, 99]"),
        ([5, 100], "token id 100 at position 1 is outside the vocabulary [0, 99]"),
        ([2**63], f"token id {2**63} at position 0 is outside the vocabulary"),
        ([2**80], f"must be in [0, 99], got {2**80}"),
        ([1, -(2**70)], f"must be in [0, 99], got {-(2**70)}"),
        ([1.5], "must be integers, got 1.5"),
        ([True], "must be integers, got True"),
        ([None], "must be integers, got None"),
        (["a"], "must be integers, got 'a'"),
        ([[1]], "must be integers, got [1]"),
        ("abc", "must be a list of token ids, got 'abc'"),
        (5, "must be a list of token ids, got 5"),
        ([1] * 32, "the prompt has 32 tokens, the limit is 31"),
        (np.array([1.5]), "must be in [0, 99]"),
        (np.array([[1]]), "an array of shape [1, 1]"),
    ],
)
def test_bad_prompts_are_refused(ids, message):
    with pytest.raises(RequestError) as error:
        check_prompt_ids(ids, 100, 32)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "ids", [[99], [0] * 31, (1, 2), np.array([1, 2]), [np.int32(4), 5]], ids=str
)
def test_good_prompts_pass_as_plain_lists(ids):
    out = check_prompt_ids(ids, 100, 32)
    assert out == [int(i) for i in ids]
    assert all(type(i) is int for i in out)

"""Every bad field is a 400, 413 or 422 that names it, never a 500, and the next request works."""

import json

import httpx
import pytest

OK = {"model": "tiny", "prompt": "ok", "max_tokens": 2}
JSON = {"content-type": "application/json"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def still_serves(http, server):
    assert http.post("/v1/completions", json=OK).status_code == 200
    server.wait_idle()


def refused(http, server, path, fields, param, words=()):
    answer = http.post(path, content=json.dumps(fields), headers=JSON)
    assert answer.status_code in (400, 422), answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    for word in words:
        assert word in error["message"], error
    still_serves(http, server)


PROMPTS = [
    ("", "empty"), ([], "empty"), ([[]], "empty"), (["ok", ""], "empty"), ([-1], "-1"),
    ([300], "[0, 299]"), ([2**63], str(2**63)), ([1.5], "1.5"), ([True], "True"), (5, "int"),
    (None, "NoneType"), ({"a": 1}, "dict"), ([["a"]], "'a'"), ([[1], [300]], "[0, 299]"),
    ("x" * 600, "600 tokens, the limit is 511"), (["a"] * 257, "257 entries, the limit is 256"),
    ("\ud800", "Unicode"), ([10**40], "[0, 299]"), ([None], "None"), ([[1, [2]]], "[2]"),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "word"), PROMPTS, ids=lambda x: str(x)[:24])
def test_bad_prompts(http, server, prompt, word):
    refused(http, server, "/v1/completions", {**OK, "prompt": prompt}, "prompt", [word])


def test_a_missing_prompt(http, server):
    refused(http, server, "/v1/completions", {"model": "tiny"}, "prompt", ["required"])


FIELDS = [
    ("n", 0, "1"), ("n", 10**9, "64"), ("n", 1.5, ""), ("n", "2", ""), ("n", True, ""),
    ("max_tokens", 0, "1"), ("max_tokens", -1, "1"), ("max_tokens", 10**12, "510"),
    ("max_tokens", 511, "510"), ("temperature", -1, "0"), ("temperature", 101, "100"),
    ("temperature", "hot", ""), ("top_p", 0, "0"), ("top_p", 1.1, "1"), ("top_k", -2, "-1"),
    ("min_p", 2, "1"), ("presence_penalty", 3, "2"), ("frequency_penalty", -3, "-2"),
    ("repetition_penalty", 0, "0"), ("seed", 2**63, ""), ("seed", 0.5, ""), ("stop", "", "stop"),
    ("stop", [""], "stop[0]"), ("stop", 5, ""), ("stop", ["a"] * 65, "64"),
    ("stop_token_ids", [300], "300"), ("stop_token_ids", [-1], ""), ("stop_token_ids", "a", ""),
    ("logit_bias", {"300": 1}, "300"), ("logit_bias", {"x": 1}, "'x'"),
    ("logit_bias", {"1": 101}, "100"), ("logit_bias", [1], ""), ("logit_bias", {"-1": 1}, ""),
    ("logprobs", 101, "100"), ("logprobs", -1, "0"), ("min_tokens", -1, "0"),
    ("min_tokens", 3, "max_tokens (2)"), ("cache_salt", "", "1"), ("cache_salt", 5, ""),
    ("cache_salt", "x" * 10**6, "128"), ("best_of", 3, "n (1)"), ("suffix", "x", "suffix"),
    ("response_format", {"type": "xml"}, ""), ("stream", "yes", ""), ("priority", 2**40, ""),
    ("stream_options", {"include_usage": True}, "stream"), ("allowed_token_ids", [], "1"),
    ("allowed_token_ids", [300], "300"), ("ignore_eos", 1, ""),
    ("retention", {"priority": 4}, "3"), ("retention", {"priority": -1}, "0"),
    ("retention", {"priority": 1.5}, ""), ("retention", {"seconds": 0}, "0"),
    ("retention", {"seconds": 1e9}, "86400"), ("retention", {"seconds": "60"}, ""),
    ("retention", {"tokens": 0}, "1"), ("retention", 3, ""), ("retention", [], ""),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "word"), FIELDS, ids=lambda x: str(x)[:24])
def test_bad_fields(http, server, field, value, word):
    refused(http, server, "/v1/completions", {**OK, field: value}, field, [field, word])


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_numbers_that_are_none(http, server, value):
    body = f'{{"model": "tiny", "prompt": "x", "temperature": {value}}}'
    answer = http.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code in (400, 422), answer.text
    still_serves(http, server)


CHATS = [
    ({"messages": []}, "messages"), ({"messages": None}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages"), ({"messages": ["x"]}, "messages"),
    ({"messages": [{"role": "bad", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ({"top_logprobs": 5}, "top_logprobs"), ({"logprobs": 5}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 101}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema",
      "json_schema": {"schema": {"type": "nothing"}}}}, "response_format"),
    ({"tools": "x"}, "tools"), ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), CHATS, ids=lambda x: str(x)[:40])
def test_bad_chats(http, server, fields, param):
    refused(http, server, "/v1/chat/completions", {**CHAT, **fields}, param)


BODIES = [
    b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe\x00", b'{"prompt": "\xc3\x28"}',
    b"[" * 100_000, b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", b'{"prompt": "x"',
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda b: repr(b[:20]))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_bodies_that_are_no_request(http, server, path, body):
    answer = http.post(path, content=body, headers=JSON)
    assert answer.status_code in (400, 422), answer.text
    assert answer.json()["error"]["message"]
    still_serves(http, server)


def test_a_huge_body_is_refused_by_its_length_and_while_it_comes(http, server):
    huge = b'{"prompt": "' + b"x" * (17 * 2**20) + b'"}'
    assert http.post("/v1/completions", content=huge).status_code == 413

    def pieces():
        for _ in range(17):
            yield b"x" * 2**20

    answer = http.post("/v1/completions", content=pieces(), headers=JSON)
    assert answer.status_code == 413
    still_serves(http, server)


def test_another_model_is_404(http):
    answer = http.post("/v1/completions", json={**OK, "model": "gpt-4"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_good_edges_are_served(http, server):
    for fields in (
        {"prompt": [299]}, {"cache_salt": None}, {"max_tokens": 510, "prompt": "ab", "stop": "a"},
        {"temperature": 0, "top_k": -1}, {"prompt": [[1], [2, 3]]}, {"cache_salt": "x" * 128},
        {"n": None, "stop": None, "logit_bias": None}, {"unknown_field": 1},
    ):  # fmt: skip
        answer = http.post("/v1/completions", json={**OK, **fields})
        assert answer.status_code == 200, answer.text
    server.wait_idle()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "u"}]}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_bad_tokenize_requests(http, server, path, body, param):
    refused(http, server, path, body, param)


def test_tokenize_and_back(http):
    ids = http.post("/tokenize", json={"prompt": "héllo"}).json()
    assert ids["count"] == len(ids["tokens"]) == 6
    assert ids["max_model_len"] == 512
    assert http.post("/detokenize", json={"tokens": ids["tokens"]}).json() == {"prompt": "héllo"}
    chat = http.post("/tokenize", json={"messages": CHAT["messages"], "return_token_strs": True})
    assert "".join(chat.json()["token_strs"]).startswith("user: x")

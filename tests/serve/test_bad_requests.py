"""Every bad field is a 400, 413 or 422 that names it, never a 500, and the next request works."""

import gzip
import json
import re

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


FORMS = [
    ("stop", [None], "stop.0", "a valid string"), ("stop", ["a", 5], "stop.1", "got 5"),
    ("stop", 5, "stop", "a valid string or a valid list, got 5"),
    ("stop", {"a": 1}, "stop", "a valid string or a valid list"),
    ("guided_json", 5, "guided_json", "a valid string or a valid dictionary"),
    ("structured_outputs", {"json": []}, "structured_outputs.json", "dictionary"),
]  # fmt: skip
CHAT_FORMS = [
    ("tool_choice", {"type": "function"}, "tool_choice.function", "required"),
    ("tool_choice", {"function": {}}, "tool_choice.function.name", "required"),
    ("tool_choice", {"function": {"name": 5}}, "tool_choice.function.name", "got 5"),
    ("tool_choice", "often", "tool_choice", "'required'"),
    ("tool_choice", 5, "tool_choice", "'required'"),
    ("messages", [{"role": "user", "content": ["x"]}], "messages.0.content.0", "got 'x'"),
    ("messages", [{"role": "user", "content": 5}], "messages.0.content", "string or a valid list"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text",
     "a string, got None"),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}],
     "messages[0].content[0].text", "a string, got 5"),
    ("messages", [{"role": "user", "content": [{}]}], "messages[0].content[0].type", "'text'"),
    ("messages", [{"role": "user", "content": [{"type": "image_url"}]}],
     "messages[0].content[0].type", "'text', got 'image_url'"),
    ("messages", [{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls", "a list"),
    ("messages", [{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]",
     "function.name"),
    ("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": "f",
      "arguments": "{"}}]}], "messages[0].tool_calls[0]", "not JSON"),
    ("tools", [{"function": {}}], "tools.0.function.name", "required"),
    ("max_completion_tokens", 10**6, "max_completion_tokens", "must be at most"),
    ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs", "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "place", "word"), FORMS, ids=lambda x: str(x)[:30])
def test_of_a_field_with_several_forms_the_nearest_is_named(
    http, server, field, value, place, word
):
    names_the_place(http, server, "/v1/completions", {**OK, field: value}, place, word)


@pytest.mark.parametrize(("field", "value", "place", "word"), CHAT_FORMS, ids=lambda x: str(x)[:30])
def test_a_refused_chat_names_the_very_place(http, server, field, value, place, word):
    names_the_place(http, server, "/v1/chat/completions", {**CHAT, field: value}, place, word)


def names_the_place(http, server, path, fields, place, word):
    answer = http.post(path, json=fields)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert re.split(r"[ :]", error["message"])[0] == place, error
    assert word in error["message"] and error["param"] == re.split(r"[.\[]", place)[0], error
    still_serves(http, server)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_a_forgotten_content_type_is_named(http, kind):
    headers = {} if kind is None else {"content-type": kind}
    answer = http.post("/v1/completions", content=json.dumps(OK), headers=headers)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and "Content-Type: application/json" in message
    assert (kind or "none") in message


def test_where_a_body_stops_being_json_is_told(http):
    answer = http.post("/v1/completions", content=b'{"prompt": "x", "n": }', headers=JSON)
    assert "at character 21" in answer.json()["error"]["message"]
    answer = http.post("/v1/completions", content=b'{"prompt": "x', headers=JSON)
    assert "starting at character 11" in answer.json()["error"]["message"]
    zipped = gzip.compress(json.dumps(OK).encode())
    answer = http.post(
        "/v1/completions", content=zipped, headers={**JSON, "content-encoding": "gzip"}
    )
    assert answer.status_code == 400 and "gzip" in answer.json()["error"]["message"]


def test_what_never_fits_is_no_429(http, server):
    """A client told to come back later would come back for ever."""
    answer = http.post("/v1/completions", json={**OK, "prompt": ["a"] * 256, "n": 64})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "n", error
    assert "16384" in error["message"] and "264" in error["message"]
    assert "retry-after" not in answer.headers
    still_serves(http, server)


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "x"}),
                                            ("/detokenize", {"tokens": [1]})])  # fmt: skip
def test_tokens_of_another_model_are_404_too(http, path, body):
    answer = http.post(path, json={**body, "model": "gpt-4"})
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "model"
    assert http.post(path, json={**body, "model": "tiny"}).status_code == 200


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("extra", [
    {}, {"tools": [TOOL]}, {"add_generation_prompt": False},
    {"chat_template_kwargs": {"add_generation_prompt": False}},
    {"chat_template_kwargs": {"continue_final_message": True}},
    {"tools": [TOOL], "chat_template_kwargs": {"continue_final_message": True}},
], ids=str)  # fmt: skip
def test_tokenize_counts_what_the_chat_is_charged(http, extra):
    """The same fields reach the template on both paths."""
    told = http.post("/tokenize", json={"messages": CHAT["messages"], **extra})
    asked = http.post("/v1/chat/completions", json={**CHAT, **extra})
    assert told.status_code == asked.status_code == 200, (told.text, asked.text)
    assert told.json()["count"] == asked.json()["usage"]["prompt_tokens"]


def test_a_load_balancer_may_ask_for_the_head_of_health(http):
    assert http.head("/health").status_code == http.get("/health").status_code == 200

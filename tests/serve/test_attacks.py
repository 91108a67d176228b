"""Requests made to break something: each is answered below 500 and in time, memory stays where it
was, and the next request works."""

import json
import re
import time

import httpx
import psutil
import pytest
from serving import running

from blocktable.serve.config import ServerConfig

JSON = {"content-type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONE = "\ud800"
TOOLS = '"tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}]'


@pytest.fixture(scope="module")
def target():
    with running(ServerConfig(port=0)) as server, httpx.Client(
        base_url=server.url, timeout=60
    ) as http:  # fmt: skip
        yield server, http


def survives(target, path, content, *, seconds=4.0, method="POST", headers=JSON):
    """The status of an answer that came in time and is no server's error; then all goes on."""
    server, http = target
    start = time.perf_counter()
    answer = http.request(method, path, content=content, headers=headers)
    assert time.perf_counter() - start < seconds
    assert answer.status_code < 500, answer.text[:300]
    assert len(answer.content) < 2000 or answer.status_code == 200
    after = http.post(COMPLETIONS, json={"prompt": "ok", "max_tokens": 2})
    assert after.status_code == 200
    server.wait_idle()
    return answer.status_code


def refused(target, path, fields, param, **how):
    """The same, and a 400 that names the field."""
    _, http = target
    content = fields if isinstance(fields, (str, bytes)) else json.dumps(fields)
    assert survives(target, path, content, **how) in (400, 422)
    error = http.post(path, content=content, headers=JSON).json()["error"]
    assert error["param"] == param, error


def chat(**fields):
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **fields}


def completion(**fields):
    return {"prompt": "x", "max_tokens": 2, **fields}


NESTED = {
    "tool": (CHAT, TOOLS), "tool required": (CHAT, '"tool_choice": "required", ' + TOOLS),
    "schema": (CHAT, '"response_format": {"type": "json_schema", "json_schema": {"schema": %s}}'),
    "guide": (CHAT, '"guided_json": %s'), "template": (CHAT, '"chat_template_kwargs": {"x": %s}'),
    "nobody's": (CHAT, '"zzz": %s'), "options": (CHAT, '"stream_options": %s'),
    "choice": (CHAT, '"tool_choice": %s'), "bias": (COMPLETIONS, '"logit_bias": {"1": %s}'),
    "stop": (COMPLETIONS, '"stop": %s'), "prompts": (COMPLETIONS, '"prompt": %s'),
}  # fmt: skip


@pytest.mark.parametrize("depth", [100, 200, 900, 20_000])
@pytest.mark.parametrize("name", sorted(NESTED))
def test_deep_nesting(target, name, depth):
    path, form = NESTED[name]
    start = '"messages": [{"role": "user", "content": "x"}]' if path == CHAT else '"prompt": "x"'
    for opening, closing in ('{"a":', "}"), ("[", "]"):
        value = opening * depth + "1" + closing * depth
        survives(target, path, f'{{{start}, "max_tokens": 2, {form % value}}}')
    arguments = json.dumps('{"a":' * depth + "1" + "}" * depth)
    head = '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", '
    survives(target, CHAT, head + f'"arguments": {arguments}}}}}]}}]}}')


HUGE = "x" * (10 * 2**20)
LARGE = [
    (COMPLETIONS, completion(prompt=HUGE), "prompt"),
    (COMPLETIONS, completion(prompt="hello world " * 800_000), "prompt"),
    (COMPLETIONS, completion(prompt=[1] * 2_000_000), "prompt"),
    (COMPLETIONS, completion(prompt=["a"] * 1_000_000), "prompt"),
    (COMPLETIONS, completion(stop=HUGE), "stop"),
    (COMPLETIONS, completion(stop=["a"] * 1_000_000), "stop"),
    (COMPLETIONS, completion(cache_salt=HUGE), "cache_salt"),
    (COMPLETIONS, completion(guided_regex=HUGE), "guided_regex"),
    (COMPLETIONS, completion(guided_choice=["a"] * 100_000), "guided_choice"),
    (COMPLETIONS, completion(stop_token_ids=[1] * 1_000_000), "stop_token_ids"),
    (COMPLETIONS, completion(logit_bias={str(i): 1 for i in range(100_000)}), "logit_bias"),
    (COMPLETIONS, completion(n=64, prompt=["a"] * 256), "n"),  # more than the queue ever holds
    (CHAT, chat(messages=[{"role": HUGE, "content": "x"}]), "messages"),
    (CHAT, chat(messages=[{"role": "user", "content": HUGE}]), "messages"),
    (CHAT, chat(messages=[{"role": "user", "content": "x"}] * 200_000), "messages"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}]),
     "messages"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f", "description": HUGE}}]),
     "messages"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]),
     "tools"),
    (CHAT, chat(tool_choice="required", tools=[{"type": "function", "function": {
        "name": "f", "parameters": {"properties": {f"p{i}": {} for i in range(20_000)}}}}]),
     "tools"),
    ("/tokenize", {"prompt": HUGE}, "prompt"),
    ("/detokenize", {"tokens": [1] * 3_000_000}, "tokens"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(LARGE)))
def test_large_fields(target, case):
    path, fields, param = LARGE[case]
    # tools enter the prompt: which of the two limits is met first does not matter
    content = json.dumps(fields)
    assert survives(target, path, content) in (400, 422)
    error = target[1].post(path, content=content, headers=JSON).json()["error"]
    assert error["param"] in {param, "messages" if param == "tools" else param}, error
    assert len(error["message"]) < 700


def test_memory_does_not_grow_by_what_was_refused(target):
    process = psutil.Process()
    content = json.dumps(completion(prompt=HUGE)).encode()
    for _ in range(3):
        survives(target, COMPLETIONS, content)
    before = process.memory_info().rss
    for _ in range(12):
        survives(target, COMPLETIONS, content)
    assert process.memory_info().rss - before < 60 * 2**20


SURROGATES = [
    (COMPLETIONS, completion(model=LONE)), (COMPLETIONS, completion(stop=LONE)),
    (COMPLETIONS, completion(cache_salt=LONE)), (COMPLETIONS, completion(user=LONE)),
    (COMPLETIONS, completion(guided_regex=LONE)), (COMPLETIONS, completion(guided_grammar=LONE)),
    (COMPLETIONS, completion(guided_choice=[LONE])), (COMPLETIONS, completion(**{LONE: 1})),
    (COMPLETIONS, completion(logit_bias={LONE: 1})),
    (COMPLETIONS, completion(guided_json={"enum": [LONE]})),
    (COMPLETIONS, completion(guided_json=LONE)),
    (CHAT, chat(messages=[{"role": LONE, "content": "x"}])),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": LONE}]}])),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": LONE}}])),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f", "description": LONE}}])),
    (CHAT, chat(chat_template_kwargs={LONE: LONE})),
    (CHAT, chat(messages=[{"role": "assistant", "tool_calls": [
        {"function": {"name": LONE, "arguments": '{"a": "\\ud800"}'}}]}])),
    ("/tokenize", {"prompt": LONE}),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(SURROGATES)))
def test_half_a_surrogate_pair_anywhere(target, case):
    path, fields = SURROGATES[case]
    survives(target, path, json.dumps(fields))


NUMBERS = ["n", "seed", "logprobs", "prompt_logprobs", "top_k", "max_tokens", "min_tokens",
           "priority", "best_of", "temperature", "top_p", "min_p", "presence_penalty",
           "repetition_penalty"]  # fmt: skip


@pytest.mark.parametrize("field", NUMBERS)
def test_odd_numbers(target, field):
    for text in ("1" + "0" * 100, "-1" + "0" * 100, "1e308", "NaN", "-Infinity", "1e999", "0.5",
                 "-0", "[]", "{}", '"1"', "true", "9223372036854775808", "1e-400"):  # fmt: skip
        survives(target, COMPLETIONS, f'{{"prompt": "x", "stop": "q", "{field}": {text}}}')
    for text in ("NaN", "Infinity", "1e999"):
        for form in ('"chat_template_kwargs": {"x": %s}', '"guided_json": {"const": %s}',
                     '"zzz": %s', '"logit_bias": {"1": %s}'):  # fmt: skip
            survives(target, COMPLETIONS, f'{{"prompt": "x", "max_tokens": 2, {form % text}}}')


@pytest.mark.parametrize("key", ["9" * 5000, " 1", "1_0", "١", "+1", "1.0", "", "-0", "³"])
def test_odd_token_ids_in_a_bias(target, key):
    survives(target, COMPLETIONS, json.dumps(completion(logit_bias={key: 1})))


def test_a_template_of_the_clients_own_is_refused(target):
    for name in ("chat_template", "tokenize", "tools", "conversation", "return_dict",
                 "tokenizer_kwargs", "padding"):  # fmt: skip
        fields = chat(chat_template_kwargs={name: "{% for i in range(10**9) %}x{% endfor %}"})
        refused(target, CHAT, fields, "chat_template_kwargs")
    for name in ("messages", "bos_token", "loop", "range", "raise_exception", "", "documents",
                 "continue_final_message", "add_generation_prompt", "self"):  # fmt: skip
        for value in (True, "x", [1], {"a": 1}, None):
            survives(target, CHAT, json.dumps(chat(chat_template_kwargs={name: value})))


@pytest.mark.parametrize("role", ["bad", "🦜", "\0", "tool", "developer", "function", "x" * 5000])
def test_odd_roles(target, role):
    survives(target, CHAT, json.dumps(chat(messages=[{"role": role, "content": "x"}])))


TYPES = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "",
         "text/json", "application/json; charset=utf-16", "application/vnd.x+json",
         "application/xml"]  # fmt: skip


@pytest.mark.parametrize("content_type", [*TYPES, None])
def test_other_content_types(target, content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    survives(target, COMPLETIONS, b'{"prompt": "x", "max_tokens": 1}', headers=headers)


BODIES = [
    '{"prompt": "x", "max_tokens": 1}'.encode("utf-16"), b"\x1f\x8b\x08broken",
    '{"prompt": "x", "max_tokens": 1}'.encode("utf-32"), b"1" * 100_000, b'"' + b"x" * 10**6 + b'"',
    b'\xef\xbb\xbf{"prompt": "x", "max_tokens": 1}', b'{"prompt": "x",}', b'{"prompt": "x"} tail',
    b'{"prompt": "\x00"}', b'{"prompt": "x", "n": 01}', b"{'prompt': 'x'}", b"\xff" * 1000,
    b'{"prompt": "\\ud83d", "max_tokens": 1}', b"[" * 10**6, b'{"a":' * 10**6,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda b: repr(b[:20]))
def test_odd_bodies(target, body):
    survives(target, COMPLETIONS, body)


def test_of_two_equal_keys_the_last_counts(target):
    body = b'{"prompt": 5, "prompt": "x", "max_tokens": -1, "max_tokens": 1}'
    assert survives(target, COMPLETIONS, body) == 200


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "BREW"])
def test_other_methods(target, method):
    paths = [COMPLETIONS, CHAT, "/v1/models", "/tokenize", "/health", "/metrics", "/inspect", "/"]
    for path in paths:
        assert survives(target, path, None, method=method, headers={}) in (200, 400, 404, 405)


def test_odd_paths_and_queries(target):
    paths = ["/v1/models/%00", "/v1/models/..%2f..%2fx", "/v1/models/%ff%fe", "//", "/%",
             "/v1/models/" + "a" * 30_000, "/inspect/static/..%2fapp.py", "/inspect/static/%00",
             "/inspect/static/../../app.py"]  # fmt: skip
    for value in ("0", "-1", "x", "9" * 30, "%00", "1e5", "NaN"):
        paths += [f"/inspect/block/{value}", f"/inspect/request/{value}",
                  f"/inspect/state?history={value}"]  # fmt: skip
    for path in paths:
        survives(target, path, None, method="GET", headers={})


@pytest.mark.parametrize("key", ["wrong", "é", "Bearer", "x" * 30_000])
def test_wrong_keys(key):
    with running(ServerConfig(port=0, api_key="right")) as server:
        given = f"Bearer {key}".encode("latin-1")
        for headers in ({b"authorization": given}, {b"authorization": key.encode("latin-1")}):
            with httpx.Client(base_url=server.url) as http:
                assert http.get("/v1/models", headers=headers).status_code == 401
        query = re.sub(r"[^\w]", "", key)[:100]
        assert httpx.get(f"{server.url}/inspect?key={query}").status_code == 401
        assert httpx.get(f"{server.url}/inspect?key=right").status_code == 200


AT_ODDS = [
    completion(n=20), completion(bad_token_ids=list(range(299))),
    completion(guided_choice=["ab"], bad_token_ids=list(range(256))),
    completion(guided_choice=["ab"], allowed_token_ids=[5]),
    completion(guided_choice=["a"], min_tokens=2), completion(guided_choice=["a"], ignore_eos=True),
    completion(allowed_token_ids=[256], min_tokens=2, ignore_eos=True),
    completion(guided_regex="a{500}"), completion(echo=True, logprobs=1, prompt=[0]),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(AT_ODDS)))
def test_fields_at_odds_with_each_other(target, case):
    survives(target, COMPLETIONS, json.dumps(AT_ODDS[case]))

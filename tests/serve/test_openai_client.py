"""The official client finds what it expects, streamed and whole."""

import json
import math

import openai
import pytest
import torch


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def test_models(client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion_equals_the_library(client, server):
    answer = client.completions.create(
        model="tiny", prompt="hello", max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == 17
    again = client.completions.create(
        model="tiny", prompt=server.llm.encode("hello"), max_tokens=12, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert again.choices[0].text == answer.choices[0].text


@pytest.mark.parametrize("extra", [{}, {"stop": ["a", "e"]}, {"n": 3, "seed": 5}])
def test_streamed_text_equals_whole_text(client, extra):
    fields = {
        "model": "tiny", "prompt": ["ab", "the quick brown fox"], "max_tokens": 30,
        "temperature": 1.0, "seed": 7, **extra,
    }  # fmt: skip
    whole = client.completions.create(**fields)
    texts = dict.fromkeys(range(len(whole.choices)), "")
    reasons, usage = {}, None
    stream = client.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {c.index: c.text for c in whole.choices}
    assert reasons == {c.index: c.finish_reason for c in whole.choices}
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens == 21


def test_chat_streams_and_counts(client):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    fields = {"model": "tiny", "messages": messages, "max_tokens": 20, "seed": 3}
    whole = client.chat.completions.create(**fields)
    message = whole.choices[0].message
    assert message.role == "assistant"
    parts, roles = [], []
    for chunk in client.chat.completions.create(**fields, stream=True):
        parts.append(chunk.choices[0].delta.content or "")
        roles.append(chunk.choices[0].delta.role)
    assert "".join(parts) == message.content
    assert roles[0] == "assistant"
    text_parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    plain = [{"role": "user", "content": "hi"}]
    one, two = (
        client.chat.completions.create(model="tiny", messages=m, max_tokens=8, seed=1)
        for m in (text_parts, plain)
    )
    assert one.choices[0].message.content == two.choices[0].message.content


def test_a_repeated_prompt_comes_from_the_cache_unless_the_salt_differs(client):
    fields = {"model": "tiny", "prompt": "a prompt of some length, repeated", "max_tokens": 1}
    for salt, cached in ((None, 0), (None, 32), ("other", 0), ("other", 32), (None, 32)):
        body = {} if salt is None else {"cache_salt": salt}
        answer = client.completions.create(**fields, extra_body=body)
        assert answer.usage.prompt_tokens_details.cached_tokens == cached


def test_logprobs(client):
    answer = client.completions.create(
        model="tiny", prompt="x", max_tokens=4, temperature=0, logprobs=2,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 4
    for value, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert math.isclose(max(top.values()), value)
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=3, temperature=0,
        logprobs=True, top_logprobs=5,
    )  # fmt: skip
    first = chat.choices[0].logprobs.content[0]
    assert len(first.top_logprobs) == 5
    assert first.top_logprobs[0].logprob == first.logprob
    assert bytes(first.bytes)
    streamed = []
    for chunk in client.completions.create(
        model="tiny", prompt="x", max_tokens=4, temperature=0, logprobs=2, stream=True,
        extra_body={"ignore_eos": True},
    ):  # fmt: skip
        streamed += chunk.choices[0].logprobs.tokens
    assert streamed == logprobs.tokens


def test_logit_bias_and_stop(client):
    answer = client.completions.create(
        model="tiny", prompt="x", max_tokens=5, logit_bias={"65": 100}, temperature=0
    )
    assert len(set(answer.choices[0].text)) == 1
    letter = answer.choices[0].text[0]
    stopped = client.completions.create(
        model="tiny", prompt="x", max_tokens=5, logit_bias={"65": 100}, stop=letter * 2
    )
    assert stopped.choices[0].text == ""
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].stop_reason == letter * 2


def test_json_schema_output(client):
    schema = {
        "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
        "additionalProperties": False,
    }  # fmt: skip
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "json"}], max_tokens=60, seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )  # fmt: skip
    if answer.choices[0].finish_reason == "stop":
        assert set(json.loads(answer.choices[0].message.content)) == {"ok"}
    assert answer.choices[0].message.content.lstrip().startswith("{")


def test_tools_reach_the_template(client):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    fields = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    plain = client.chat.completions.create(**fields)
    tooled = client.chat.completions.create(**fields, tools=tools)
    none = client.chat.completions.create(**fields, tools=tools, tool_choice="none")
    assert tooled.usage.prompt_tokens > plain.usage.prompt_tokens + 20
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens


def test_echo(client):
    answer = client.completions.create(model="tiny", prompt="before ", max_tokens=2, echo=True)
    assert answer.choices[0].text.startswith("before ")


def test_echo_with_logprobs_scores_the_prompt(client, server):
    fields = {"model": "tiny", "prompt": "before the", "temperature": 0, "logprobs": 2,
              "echo": True, "extra_body": {"ignore_eos": True}}  # fmt: skip
    answer = client.completions.create(**fields, max_tokens=3).choices[0]
    scored = answer.logprobs
    assert len(scored.tokens) == len(scored.token_logprobs) == len(scored.top_logprobs) == 10 + 3
    assert "".join(scored.tokens[:10]) == "before the"
    assert scored.token_logprobs[0] is None and scored.top_logprobs[0] is None
    assert scored.text_offset[:10] == list(range(10))
    with torch.inference_mode():
        ids = torch.tensor([server.llm.encode("before the")])
        want = server.llm.engine.runner.model(ids).logits[0].log_softmax(-1)
    for i, value in enumerate(scored.token_logprobs[1:10]):
        assert math.isclose(value, want[i, ids[0, i + 1]].item(), abs_tol=1e-4)
    alone = client.completions.create(**fields, max_tokens=0)
    assert (alone.choices[0].text, alone.usage.completion_tokens) == ("before the", 0)
    assert alone.choices[0].logprobs.token_logprobs == scored.token_logprobs[:10]
    streamed = {"tokens": [], "token_logprobs": [], "text_offset": []}
    for chunk in client.completions.create(**fields, max_tokens=3, stream=True):
        for key in streamed:
            streamed[key] += getattr(chunk.choices[0].logprobs, key)
    assert streamed == {key: getattr(scored, key) for key in streamed}
    assert client.completions.create(**fields, max_tokens=3, n=2).choices[1].logprobs == scored


def test_prompt_logprobs_as_vllm_gives_them(client):
    extra = {"prompt_logprobs": 1}
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=1, extra_body=extra)
    first, *rest = answer.choices[0].prompt_logprobs
    assert first is None and len(rest) == 2
    for letter, entry in zip("bc", rest, strict=True):
        assert letter in {e["decoded_token"] for e in entry.values()}
        assert all(e["rank"] >= 1 and e["logprob"] <= 0 for e in entry.values())
    messages = [{"role": "user", "content": "x"}]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=1, extra_body=extra
    )
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


@pytest.mark.parametrize(
    ("extra", "texts"),
    [
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"guided_regex": "[ab]-c"}, {"a-c", "b-c"}),
        ({"structured_outputs": {"regex": "[ab]-c"}}, {"a-c", "b-c"}),
        ({"guided_grammar": 'start: "x" "y"'}, {"xy"}),
        ({"structured_outputs": {"grammar": 'start: "x" "y"'}}, {"xy"}),
        ({"guided_json": {"enum": [1, 2]}}, {"1", "2"}),
        ({"structured_outputs": {"json": '{"enum": [1, 2]}'}}, {"1", "2"}),
        ({"guided_choice": ["yes", "no"], "n": 4}, {"yes", "no"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_structured_outputs(client, extra, texts):
    fields = {"model": "tiny", "prompt": "x", "max_tokens": 20, "seed": 3, "extra_body": extra}
    answer = client.completions.create(**fields)
    assert {c.text for c in answer.choices} <= texts
    pieces = {}
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] = pieces.get(choice.index, "") + choice.text
    assert list(pieces.values()) == [c.text for c in answer.choices]


def test_json_object_and_min_p_and_min_tokens(client):
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=8, seed=1,
        response_format={"type": "json_object"}, extra_body={"min_p": 0.1, "top_k": 5},
    )  # fmt: skip
    assert answer.choices[0].message.content.lstrip().startswith("{")
    long = client.completions.create(
        model="tiny", prompt="x", max_tokens=30, seed=2, extra_body={"min_tokens": 25}
    )
    assert long.usage.completion_tokens >= 25

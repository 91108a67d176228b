"""Tools as the official client sees them. The answers are fixed by a guide, so that a model of
random weights calls what the test wants."""

import json

import openai
import pytest
from serving import running

from blocktable.serve.config import ServerConfig

ADD = {
    "type": "function",
    "function": {
        "name": "add", "description": "a + b",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}},
            "required": ["a", "b"], "additionalProperties": False,
            "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        },
    },
}  # fmt: skip
NOW = {"type": "function", "function": {"name": "now"}}
FORMS = {
    "hermes": 'Sum: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "llama3_json": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]',
}


@pytest.fixture(scope="module", params=sorted(FORMS))
def server_of_form(request):
    with running(ServerConfig(port=0, tool_call_parser=request.param)) as server:
        yield server, request.param


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def ask(server, text=None, **fields):
    extra = {} if text is None else {"structured_outputs": {"choice": [text]}}
    base = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 110,
            "tools": [ADD, NOW], "seed": 5, "extra_body": extra}  # fmt: skip
    return client_of(server).chat.completions.create(**base | fields)


def joined(stream):
    """Content, calls and finish reason of a stream, as a client puts them together."""
    content, calls, reason = "", [], None
    for chunk in stream:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            if part.index == len(calls):
                assert part.id and part.function.name
                calls.append([part.id, part.function.name, ""])
            calls[part.index][2] += part.function.arguments or ""
        reason = choice.finish_reason or reason
    return content, calls, reason


def test_a_call_is_read_whole_and_streamed(server_of_form):
    server, form = server_of_form
    answer = ask(server, FORMS[form]).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content == ("Sum:" if form == "hermes" else None)
    (call,) = answer.message.tool_calls
    assert (call.type, call.function.name) == ("function", "add")
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
    assert len(call.id) == 9 if form == "mistral" else call.id.startswith("call_")
    pieces = list(ask(server, FORMS[form], stream=True))
    content, ((_, name, arguments),), reason = joined(pieces)
    assert (content, name, reason) == (answer.message.content or "", "add", "tool_calls")
    assert arguments == call.function.arguments
    assert sum(len(p.choices[0].delta.tool_calls or ()) for p in pieces) > 3  # piece by piece


def test_text_that_is_no_call_stays_text(server_of_form):
    server, _ = server_of_form
    text = "No <tool is [TOOL needed {here}."
    answer = ask(server, text).choices[0]
    assert (answer.message.content, answer.message.tool_calls) == (text, None)
    assert answer.finish_reason == "stop"
    assert joined(ask(server, text, stream=True)) == (text, [], "stop")
    nothing = ask(server, FORMS["hermes"], tool_choice="none").choices[0]
    assert (nothing.message.content, nothing.message.tool_calls) == (FORMS["hermes"], None)


def test_a_call_cut_short_says_length(server_of_form):
    server, form = server_of_form
    answer = ask(server, FORMS[form], max_tokens=len(FORMS[form]) - 8).choices[0]
    assert answer.finish_reason == "length"
    streamed = joined(ask(server, FORMS[form], max_tokens=len(FORMS[form]) - 8, stream=True))
    (call,) = answer.message.tool_calls
    assert streamed[1][0][1:] == [call.function.name, call.function.arguments]
    assert streamed[2] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_required_is_enforced(server, stream):
    complete = 0
    for seed in range(8):
        fields = {"tool_choice": "required", "seed": seed, "parallel_tool_calls": False}
        answer = ask(server, **fields, stream=stream)
        if stream:
            content, calls, reason = joined(answer)
        else:
            message, reason = answer.choices[0].message, answer.choices[0].finish_reason
            content = message.content or ""
            calls = [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls]
        ((_, name, arguments),) = calls
        assert content == ""
        assert name in ("add", "now")
        assert reason in ("tool_calls", "length")  # white space may fill what is left
        if reason == "tool_calls":
            value = json.loads(arguments)
            complete += name == "add"
            assert name == "now" or (set(value) == {"a", "b"} and max(value.values()) <= 9)
    assert complete


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_function_is_enforced(server, stream):
    choice = {"type": "function", "function": {"name": "add"}}
    answer = ask(server, tool_choice=choice, stream=stream)
    if stream:
        content, ((_, name, arguments),), reason = joined(answer)
    else:
        message, reason = answer.choices[0].message, answer.choices[0].finish_reason
        content, name = message.content or "", message.tool_calls[0].function.name
        arguments = message.tool_calls[0].function.arguments
    assert (content, name, reason) == ("", "add", "stop")
    assert set(json.loads(arguments)) == {"a", "b"}


def test_results_go_back_through_the_template(server):
    call = {"id": "call_1", "type": "function",
            "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}  # fmt: skip
    talk = [
        {"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]  # fmt: skip
    assert ask(server, "Three.", messages=talk).choices[0].message.content == "Three."


BAD = [
    ({"tool_choice": "required", "tools": None}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"name": "add"}}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools"), ({"tools": [NOW] * 129}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [{"type": "web", "function": {"name": "a"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": 5}}}],
      "tool_choice": "required"}, "tools"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages"),
    ({"messages": [{"role": "assistant",
      "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]}, "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda x: str(x)[:40])
def test_what_cannot_work_is_refused(server, fields, param):
    with pytest.raises(openai.BadRequestError) as error:
        ask(server, **{k: v for k, v in fields.items() if v is not None} | (
            {"tools": openai.NOT_GIVEN} if fields.get("tools", 0) is None else {}))  # fmt: skip
    assert error.value.body["param"] == param
    assert ask(server, "Yes.").choices[0].message.content == "Yes."

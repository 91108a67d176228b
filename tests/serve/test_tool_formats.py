"""Tool calls are read from every form, and a text that grows never takes back what it gave."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktable.serve.tools import FORMATS, format_of_template
from blocktable.serve.tools.formats import read_list
from blocktable.serve.tools.partial_json import Member, read_object

READERS = {**FORMATS, "list": read_list}
NAMES = ("look", "add")
ADD = '{"a": 1, "b": [2, {"c": "}"}]}'
LOOK = '{"q": "caf\\u00e9 </tool_call> \\"x\\" [ARGS]"}'

CASES = [
    ("hermes", f'<tool_call>\n{{"name": "add", "arguments": {ADD}}}\n</tool_call>', "",
     [("add", ADD)]),
    ("hermes", f'Let me see. <tool_call>{{"name": "look", "arguments": {LOOK}}}</tool_call>\n'
     f'<tool_call>{{"arguments": {ADD}, "name": "add"}}</tool_call>', "Let me see.",
     [("look", LOOK), ("add", ADD)]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {ADD}}}', "", [("add", ADD)]),
    ("hermes", "a <tool_call> b", "a <tool_call> b", []),
    ("hermes", '<tool_call>{"nome": 1}</tool_call>', '<tool_call>{"nome": 1}</tool_call>', []),
    ("hermes", "1 <2 and <tool", "1 <2 and <tool", []),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": [1, 2', "",
     [("add", '{"a": [1, 2')]),
    ("hermes", '<tool_call>{"name": "ad', '<tool_call>{"name": "ad', []),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
     [("add", '{"a": 1}')]),
    ("llama3_json", f'{{"name": "add", "parameters": {ADD}}}', "", [("add", ADD)]),
    ("llama3_json", f' <|python_tag|>{{"type": "function", "name": "look", "parameters": {LOOK}}}; '
     f'{{"name": "add", "parameters": {ADD}}}', "", [("look", LOOK), ("add", ADD)]),
    ("llama3_json", '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    ("llama3_json", '{"answer": 1}', '{"answer": 1}', []),
    ("llama3_json", "{x} is a set", "{x} is a set", []),
    ("llama3_json", "Hello.", "Hello.", []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "add", "arguments": {ADD}}}, '
     f'{{"name": "look", "arguments": {LOOK}}}]', "", [("add", ADD), ("look", LOOK)]),
    ("mistral", f"Sure.[TOOL_CALLS]add[ARGS]{ADD}[TOOL_CALLS]look[CALL_ID]abc[ARGS]{LOOK}",
     "Sure.", [("add", ADD), ("look", LOOK)]),
    ("mistral", f"[TOOL_CALLS]add{ADD}", "", [("add", ADD)]),
    ("mistral", "[TOOL", "[TOOL", []),
    ("list", f'[{{"name": "add", "parameters": {ADD}}}, {{"name": "look", "parameters": {LOOK}}}]',
     "", [("add", ADD), ("look", LOOK)]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES, ids=lambda x: str(x)[:30])
def test_calls_are_read_and_only_ever_grow(form, text, content, calls):
    reading = READERS[form](text, True, NAMES)
    assert (reading.content, [tuple(call) for call in reading.calls]) == (content, calls)
    grows(form, text)


def grows(form, text):
    """Every beginning of a text gives a beginning of what the next one gives."""
    last = READERS[form]("", False, NAMES)
    for end in range(1, len(text) + 2):
        reading = READERS[form](text[:end], end > len(text), NAMES)
        assert reading.content.startswith(last.content), text[:end]
        assert len(reading.calls) >= len(last.calls), text[:end]
        for before, now in zip(last.calls, reading.calls, strict=False):
            assert now.name == before.name
            assert now.arguments.startswith(before.arguments), text[:end]
        last = reading


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "{", "}", "[", "]",
     '"name"', '"arguments"', '"parameters"', ":", ",", ";", '"add"', "1", '"', "\\", " ", "\n",
     "x", '{"name": "add", "arguments": {}}', '{"name": "look", "parameters": {"q": [1]}}', "-",
     "add"]
)  # fmt: skip


@given(st.sampled_from(sorted(READERS)), st.lists(PIECES, max_size=14).map("".join))
def test_no_text_at_all_is_taken_back(form, text):
    grows(form, text)


@given(st.dictionaries(st.text(max_size=3), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6)), st.integers(0, 200))  # fmt: skip
def test_objects_are_read_as_far_as_they_come(value, cut):
    text = json.dumps(value) + " tail"
    whole = read_object(text, 0)
    assert whole is not None and text[: whole.end] == json.dumps(value)
    found = {name: json.loads(text[m.start : m.end]) for name, m in whole.members.items()}
    assert found == value
    part = read_object(text[: min(cut, len(text))], 0)
    if cut:
        assert part is not None
        for name, member in part.members.items():
            assert member.start == whole.members[name].start
            assert member.end in (None, whole.members[name].end)


@pytest.mark.parametrize("text", ["", "x", "[", "{1", "{'a'", '{"a" 1}', '{"a": 1 "b"'])
def test_what_is_no_object_is_none_or_has_no_end(text):
    found = read_object(text, 0)
    assert found is None or found.end is None


def test_deep_nesting_does_not_end_in_an_error():
    deep = '{"name": "add", "arguments": ' + '{"a":' * 100_000
    for form, reader in READERS.items():
        reader(deep, True, NAMES)
        reader(f"<tool_call>{deep}", True, NAMES)
        reader(f"[TOOL_CALLS][{deep}", True, NAMES), form


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }}", "hermes"), ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"), ("{{ messages }}", None), (None, None),
    ],
)  # fmt: skip
def test_the_form_is_known_by_the_template(template, form):
    assert format_of_template(template) == form


@pytest.mark.parametrize("number", ["12", "1.5", "1e+16", "-1.0E-3", "0.5e7"])
def test_a_number_cut_anywhere_may_still_grow(number):
    text = '{"a": 3, "b": ' + number
    for end in range(len(text) - len(number), len(text) + 1):
        part = read_object(text[:end], 0)
        assert part is not None and part.members["a"].end == 7
        assert part.members.get("b", Member(0, None)).end is None
    whole = read_object(text + "}", 0)
    assert whole is not None and whole.members["b"].end == len(text)

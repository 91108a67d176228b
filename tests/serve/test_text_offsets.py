"""``text_offset`` says where in the answer's text a token begins, whole or streamed."""

import json

import httpx
import pytest
from serving import make_tokenizer

from blocktable.engine.detokenize import Detokenizer
from blocktable.serve.offsets import Offsets

TEXT = "aé€🙂 b"  # characters of 1, 2, 3 and 4 bytes; the test's tokens are bytes


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def offsets(tokenizer, ids, **options):
    made = Offsets(Detokenizer(tokenizer), **options)
    return [made.take(i) for i in ids]


def test_a_character_of_several_tokens_counts_once(tokenizer):
    ids = tokenizer(TEXT)["input_ids"]
    want = [i for i, letter in enumerate(TEXT) for _ in letter.encode()]
    assert offsets(tokenizer, ids) == want
    assert offsets(tokenizer, ids, start=7) == [7 + i for i in want]


def test_bytes_that_become_no_character_are_shown_as_one_and_counted_so(tokenizer):
    euro = tokenizer("€")["input_ids"]
    ids = [*euro[:2], *tokenizer("ab")["input_ids"], *euro]
    text = Detokenizer(tokenizer).decode(ids)
    found = offsets(tokenizer, ids)
    assert text == "\ufffdab€" and found == [0, 0, 1, 2, 3, 3, 3]


def test_special_tokens_count_where_they_are_shown(tokenizer):
    a, b = tokenizer("ab")["input_ids"]
    assert offsets(tokenizer, [a, 256, b], skip_special=True) == [0, 1, 1]
    assert offsets(tokenizer, [a, 256, b], skip_special=False) == [0, 1, 1 + len("<|end|>")]


def columns(server, body):
    """Whole and streamed: (text, tokens, offsets) of each choice."""
    found: list[tuple] = []
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    for choice in answer["choices"]:
        scored = choice["logprobs"]
        found.append((choice["text"], scored["tokens"], scored["text_offset"]))
    pieces: dict[int, tuple] = {}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60
    ) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                text, tokens, places = pieces.get(choice["index"], ("", [], []))
                scored = choice["logprobs"]
                pieces[choice["index"]] = (
                    text + choice["text"],
                    tokens + scored["tokens"],
                    places + scored["text_offset"],
                )
    return found, [pieces[i] for i in sorted(pieces)]


@pytest.mark.parametrize(
    "stop", [None, ["ab", "cdef", "zzzz"], [bytes([i]).decode() * 3 for i in range(65, 90)]]
)
@pytest.mark.parametrize("echo", [False, True])
def test_streams_say_the_same_as_whole_answers(server, echo, stop):
    """Also where the stream holds text back that may become a stop string."""
    body = {"prompt": [TEXT, "x"], "max_tokens": 40, "logprobs": 1, "echo": echo, "n": 2, "seed": 3,
            "temperature": 2.0, "stop": stop, "ignore_eos": True,
            "skip_special_tokens": False}  # fmt: skip
    whole, streamed = columns(server, body)
    assert whole == streamed and len(whole) == 4
    for text, tokens, places in whole:
        assert len(tokens) == len(places) and places == sorted(places)
        for token, place in zip(tokens, places, strict=True):
            if "\ufffd" not in token and place + len(token) <= len(text):
                assert text[place : place + len(token)] == token

"""Output under a JSON schema is always JSON of that schema, whatever the logits say."""

import json

import numpy as np
import pytest
import torch
from test_detokenize import byte_level

from blocktable.core.errors import RequestError
from blocktable.engine.params import SamplingParams
from blocktable.engine.sampling import Sampler
from blocktable.engine.sampling.grammar import GrammarRows

TOKENIZER = byte_level()
END = TOKENIZER.eos_token_id
V = len(TOKENIZER) + 20  # the model's vocabulary is padded
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


def make(rows=4):
    grammars = GrammarRows(TOKENIZER, V, [END])
    return Sampler(rows, V, eos_token_ids=[END], grammars=grammars)


def finish(sampler, row, out, seed, upto=400):
    """Draw from random logits until the end token."""
    gen = torch.Generator().manual_seed(seed)
    for _ in range(upto):
        logits = torch.randn(1, V, generator=gen)
        pos = np.array([1 + len(out)])
        out.append(sampler.sample(logits, np.array([row], np.int32), pos).token_ids.item())
        if out[-1] == END:
            return out
    raise AssertionError(f"no end within {upto} tokens")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_text_follows_the_schema(seed, temperature):
    sampler = make()
    params = SamplingParams(temperature=temperature, seed=seed, json_schema=SCHEMA)
    sampler.add_row(2, params, [1])
    value = json.loads(TOKENIZER.decode(finish(sampler, 2, [], seed)[:-1]))
    assert set(value) == {"name", "age"}
    assert value["name"] in ("ada", "bob")
    assert value["age"] <= 99


def test_a_resumed_request_goes_on_inside_its_grammar():
    sampler = make()
    params = SamplingParams(temperature=0, json_schema=SCHEMA)
    sampler.add_row(2, params, [1])
    out = [
        sampler.sample(torch.zeros(1, V), np.array([2], np.int32), np.array([1 + i])).token_ids[0]
        for i in range(3)
    ]
    sampler.clear_rows(np.array([2], np.int32))
    sampler.add_row(0, params, [1], output_token_ids=[int(t) for t in out])
    json.loads(TOKENIZER.decode(finish(sampler, 0, [int(t) for t in out], 3)[:-1]))


def test_rows_beside_it_and_later_occupants_are_free():
    sampler = make()
    sampler.add_row(0, SamplingParams(temperature=0, json_schema=SCHEMA), [1])
    sampler.add_row(1, SamplingParams(temperature=0), [1])
    logits = torch.zeros(2, V)
    logits[:, 40] = 1
    rows = np.array([0, 1], np.int32)
    tokens = sampler.sample(logits.clone(), rows, np.array([1, 1])).token_ids.tolist()
    assert tokens[1] == 40 and tokens[0] != 40
    sampler.clear_rows(rows)
    sampler.add_row(0, SamplingParams(temperature=0), [1])
    assert sampler.sample(logits[:1], rows[:1], np.array([1])).token_ids.item() == 40


@pytest.mark.parametrize(
    "schema", ["{", '{"type": "no such type"}', '{"$ref": "#/nowhere"}', "[" * 5000]
)
def test_a_schema_that_cannot_be_followed_is_refused(schema):
    with pytest.raises(RequestError, match="json_schema cannot be followed"):
        GrammarRows(TOKENIZER, V, [END]).check(schema)


def test_without_a_tokenizer_a_schema_is_refused():
    with pytest.raises(RequestError, match="needs a tokenizer"):
        Sampler(1, V).check(SamplingParams(json_schema=SCHEMA))

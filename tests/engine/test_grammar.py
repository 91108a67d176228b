"""Output under a JSON schema is always JSON of that schema, whatever the logits say."""

import json
import time

import numpy as np
import pytest
import torch
from test_detokenize import byte_level
from transformers import LlamaConfig, LlamaForCausalLM

from blocktable import LLM
from blocktable.core.errors import RequestError
from blocktable.engine.params import Guide, SamplingParams
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
        GrammarRows(TOKENIZER, V, [END]).check(Guide("json_schema", schema))


def test_without_a_tokenizer_a_schema_is_refused():
    with pytest.raises(RequestError, match="needs a tokenizer"):
        Sampler(1, V).check(SamplingParams(json_schema=SCHEMA))


BOMBS = [
    Guide("json_schema", '{"$ref": "#"}'),
    Guide("json_schema", '{"allOf": [{"$ref": "#"}]}'),
    Guide("json_schema", json.dumps(
        {"type": "object", "allOf": [{"anyOf": [{"properties": {f"{c}{i}": {"type": "string"}}}
         for c in "ab"]} for i in range(20)]})),
    Guide("regex", "((("), Guide("regex", "(" * 3000 + "a" + ")" * 3000),
    Guide("regex", "(.?)" * 3000), Guide("grammar", "start: start"), Guide("grammar", "nonsense"),
    Guide("grammar", "start: nope"),
]  # fmt: skip


@pytest.mark.parametrize("guide", BOMBS, ids=lambda g: g.text[:24])
def test_a_guide_that_is_too_large_or_allows_nothing_is_refused_in_time(guide):
    start = time.perf_counter()
    with pytest.raises(RequestError, match=f"{guide.kind} cannot be followed"):
        GrammarRows(TOKENIZER, V, [END]).check(guide)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"regex": "[ab]{3}-(x|y)"}, {a + b + c + "-" + d for a in "ab" for b in "ab" for c in "ab"
                                      for d in "xy"}),
        ({"choice": ["yes", 'no "sir"', "é\n"]}, {"yes", 'no "sir"', "é\n"}),
        ({"grammar": 'start: "<" inner ">"\ninner: "a" | "b"'}, {"<a>", "<b>"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(3))
def test_every_text_follows_the_regex_choice_or_grammar(fields, texts, seed):
    sampler = make()
    sampler.add_row(1, SamplingParams(temperature=1, seed=seed, **fields), [1])
    assert TOKENIZER.decode(finish(sampler, 1, [], seed)[:-1]) in texts


def test_one_guide_at_most_and_each_is_checked():
    for fields, words in [
        ({"regex": "a", "json_schema": "{}"}, "cannot be combined"), ({"regex": ""}, "regex"),
        ({"choice": []}, "choice"), ({"choice": [""]}, "choice"), ({"choice": "ab"}, "choice"),
        ({"grammar": 5}, "grammar"), ({"regex": "a" * 300_000}, "262144"),
        ({"regex": "\ud800"}, "Unicode"), ({"choice": ["\ud800"]}, "Unicode"),
    ]:  # fmt: skip
        with pytest.raises(RequestError, match=words):
            SamplingParams(**fields)


def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=None, eos_token_id=END,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_a_guide_that_fails_later_ends_its_own_request_alone():
    llm = LLM(tiny_llama(), tokenizer=TOKENIZER, block_size=4, num_blocks=60, max_model_len=64)
    # 3,000 properties that may come in any number: too many for one place in the text
    schema = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(3000)}}
    guided = SamplingParams(max_tokens=20, json_schema=json.dumps(schema), n=2, seed=1)
    plain = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    failed, other = llm.generate([[1, 2, 3], [4, 5]], [guided, plain])
    reasons = {output.finish_reason for output in failed.outputs}
    assert reasons == {"error"}
    assert "json_schema cannot be followed" in failed.outputs[0].stop_reason
    assert len(other.outputs[0].token_ids) == 20
    assert llm.engine.manager.pool.used == 0
    again = llm.generate([[4, 5]], plain)[0]
    assert again.outputs[0].token_ids == other.outputs[0].token_ids

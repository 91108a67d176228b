"""Scores of a prompt's own tokens equal those of the model itself, however they are computed."""

import pytest
import torch
from tiny_models import tiny_model

from blocktable import LLM, SamplingParams
from blocktable.core.errors import RequestError

PROMPTS = [[5, 9, 2, 7, 11, 3, 40, 41, 42, 43, 44], [1, 2], [8], list(range(10, 60))]


def expected(model, ids):
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    return logits.log_softmax(-1)


CASES = [
    ("llama", {}),
    ("llama", {"max_num_batched_tokens": 7}),  # chunks that end anywhere
    ("llama", {"num_blocks": 19, "max_num_batched_tokens": 16}),  # preemption
    ("llama", {"enable_prefix_caching": False}),
    ("llama", {"num_draft_tokens": 3}),
    ("llama", {"async_steps": True}),
    ("gemma2", {"max_num_batched_tokens": 9}),
    ("mamba2", {"max_num_batched_tokens": 9}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_scores_equal_the_model(name, options):
    model = tiny_model(name)
    defaults = {"block_size": 4, "num_blocks": 200, "max_model_len": 64, "dtype": "float32"}
    llm = LLM(model, **defaults | options)
    params = SamplingParams(max_tokens=12, temperature=0, prompt_logprobs=3, ignore_eos=True)
    for _ in range(2):  # the second time the cache would know the prompts
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
            want = expected(model, prompt)
            assert output.num_cached_tokens == 0
            assert len(output.prompt_logprobs) == len(prompt)
            assert output.prompt_logprobs[0] is None
            for i, scored in enumerate(output.prompt_logprobs[1:]):
                line = want[i]
                assert scored.chosen.token_id == prompt[i + 1]
                assert abs(scored.chosen.logprob - line[prompt[i + 1]].item()) < 1e-4
                assert scored.chosen.rank == 1 + int((line > line[prompt[i + 1]]).sum())
                assert [t.token_id for t in scored.top] == line.topk(3).indices.tolist()
    preempted = llm.stats()["scheduler"].preemptions
    assert (preempted > 0) == (options.get("num_blocks") == 19)


def test_others_in_the_batch_are_not_changed_by_it():
    llm = LLM(tiny_model("llama"), block_size=4, num_blocks=60, max_model_len=64, dtype="float32")
    plain = SamplingParams(max_tokens=6, temperature=0, logprobs=1)
    asked = SamplingParams(max_tokens=6, temperature=0, logprobs=1, prompt_logprobs=0, n=2, seed=1)
    alone = llm.generate(PROMPTS, plain)
    mixed = llm.generate([p for p in PROMPTS for _ in "ab"], [plain, asked] * len(PROMPTS))
    for a, b, c in zip(alone, mixed[::2], mixed[1::2], strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids == c.outputs[1].token_ids
        assert b.prompt_logprobs is None
        assert all(not e.top for e in c.prompt_logprobs[1:])
    assert llm.engine.manager.pool.used == 0
    assert not llm.engine._scoring


@pytest.mark.parametrize("value", [-1, 101, 1.5, True, "1"])
def test_bad_values_are_refused(value):
    with pytest.raises(RequestError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=value)

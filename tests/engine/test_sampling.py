"""The sampler equals transformers, is right in distribution and blind to the rest of the batch."""

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from blocktable.engine.params import SamplingParams
from blocktable.engine.sampling import Sampler
from blocktable.engine.sampling.draw import draw_plain, kept_weights
from blocktable.engine.sampling.rng import stream_key, uniforms

V = 200
PROMPT = [3, 5, 5, 7]


def draw(params, logits, positions=None, **row):
    """One draw for each line of the logits, all lines under the same parameters."""
    n = logits.shape[0]
    sampler = Sampler(n, logits.shape[1], seed=0)
    for i in range(n):
        sampler.add_row(i, params, PROMPT, index=i, **row)
    positions = np.full(n, len(PROMPT)) if positions is None else positions
    return sampler.sample(logits.clone(), np.arange(n, dtype=np.int32), positions)


def frequencies(params, logits, draws=20_000, **row):
    """Observed share of each token over many positions of one seeded stream."""
    sampler = Sampler(draws, V)
    sampler.add_row(0, params, PROMPT, **row)
    rows = np.zeros(draws, np.int32)
    tokens = sampler.sample(logits.expand(draws, V).clone(), rows, np.arange(draws)).token_ids
    return torch.bincount(tokens, minlength=V) / draws


def close(observed, expected, draws=20_000):
    """Within 5 standard deviations everywhere, and nothing where nothing is expected."""
    assert observed[expected == 0].sum() == 0
    assert ((observed - expected).abs() <= 5 * (expected / draws).sqrt() + 1e-3).all()


def warped(logits, *warpers, prompt=PROMPT):
    ids = torch.tensor([prompt] * logits.shape[0])
    return LogitsProcessorList(warpers)(ids, logits.clone())


class TestDistribution:
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(1)) * 2

    @pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
    def test_temperature(self, temperature):
        params = SamplingParams(temperature=temperature, seed=1)
        close(frequencies(params, self.logits), (self.logits[0] / temperature).softmax(-1))

    @pytest.mark.parametrize(
        "fields",
        [
            {"top_k": 1},
            {"top_k": 7},
            {"top_p": 0.5},
            {"top_p": 0.95},
            {"min_p": 0.1},
            {"top_k": 20, "top_p": 0.8},
            {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8},
            {"top_k": 10**9, "temperature": 1.3},
        ],
    )
    def test_filters_equal_those_of_transformers(self, fields):
        params = SamplingParams(seed=2, **fields)
        warpers = [TemperatureLogitsWarper(params.temperature)]
        if params.top_k:
            warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            warpers.append(TopPLogitsWarper(params.top_p))
        if params.min_p:
            warpers.append(MinPLogitsWarper(params.min_p))
        expected = warped(self.logits, *warpers)[0].softmax(-1)
        close(frequencies(params, self.logits), expected)

    @pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 5000])
    @pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.5}])
    def test_any_vocabulary_size(self, vocab, fields):
        logits = torch.randn(64, vocab, generator=torch.Generator().manual_seed(vocab))
        tokens = draw(SamplingParams(seed=0, **fields), logits).token_ids
        assert ((tokens >= 0) & (tokens < vocab)).all()

    def test_a_flat_distribution_needs_the_whole_vocabulary(self):
        logits = torch.zeros(1, 5000)
        sampler = Sampler(1, 5000)
        sampler.add_row(0, SamplingParams(top_p=0.999, seed=0), PROMPT)
        tokens = sampler.sample(logits.expand(4000, -1), np.zeros(4000, np.int32), np.arange(4000))
        assert len(tokens.token_ids.unique()) > 2500

    def test_the_edges_of_the_uniform_range_stay_inside_the_support(self):
        logits = torch.full((2, 300), -torch.inf)
        logits[:, 140:150] = 1.0
        uniform = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
        tokens = draw_plain(logits.clone(), uniform, None)
        assert tokens.tolist() == [140, 149]


class TestKeptSet:
    """The set that survives equals the set that transformers leaves, logits by logits."""

    @pytest.mark.parametrize("seed", range(20))
    def test_survivors(self, seed):
        gen = torch.Generator().manual_seed(seed)
        logits = torch.randn(16, V, generator=gen) * 3
        top_k = int(torch.randint(1, V, (1,), generator=gen))
        top_p, min_p = torch.rand(2, generator=gen).mul(0.9).add(0.05).tolist()
        left = warped(logits, TopKLogitsWarper(top_k), TopPLogitsWarper(top_p))
        left = warped(left, MinPLogitsWarper(min_p))
        values, ids = logits.sort(-1, descending=True)
        n = logits.shape[0]
        weights = kept_weights(
            values, torch.full((n,), top_k), torch.full((n,), top_p), torch.full((n,), min_p), None
        )
        ours = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, weights > 0)
        assert torch.equal(ours, left > -torch.inf)


class TestPenalties:
    def test_repetition_equals_that_of_transformers(self):
        logits = torch.randn(8, V, generator=torch.Generator().manual_seed(3))
        expected = warped(logits, RepetitionPenaltyLogitsProcessor(1.7), prompt=[*PROMPT, 9, 9])
        params = SamplingParams(temperature=0, repetition_penalty=1.7)
        got = draw(params, logits, output_token_ids=[9, 9]).token_ids
        assert torch.equal(got, expected.argmax(-1))

    def test_presence_and_frequency_count_the_output_only(self):
        logits = torch.zeros(1, V)
        logits[0, 5], logits[0, 9], logits[0, 11] = 2.0, 3.0, 2.1
        plain = SamplingParams(temperature=0)
        assert draw(plain, logits, output_token_ids=[9]).token_ids.item() == 9
        presence = plain.replace(presence_penalty=1.0)  # 9 falls to 2.0
        assert draw(presence, logits, output_token_ids=[9]).token_ids.item() == 11
        frequency = plain.replace(frequency_penalty=0.5)  # 9 falls to 2.0 after two uses
        assert draw(frequency, logits, output_token_ids=[9]).token_ids.item() == 9
        assert draw(frequency, logits, output_token_ids=[9, 9]).token_ids.item() == 11

    def test_counts_grow_with_the_tokens_drawn(self):
        logits = torch.zeros(1, V)
        logits[0, :4] = torch.tensor([0.9, 0.6, 0.3, 0.1])
        sampler = Sampler(8, V)
        sampler.add_row(6, SamplingParams(temperature=0, frequency_penalty=0.5), PROMPT)
        drawn = [
            sampler.sample(logits.clone(), np.array([6], np.int32), np.array([4 + i])).token_ids
            for i in range(6)
        ]
        assert [t.item() for t in drawn] == [0, 1, 0, 2, 1, 3]

    def test_long_outputs_equal_penalties_over_the_whole_vocabulary(self):
        gen = torch.Generator().manual_seed(11)
        params = SamplingParams(
            temperature=0, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.2
        )
        sampler, out = Sampler(2, V), []
        sampler.add_row(1, params, PROMPT)
        one = np.array([1], np.int32)
        for i in range(200):
            logits = torch.randn(1, V, generator=gen) * 3
            counts = torch.bincount(torch.tensor([V, *out]), minlength=V + 1)[:V]
            seen = (counts > 0) | torch.zeros(V, dtype=torch.bool).index_fill(
                0, torch.tensor(PROMPT), True
            )
            want = torch.where(logits > 0, logits / 1.3, logits * 1.3).where(seen, logits)
            want = want - 0.7 * (counts > 0) - 0.2 * counts
            got = sampler.sample(logits, one, np.array([len(PROMPT) + i])).token_ids
            assert got.item() == want.argmax().item()
            out.append(got.item())

    def test_a_resumed_request_goes_on_as_if_it_had_not_stopped(self):
        gen = torch.Generator().manual_seed(5)
        steps = [torch.randn(1, V, generator=gen) * 2 for _ in range(20)]
        params = SamplingParams(
            seed=3, presence_penalty=1.0, frequency_penalty=0.3, repetition_penalty=1.2
        )
        one = np.array([2], np.int32)

        def run(resume_at):
            sampler, out = Sampler(4, V), []
            sampler.add_row(2, params, PROMPT)
            for i, logits in enumerate(steps):
                if i == resume_at:
                    sampler.clear_rows(one)
                    sampler.add_row(0, params, [1, 2])
                    sampler.add_row(2, params, PROMPT, output_token_ids=out)
                pos = np.array([len(PROMPT) + i])
                out.append(sampler.sample(logits.clone(), one, pos).token_ids.item())
            return out

        assert run(None) == run(7) == run(19)

    def test_a_row_taken_again_keeps_nothing_of_its_last_request(self):
        sampler = Sampler(2, V)
        row = np.array([1], np.int32)
        logits = torch.zeros(1, V)
        logits[0, 5] = 1.0
        sampler.add_row(
            1, SamplingParams(repetition_penalty=9.0, logit_bias={5: -50}, logprobs=2), [5]
        )
        sampler.clear_rows(row)
        sampler.add_row(1, SamplingParams(temperature=0), [5])
        out = sampler.sample(logits.clone(), row, np.array([1]))
        assert out.token_ids.item() == 5
        assert out.logprobs is None


class TestLists:
    logits = torch.zeros(1, V)
    logits[0, :3] = torch.tensor([3.0, 2.0, 1.0])

    def test_bias_bans_and_allowed_lists(self):
        greedy = SamplingParams(temperature=0)
        assert draw(greedy.replace(logit_bias={1: 5}), self.logits).token_ids.item() == 1
        assert draw(greedy.replace(bad_token_ids=[0, 1]), self.logits).token_ids.item() == 2
        allowed = greedy.replace(allowed_token_ids=[50, 2], logit_bias={0: 100})
        assert draw(allowed, self.logits).token_ids.item() == 2

    def test_lists_of_one_row_leave_the_others_alone(self):
        sampler = Sampler(3, V)
        sampler.add_row(0, SamplingParams(temperature=0), PROMPT)
        sampler.add_row(1, SamplingParams(temperature=0, bad_token_ids=[0]), PROMPT)
        sampler.add_row(2, SamplingParams(temperature=0, allowed_token_ids=[7]), PROMPT)
        rows = np.array([2, 0, 1], np.int32)
        out = sampler.sample(self.logits.repeat(3, 1), rows, np.full(3, 4))
        assert out.token_ids.tolist() == [7, 0, 1]

    def test_ends_are_held_back_until_min_tokens(self):
        sampler = Sampler(2, V, eos_token_ids=[0])
        params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[1])
        sampler.add_row(0, params, PROMPT)
        sampler.add_row(1, params.replace(ignore_eos=True), PROMPT)
        rows = np.array([0, 1], np.int32)
        for made, expected in ((0, [2, 0]), (1, [2, 0]), (2, [0, 0])):
            out = sampler.sample(self.logits.repeat(2, 1), rows, np.full(2, len(PROMPT) + made))
            assert out.token_ids.tolist() == expected

    def test_a_mask_rules_over_everything(self):
        mask = torch.zeros(1, V, dtype=torch.bool)
        mask[0, 42] = True
        sampler = Sampler(1, V)
        sampler.add_row(0, SamplingParams(logit_bias={0: 100}), PROMPT)
        out = sampler.sample(self.logits.clone(), np.zeros(1, np.int32), np.array([4]), mask)
        assert out.token_ids.item() == 42


class TestLogprobs:
    def test_they_are_of_the_models_own_distribution(self):
        logits = torch.randn(3, V, generator=torch.Generator().manual_seed(9))
        sampler = Sampler(3, V)
        sampler.add_row(0, SamplingParams(temperature=0), PROMPT)
        sampler.add_row(1, SamplingParams(seed=4, logprobs=3, presence_penalty=1.0), PROMPT)
        sampler.add_row(2, SamplingParams(temperature=0, logprobs=0, logit_bias={8: 90}), PROMPT)
        rows = np.arange(3, dtype=np.int32)
        out = sampler.sample(logits.clone(), rows, np.full(3, 4))
        got = out.logprobs
        want = logits.log_softmax(-1)
        assert got.batch_index.tolist() == [1, 2]
        assert got.num_top.tolist() == [3, 0]
        for i, b in enumerate((1, 2)):
            token = out.token_ids[b]
            torch.testing.assert_close(got.chosen[i], want[b, token])
            assert got.rank[i] == (want[b] > want[b, token]).sum() + 1
        torch.testing.assert_close(got.top_logprobs[0, :3], want[1].topk(3).values)
        assert torch.equal(got.top_ids[0, :3], want[1].topk(3).indices)
        assert out.token_ids[2] == 8


class TestReproducible:
    MIX = (
        {"seed": 1},
        {"seed": 2, "top_p": 0.9},
        {"seed": 3, "top_k": 5, "temperature": 0.7},
        {"temperature": 0},
        {"seed": 5, "min_p": 0.02, "repetition_penalty": 1.3},
        {"seed": 6, "top_k": 40, "top_p": 0.8, "presence_penalty": 0.5},
    )

    def test_a_seeded_text_does_not_depend_on_the_batch(self):
        gen = torch.Generator().manual_seed(0)
        steps = torch.randn(12, len(self.MIX), V, generator=gen) * 2

        def run(members, rows):
            sampler = Sampler(16, V)
            for m, r in zip(members, rows, strict=True):
                sampler.add_row(r, SamplingParams(**self.MIX[m]), PROMPT)
            texts = []
            for i, logits in enumerate(steps):
                out = sampler.sample(
                    logits[members].clone(), np.array(rows, np.int32), np.full(len(rows), 4 + i)
                )
                texts.append(out.token_ids)
            return dict(zip(members, torch.stack(texts).T.tolist(), strict=True))

        whole = run([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
        shuffled = run([4, 0, 3, 5, 2, 1], [9, 3, 14, 0, 1, 2])
        assert shuffled == whole
        for member in whole:
            assert run([member], [7])[member] == whole[member]

    def test_seed_position_and_index_each_change_the_draws(self):
        logits = torch.zeros(400, V)
        at = np.arange(400)
        runs = {
            (seed, shift, index): tuple(
                one_stream(SamplingParams(seed=seed), logits, at + shift, index).tolist()
            )
            for seed in (0, 1, -1, 2**62)
            for shift in (0, 1000)
            for index in (0, 1)
        }
        assert len(set(runs.values())) == len(runs)

    def test_requests_without_a_seed_differ(self):
        sampler = Sampler(2, V)
        for row in (0, 1):
            sampler.add_row(row, SamplingParams(), PROMPT)
        rows = np.array([0] * 50 + [1] * 50, np.int32)
        tokens = sampler.sample(torch.zeros(100, V), rows, np.arange(100) % 50).token_ids
        assert tokens[:50].tolist() != tokens[50:].tolist()

    def test_streams_are_uniform_and_uncorrelated(self):
        keys = np.array([stream_key(s) for s in range(256)], np.uint64)
        u = uniforms(keys[:, None], np.arange(256)[None, :].astype(np.int64))
        assert u.min() >= 0 and u.max() < 1
        for axis in (0, 1):  # neighbouring seeds, neighbouring positions
            pairs = np.corrcoef(np.delete(u, 0, axis).ravel(), np.delete(u, -1, axis).ravel())
            assert abs(pairs[0, 1]) < 0.02
        counts = np.bincount((u.ravel() * 64).astype(int), minlength=64)
        chi2 = ((counts - 1024) ** 2 / 1024).sum()
        assert 30 < chi2 < 110  # 63 degrees of freedom

    def test_known_draws_never_change(self):
        """A seed recorded today must give the same text after every later release."""
        keys = np.array([stream_key(42), stream_key(42, 1), stream_key(-7)], np.uint64)
        u = uniforms(keys, np.array([0, 10, 2**40]))
        assert u.tolist() == KNOWN


KNOWN = [0.5478227300037333, 0.017863950448588795, 0.9783031235568449]


def one_stream(params, logits, positions, index):
    sampler = Sampler(1, V)
    sampler.add_row(0, params, PROMPT, index=index)
    return sampler.sample(logits.clone(), np.zeros(len(positions), np.int32), positions).token_ids


def test_counts_that_grew_in_a_step_take_the_next_request():
    sampler = Sampler(4, V)
    params = SamplingParams(temperature=0, repetition_penalty=1.5)
    sampler.add_row(0, params, [1, 2])
    rows = np.array([0], np.int32)
    for i in range(200):  # past the room that a row begins with, inside sample()
        sampler.sample(torch.randn(1, V), rows, np.array([2 + i]))
    sampler.add_row(1, params, [3, 4])
    sampler.sample(torch.randn(1, V), np.array([1], np.int32), np.array([2]))

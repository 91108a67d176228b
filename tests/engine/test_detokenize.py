"""Text grows by whole characters, equals decoding at once, and stops at stop strings."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from blocktable.engine.detokenize import Detokenizer
from blocktable.engine.params import SamplingParams

TEXTS = [
    "Hello, world! The quick brown fox jumps over the lazy dog.",
    "中文字符 and עברית und Grüße, 😀👩‍👩‍👧‍👦 emoji, ½ €",
    "tabs\tand\nnewlines   and   spaces  ",
    "こんにちは世界。안녕하세요 세계",
]


def byte_level():
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tok.train_from_iterator(TEXTS[:1], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|end|>")


def byte_fallback():
    vocab = {"<unk>": 0, "</s>": 1} | {f"<0x{b:02X}>": 2 + b for b in range(256)}
    for c in "▁abcdefghijklmnopqrstuvwxyzHTQ,.!":
        vocab[c] = len(vocab)
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


@pytest.fixture(params=list(TOKENIZERS))
def tokenizer(request):
    return TOKENIZERS[request.param]


def test_the_fast_path_is_taken_where_it_is_right():
    assert Detokenizer(TOKENIZERS["byte_level"]).by_bytes
    assert not Detokenizer(TOKENIZERS["byte_fallback"]).by_bytes


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("piece", [1, 2, 5])
def test_streamed_text_equals_text_decoded_at_once(tokenizer, text, piece):
    prompt = tokenizer.encode("Hi", add_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = Detokenizer(tokenizer).stream(SamplingParams(), prompt)
    seen = [""]
    for start in range(0, len(ids), piece):
        stream.push(ids[start : start + piece])
        assert stream.text.startswith(seen[-1])
        assert "�" not in stream.text
        seen.append(stream.text)
    whole = tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]
    assert stream.finish() == whole
    assert len(set(seen)) > 3


def test_random_bytes_equal_decoding_at_once():
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer)
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(len(tokenizer)) for _ in range(20)]
        stream = detokenizer.stream(SamplingParams(), [])
        for token in ids:
            stream.push([token])
        assert stream.finish() == tokenizer.decode(ids, skip_special_tokens=True)
        assert detokenizer.decode(ids, False) == tokenizer.decode(ids)


def test_special_tokens_are_left_out_unless_asked_for():
    tokenizer = TOKENIZERS["byte_level"]
    end = tokenizer.eos_token_id
    ids = [*tokenizer.encode("fox"), end]
    detokenizer = Detokenizer(tokenizer)
    for skip, text in ((True, "fox"), (False, "fox<|end|>")):
        stream = detokenizer.stream(SamplingParams(skip_special_tokens=skip), [])
        stream.push(ids)
        assert stream.finish() == text
    assert detokenizer.token_text(end) == "<|end|>"


def test_a_character_cut_off_at_the_end_is_shown_as_replacement_only_by_finish(tokenizer):
    ids = tokenizer.encode("é", add_special_tokens=False)
    stream = Detokenizer(tokenizer).stream(SamplingParams(), tokenizer.encode("a"))
    stream.push(ids[:-1])
    assert "�" not in stream.text
    assert stream.finish().endswith("�")


def test_endless_invalid_bytes_do_not_hold_the_text_back_for_ever():
    tokenizer = TOKENIZERS["byte_fallback"]
    stream = Detokenizer(tokenizer).stream(SamplingParams(), [])
    for _ in range(50):
        stream.push([2 + 0x80])
    assert len(stream.text) >= 40


class TestStop:
    @pytest.mark.parametrize("keep", [False, True])
    def test_a_stop_string_across_token_borders_ends_the_text(self, tokenizer, keep):
        ids = tokenizer.encode("the quick brown fox", add_special_tokens=False)
        params = SamplingParams(stop=["k br"], include_stop_str_in_output=keep)
        stream = Detokenizer(tokenizer).stream(params, tokenizer.encode("a "))
        matched = None
        for token in ids:
            matched = stream.push([token])
            assert "k " not in stream.text or matched
            if matched:
                break
        assert matched == "k br"
        assert not stream.text.endswith("fox")
        assert stream.text.strip() == ("the quick br" if keep else "the quic")

    def test_many_tokens_at_once_stop_at_the_same_place(self, tokenizer):
        ids = tokenizer.encode("the quick brown fox", add_special_tokens=False)
        stream = Detokenizer(tokenizer).stream(SamplingParams(stop="brown"), tokenizer.encode("a"))
        assert stream.push(ids) == "brown"
        assert stream.text.strip() == "the quick"

    def test_the_stop_that_begins_first_wins(self):
        tokenizer = TOKENIZERS["byte_level"]
        stream = Detokenizer(tokenizer).stream(SamplingParams(stop=["c", "bc"]), [])
        for c in "ab":
            assert stream.push(tokenizer.encode(c)) is None
        assert stream.text == "a"
        assert stream.push(tokenizer.encode("c")) == "bc"
        assert stream.text == "a"

    def test_what_might_begin_a_stop_is_held_back_and_shown_when_it_does_not(self):
        tokenizer = TOKENIZERS["byte_level"]
        stream = Detokenizer(tokenizer).stream(SamplingParams(stop="xyz"), [])
        shown = []
        for c in "axyaxy":
            stream.push(tokenizer.encode(c))
            shown.append(stream.text)
        assert shown == ["a", "a", "a", "axya", "axya", "axya"]
        assert stream.finish() == "axyaxy"

    def test_nothing_stops_below_min_tokens(self):
        tokenizer = TOKENIZERS["byte_level"]
        params = SamplingParams(stop="b", min_tokens=3)
        stream = Detokenizer(tokenizer).stream(params, [])
        results = [stream.push(tokenizer.encode(c)) for c in "abbab"]
        assert results[:4] == [None, None, None, None]
        assert results[4] == "b"
        assert stream.text == "abba"

"""generate and chat, with a tiny random model: what a user sees in a pipe and in a terminal."""

import io
import json

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import blocktable.llm
from blocktable import LLM
from blocktable.cli import run
from blocktable.cli.blockmap import CACHED, FREE, NULL, OWNED, SHARED, draw_map, legend, picture
from blocktable.cli.live import LiveView
from blocktable.cli.prompts import chat_prompt
from blocktable.engine.outputs import CompletionOutput, RequestOutput

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def tiny_llm(model, **options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        eos_token_id=256, bos_token_id=None,
    )  # fmt: skip
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {"<|end|>": 256}
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    options = {**options, "num_blocks": 80, "dtype": "float32"}
    return LLM(LlamaForCausalLM(config).eval(), tokenizer=tokenizer, **options)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(blocktable.llm, "LLM", tiny_llm)


def test_in_a_pipe_answers_and_summary_are_plain_lines(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    lines = [{"system": "a shared system prompt, long enough to fill some blocks"}]
    lines += [{"user": f"question {i}"} for i in range(5)] + [{"prompt": "no template"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert run(["generate", "tiny", "--prompts", str(path), "--max-tokens", "8"]) == 0
    out = capsys.readouterr().out
    for i in range(5):
        assert f"[{i + 1}] question {i}" in out
    assert "[6] no template" in out
    assert "\x1b[" not in out
    for name in (
        "prefill: ", "decode: ", "prefix hits: ", "blocks at the peak: ", "contiguous buffers: ",
        "block pool at the peak:", "shared ", "null block",
    ):  # fmt: skip
        assert name in out


def test_json_output_is_one_object_a_request(capsys):
    args = ["generate", "tiny", "-p", "one", "-p", "two", "-n", "2", "--json", "--ignore-eos"]
    assert run([*args, "--max-tokens", "4", "--seed", "1", "--temperature", "1"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(records) == 2
    for record in records:
        assert [len(c["token_ids"]) for c in record["outputs"]] == [4, 4]
        assert record["finished"]


def test_chat_answers_each_line_and_reuses_the_turns_before(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nhow are you\n"))
    assert run(["chat", "tiny", "--max-tokens", "6", "--seed", "3"]) == 0
    assert len(capsys.readouterr().out) >= 2


def test_a_prompt_that_is_too_long_is_one_line_and_exit_code_2(capsys):
    assert run(["generate", "tiny", "--raw", "-p", "x" * 300]) == 2
    err = capsys.readouterr().err
    assert "the prompt has 300 tokens, the limit is 255" in err
    assert err.count("\n") == 1


def test_the_live_view_fits_the_screen_and_shows_the_end_of_each_text():
    console = Console(width=100, height=24, file=io.StringIO(), force_terminal=True)
    prompts = [chat_prompt(f"question {i}", None) for i in range(9)]
    view = LiveView(console, prompts)
    for i in range(9):
        text = "begin " + "word " * 200 + f"end{i}"
        part = CompletionOutput(0, text=text, finish_reason="stop" if i < 5 else None)
        view.update(i, RequestOutput(str(i), None, [1], [part], finished=i < 5))
    with console.capture() as capture:
        console.print(view)
    shown = capture.get()
    assert shown.count("\n") <= 24
    for i in range(5, 9):  # what still runs comes first
        assert f"end{i}" in shown
    assert "begin" not in shown


def test_the_map_shows_owners_shared_cached_and_free():
    llm = tiny_llm("tiny")
    engine = llm.engine
    from blocktable import SamplingParams

    params = SamplingParams(max_tokens=100, ignore_eos=True)
    for i in range(2):
        engine.add_request(f"r{i}", llm.encode("x" * 70 + str(i)), params)
        engine.step()
    engine.step()
    import numpy as np

    owner = np.full(len(engine.scheduler.requests), -1, np.int32)
    for row, request in enumerate(engine.scheduler.requests):
        if request is not None:
            owner[row] = int(request.request_id[1:])
    pool = picture(engine.manager, owner)
    assert pool.kind[0] == NULL
    assert pool.count(SHARED) == 4
    assert pool.count(OWNED) == 2
    text = draw_map(pool, 20).plain
    assert text.startswith("x████")
    assert "A" in text and "B" in text and "more blocks, all free" in text
    engine.abort(["r0", "r1"])
    while engine.has_unfinished:
        engine.step()
    after = picture(engine.manager, owner)
    assert after.count(OWNED) == after.count(SHARED) == 0
    assert after.count(CACHED) + after.count(FREE) == 79
    assert "▒ cached, free to take" in legend(after).plain


def test_drafts_change_no_answer_and_are_summed_up(capsys):
    asked = ["generate", "tiny", "-p", "abcabcabcabc abcabc", "--raw", "--max-tokens", "30"]
    shown = []
    for more in ([], ["--draft-tokens", "3"]):
        assert run([*asked, "--ignore-eos", *more]) == 0
        shown.append(capsys.readouterr().out)
    plain, drafting = shown
    assert "guesses accepted" in drafting and "guesses accepted" not in plain
    assert plain.split("\n\n")[0] == drafting.split("\n\n")[0]
    assert run([*asked, "--draft-tokens", "-1"]) == 2
    assert "num_draft_tokens must be in [0, " in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["-p", "hi"], ["-p", ""], ["--prompts", "/nowhere.jsonl"]])
@pytest.mark.parametrize("model", ["/nonexistent", "./missing.gguf", "a/b/c"])
def test_a_missing_model_is_named_whatever_else_is_missing(model, more, capsys):
    assert run(["generate", model, *more]) == 2
    error = capsys.readouterr().err
    assert model.removeprefix("./") in error and error.count("\n") == 1

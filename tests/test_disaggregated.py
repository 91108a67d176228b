"""Prefill in one process and decode in another: the text of the undivided engine."""

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch

from blocktable import LLM, SamplingParams
from blocktable.core.errors import ConfigError, TransferError
from blocktable.disaggregated import DecodeEngine, PrefillWorker, cache_layout

OPTIONS = {"dtype": "float32", "num_blocks": 64, "max_model_len": 200, "max_num_seqs": 8, "seed": 0}
PROMPTS = [[5 + (i * j) % 80 for i in range(n)] for j, n in ((3, 70), (5, 33), (7, 10), (3, 70))]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    from transformers import AutoModelForCausalLM, LlamaConfig

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


class Worker:
    """A prefill worker in a thread of this process."""

    def __init__(self, directory, block_size):
        self.llm = LLM(directory, block_size=block_size, **OPTIONS)
        self.worker = PrefillWorker(self.llm.engine)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.stop.is_set():
            self.worker.step(0.01)
        self.worker.close()

    def close(self):
        self.stop.set()
        self.thread.join(20)


@pytest.fixture
def worker(directory):
    made = []

    def start(block_size=16):
        made.append(Worker(directory, block_size))
        return made[-1]

    yield start
    for one in made:
        one.close()


def generate(engine, prompts=PROMPTS, params=PARAMS, prefix="r"):
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{prefix}{number}", prompt, params, streaming=False)
    done = {}
    end = time.monotonic() + 60
    while engine.has_unfinished and time.monotonic() < end:
        for output in engine.step():
            done[output.request_id] = output
    return [done[f"{prefix}{number}"] for number in range(len(prompts))]


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("block_size", [16, 8, 32], ids=["equal", "smaller", "larger"])
def test_text_equals_the_undivided_engine(directory, worker, block_size):
    expected = tokens(generate(LLM(directory, **OPTIONS).engine))
    llm = LLM(directory, **OPTIONS)
    started = worker(block_size)
    decode = DecodeEngine(llm.engine, [started.worker.endpoint])
    outputs = generate(decode)
    assert tokens(outputs) == expected
    assert decode.failed_fetches == 0
    unit = max(16, block_size)
    assert outputs[0].num_cached_tokens == 69 // unit * unit
    assert outputs[1].num_cached_tokens == 32 and outputs[2].num_cached_tokens == 0
    assert decode.fetched_tokens >= 69 // unit * unit + 32
    assert tokens(generate(decode, prefix="again")) == expected  # from the cache, nothing fetched
    assert llm.engine.manager.pool.counts().used == 0
    for _ in range(100):
        if started.worker.num_held == 0:
            break
        time.sleep(0.02)
    assert started.worker.num_held == 0
    assert started.llm.engine.manager.pool.counts().used == 0
    decode.close()


def test_aborts_give_every_block_back(directory, worker):
    llm = LLM(directory, **OPTIONS)
    decode = DecodeEngine(llm.engine, [worker().worker.endpoint], timeout=5)
    for round_ in range(5):
        for number, prompt in enumerate(PROMPTS):
            prompt = [*prompt[:-1], 90 + round_]
            decode.add_request(f"{round_}-{number}", prompt, PARAMS)
        for _ in range(round_):
            decode.step()
        decode.abort([f"{round_}-{number}" for number in range(len(PROMPTS))])
        end = time.monotonic() + 20
        while decode.has_unfinished and time.monotonic() < end:
            decode.step()
        assert llm.engine.manager.pool.counts().used == 0
    decode.close()


def prefill_process(pipe, directory):
    worker = PrefillWorker(LLM(directory, **OPTIONS).engine)
    pipe.send(worker.endpoint)
    while not pipe.poll(0):
        worker.step(0.01)
    worker.close()


def test_a_prefill_process_and_its_death(directory):
    """Text is the same while it lives, when it is killed, and after."""
    expected = tokens(generate(LLM(directory, **OPTIONS).engine))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=prefill_process, args=(theirs, directory))
    process.start()
    try:
        assert ours.poll(60)
        llm = LLM(directory, **OPTIONS)
        decode = DecodeEngine(llm.engine, [ours.recv()], timeout=3)
        assert tokens(generate(decode)) == expected and decode.fetched_tokens > 0
        assert llm.engine.manager.reset_prefix_cache()
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        began = time.monotonic()
        assert tokens(generate(decode, prefix="late")) == expected
        assert decode.failed_fetches > 0 and time.monotonic() - began < 15
        assert llm.engine.manager.pool.counts().used == 0
        decode.close()
    finally:
        process.kill()
        process.join(10)


def test_what_cannot_be_split_is_refused(directory):
    with pytest.raises(ConfigError, match="prefix cache"):
        cache_layout(LLM(directory, enable_prefix_caching=False, **OPTIONS).engine)
    engine = LLM(directory, **OPTIONS).engine
    with pytest.raises(ConfigError, match="endpoint"):
        DecodeEngine(engine, [])
    with pytest.raises(TransferError, match=r"no answer from .* within 0.3 s"):
        DecodeEngine(engine, ["tcp://127.0.0.1:9"], timeout=0.3)


@pytest.mark.parametrize("kind", ["context_parallel_size", "tensor_parallel_size"])
def test_an_engine_of_several_ranks_is_refused(directory, kind):
    """Rank 0 has a part of each block: what it would hand on as the whole is not."""
    llm = LLM(directory, **{kind: 2}, **OPTIONS)
    try:
        with pytest.raises(ConfigError, match="engines of one rank"):
            cache_layout(llm.engine)
    finally:
        llm.engine.runner.close_ranks()

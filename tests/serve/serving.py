"""A tiny random model with a byte-level tokenizer, served over real HTTP."""

import asyncio
import contextlib
import os
import shutil
import threading
import time

import torch
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from blocktable import LLM
from blocktable.serve.app import build_app
from blocktable.serve.config import ServerConfig
from blocktable.serve.connections import guarded_protocol
from blocktable.serve.run import listen

CHROMIUM = os.environ.get("BLOCKTABLE_CHROMIUM") or shutil.which("chromium")

TEMPLATE = (
    "{% if tools %}tools:{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}"
    "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_tokenizer():
    """One token a byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {"<|end|>": 256}
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|end|>")
    made.chat_template = TEMPLATE
    return made


def make_llm(**options):
    """A two-layer llama over 300 tokens, float32, a pool of 400 blocks of 4 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        eos_token_id=256, bos_token_id=None,
    )  # fmt: skip
    defaults = {
        "block_size": 4, "num_blocks": 400, "max_model_len": 512, "max_num_seqs": 8,
        "dtype": "float32",
    }  # fmt: skip
    return LLM(LlamaForCausalLM(config).eval(), tokenizer=make_tokenizer(), **defaults | options)


class AppThread:
    """An application on a free port of 127.0.0.1, in a thread."""

    def __init__(self, app, port=0, **options):
        self._socket = listen(ServerConfig(port=port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        made = uvicorn.Config(
            app, log_level="warning", lifespan="on", timeout_graceful_shutdown=1, **options
        )
        self._server = uvicorn.Server(made)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(sockets=[self._socket])), daemon=True
        )

    def start(self):
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def stop(self):
        self._server.should_exit = True
        self._thread.join(timeout=20)


@contextlib.contextmanager
def run_app(app):
    made = AppThread(app).start()
    try:
        yield made.url
    finally:
        made.stop()


class Server(AppThread):
    """A running server and what the tests look at."""

    def __init__(self, llm, config, port=0):
        self.llm, self.config = llm, config
        self.app = build_app(llm.engine, config, "tiny")
        super().__init__(
            self.app, port, http=guarded_protocol(config.read_seconds, config.max_head_bytes)
        )

    @property
    def bridge(self):
        return self.app.state.bridge

    def used_blocks(self):
        return self.llm.engine.manager.pool.used

    def wait_idle(self, seconds=5.0):
        """Wait until no block is held; the time it took."""
        start = time.monotonic()
        while self.used_blocks() or self.bridge.rows:
            assert time.monotonic() - start < seconds, "blocks are still held"
            time.sleep(0.005)
        return time.monotonic() - start


@contextlib.contextmanager
def running(config=None, port=0, **options):
    server = Server(make_llm(**options), config or ServerConfig(port=0), port).start()
    try:
        yield server
    finally:
        server.stop()

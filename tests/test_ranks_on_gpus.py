"""Two GPUs and NCCL: the text of one rank in CUDA graphs, ranks that fail, and an end that ends."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_tensor_parallel import OPTIONS, answers, model_directory

from blocktable import LLM, SamplingParams
from blocktable.core.errors import RankError
from blocktable.ranks.steps import LeadingRunner

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ON_GPUS = OPTIONS | {"device": "cuda", "block_size": 16, "compile": False}
LONG = SamplingParams(max_tokens=100, ignore_eos=True)
KINDS = {
    "tensor, eager": {"tensor_parallel_size": 2, "cuda_graphs": False},
    "tensor": {"tensor_parallel_size": 2},
    "context, eager": {"context_parallel_size": 2, "cuda_graphs": False},
    "context": {"context_parallel_size": 2, "context_parallel_interleave": 4},
}


@two_gpus
@pytest.mark.parametrize("kind", KINDS)
def test_text_equals_that_of_one_gpu(tmp_path: Path, kind: str) -> None:
    directory = model_directory(tmp_path, 2, "llama")
    expected = answers(LLM(str(directory), **ON_GPUS))
    llm = LLM(str(directory), **ON_GPUS, **KINDS[kind])
    try:
        assert answers(llm) == expected
        graphs = sum(map(len, llm.engine.runner.captured()))
        assert (graphs > 0) == ("eager" not in kind)
    finally:
        began = time.monotonic()
        llm.engine.runner.close_ranks()
    assert time.monotonic() - began < 20.0


@two_gpus
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_failing_rank_ends_the_engine_with_its_name(tmp_path: Path, sign: signal.Signals) -> None:
    """Killed or stopped in the middle of decoding in graphs: the other GPU waits in a kernel."""
    directory = model_directory(tmp_path, 2, "llama")
    llm = LLM(str(directory), tensor_parallel_size=2, **(ON_GPUS | {"rank_timeout": 8.0}))
    child = torch.multiprocessing.active_children()[0]
    try:
        stream = llm.stream([[5, 6, 7]], LONG)
        for _ in range(12):
            next(stream)
        os.kill(child.pid or 0, sign)
        began = time.monotonic()
        with pytest.raises(RankError, match=r"rank 1 (died|is silent|did not confirm)|1 is silent"):
            while True:
                llm.engine.step()
        assert time.monotonic() - began < 15.0
    finally:
        if child.is_alive():
            os.kill(child.pid or 0, signal.SIGCONT)
        llm.engine.runner.close_ranks()


def test_tokens_are_awaited_with_an_eye_on_the_ranks() -> None:
    """The wait goes through the channel for tokens of a device, and not where there is no wait."""
    watched: list[int] = []

    class Tokens(SimpleNamespace):
        def __call__(self) -> np.ndarray:
            return np.array([4, 5])

    def watch(step: int, is_done: Any) -> None:
        watched.append(step)
        assert is_done() is True

    tokens = Tokens(is_there=lambda: True)
    channel: Any = SimpleNamespace(watch=watch)
    made: Any = SimpleNamespace(download=lambda ids: tokens)
    leading = LeadingRunner(made, None, channel, None)  # type: ignore[arg-type]
    leading._told = 1, 7, 0
    wait = leading.download(torch.tensor([4, 5]))
    leading._told = 2, 8, 0  # the next step is told of before these tokens are awaited
    assert wait().tolist() == [4, 5] and watched == [7]
    made.download = lambda ids: ids.numpy
    assert leading.download(torch.tensor([6]))().tolist() == [6] and watched == [7]

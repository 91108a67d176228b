"""What an engine is built with, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from blocktable.core.errors import ConfigError
from blocktable.engine.option_checks import KINDS, checked
from blocktable.sched.draft import DraftProposer


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of :class:`blocktable.LLM`. Raises ConfigError for a value that cannot work.

    Attributes:
        dtype: "auto" (bfloat16 where the device computes it fast), "float32", "bfloat16",
        "float16". device: "cpu", "cuda" or "cuda:<index>".
        block_size: positions in one block.
        num_blocks: blocks of the pool, the null block included; None sizes the pool from memory.
        memory_bytes: memory for the pool, where ``num_blocks`` is None.
        memory_share: share of the memory available at start, where neither is given.
        max_model_len: most tokens of a request, prompt and output; None is the model's own limit,
            lowered to what the pool holds.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens computed in one step; raised to ``max_model_len`` where
            prompts may not be cut (``enable_chunked_prefill=False``).
        enable_prefix_caching: share computed blocks of equal prefixes (models whose layers keep
            states of their own never do).
        eviction: which cached blocks go first when room is needed: "lru", or "reuse", which learns
            from the traffic what a block is worth.
        retain_share: most of the pool's usable blocks that hints may keep (``pin`` of the manager,
            ``retention`` of requests); 0 ignores them.
        enable_chunked_prefill: a prompt may be computed over several steps.
        preemption: what a victim's blocks become: recomputed later, or copied to host memory.
        num_host_blocks: blocks of host memory for ``preemption="swap"``.
        policy: "fcfs" or "priority".
        seed: fixes draws of requests that bring no seed, and the prefix keys.
        accelerate: swap linear layers for faster ones that round alike; None does so for models
            loaded here, not for a model object that the caller may be using elsewhere.
        async_steps: schedule a step while the one before it is still on the device; None does so
            on a GPU.
        compile: compile the decoder blocks with torch.compile; None does so on a GPU.
        cuda_graphs: replay decode steps as CUDA graphs (GPU only).
        attention_backend: what attends on a GPU: "auto" (ours, or FlashInfer or FlashAttention
            where one is installed and measured to be faster for a kind of step), "triton" (ours),
            "flashinfer" or "flash_attn" (that library, for every step).
        gpu_memory_utilization: share of a GPU's whole memory that weights, activations and the
            pool may take together, where neither ``num_blocks`` nor ``memory_bytes`` is given.
        tensor_parallel_size: ranks that share the model, each with its part of the heads. They are
            started as processes of this machine, or by torchrun.
        context_parallel_size: ranks that share out the positions of each sequence, so that the KV
            cache holds so many times the tokens; each has the whole model. Windowed layers are kept
            whole on every rank.
        context_parallel_interleave: neighbouring positions that one rank keeps; divides the block.
        rank_timeout: seconds after which a silent rank ends the engine with an error.
        num_draft_tokens: most tokens guessed ahead for a request in a step and checked in one
            forward pass; 0 guesses none. The output is the same with any number. Schedules one
            step at a time, and needs a model without states of its own.
        draft_ngram_min, draft_ngram_max: how many of a request's last tokens are looked up in its
            text, to guess that it goes on as it did there.
        proposer: guesses instead of that look-up (a draft model, say): a
            :class:`~blocktable.sched.draft.DraftProposer`.
        kv_events: endpoint where cache events are published. tcp://*:5557, tcp://127.0.0.1:* (a
            free port) and ipc:// are bound; one that names host and port, as tcp://10.0.0.1:5557,
            is connected to, and the subscriber there must bind it (as in vLLM; a warning is logged
            if nobody does).
        kv_events_replay: endpoint where missed events can be asked for; always bound.
    """

    dtype: str = "auto"
    device: str = "cpu"
    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int | None = None
    memory_share: float = 0.25
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    eviction: Literal["lru", "reuse"] = "lru"
    retain_share: float = 0.5
    enable_chunked_prefill: bool = True
    preemption: Literal["recompute", "swap"] = "recompute"
    num_host_blocks: int = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    seed: int | None = None
    accelerate: bool | None = None
    async_steps: bool | None = None
    compile: bool | None = None
    cuda_graphs: bool = True
    attention_backend: str = "auto"
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    context_parallel_interleave: int = 1
    rank_timeout: float = 60.0
    num_draft_tokens: int = 0
    draft_ngram_min: int = 2
    draft_ngram_max: int = 4
    proposer: DraftProposer | None = None
    kv_events: str | None = None
    kv_events_replay: str | None = None

    def __post_init__(self) -> None:
        for name in KINDS:
            object.__setattr__(self, name, checked(name, getattr(self, name)))
        if not (self.device == "cpu" or self.device.split(":")[0] == "cuda"):
            raise ConfigError(f"device must be cpu or cuda, got {self.device!r}")
        self._check_attention()
        self._check_drafts()
        self._check_ranks()

    def _check_ranks(self) -> None:
        if self.tensor_parallel_size > 1 and self.context_parallel_size > 1:
            raise ConfigError(
                f"tensor_parallel_size {self.tensor_parallel_size} and context_parallel_size "
                f"{self.context_parallel_size} cannot be combined: one of them must be 1"
            )
        if self.block_size % self.context_parallel_interleave:
            raise ConfigError(
                f"context_parallel_interleave {self.context_parallel_interleave} does not divide "
                f"block_size {self.block_size}"
            )

    def _check_attention(self) -> None:
        if self.attention_backend != "auto" and not self.on_gpu:
            raise ConfigError(
                f"attention_backend {self.attention_backend!r} needs device cuda, got "
                f"{self.device!r}"
            )

    def _check_drafts(self) -> None:
        count = self.num_draft_tokens
        if self.draft_ngram_min > self.draft_ngram_max:
            raise ConfigError(
                f"draft_ngram_min {self.draft_ngram_min} is above draft_ngram_max "
                f"{self.draft_ngram_max}"
            )
        if self.proposer is not None and not count:
            raise ConfigError("a proposer needs num_draft_tokens >= 1, got 0")
        if count and self.async_steps:
            raise ConfigError(f"num_draft_tokens {count} and async_steps exclude each other")
        if count and self.num_ranks > 1:
            raise ConfigError(
                f"num_draft_tokens {count} cannot be used with tensor_parallel_size "
                f"{self.tensor_parallel_size} and context_parallel_size "
                f"{self.context_parallel_size}"
            )

    @property
    def on_gpu(self) -> bool:
        """Whether the model runs on a GPU."""
        return self.device != "cpu"

    @property
    def num_ranks(self) -> int:
        """Processes of the engine."""
        return self.tensor_parallel_size * self.context_parallel_size

    @property
    def steps_in_flight(self) -> int:
        """Steps that may be launched before the first of them is collected."""
        wanted = self.on_gpu and not self.num_draft_tokens
        return 2 if (wanted if self.async_steps is None else self.async_steps) else 1

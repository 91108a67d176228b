"""From a loaded model and options to a running engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from blocktable.attention import paged_attention, write_kv
from blocktable.core.errors import ConfigError
from blocktable.core.specs import KVCacheConfig
from blocktable.engine.drafts import make_proposer
from blocktable.engine.engine import Engine, ModelLimits
from blocktable.engine.kv_layout import (
    KVLayout,
    available_memory,
    choose_num_blocks,
    plan_layout,
)
from blocktable.engine.loader import LoadedModel
from blocktable.engine.options import EngineOptions
from blocktable.engine.probe import ProbeResult, probe_model
from blocktable.engine.runner import ContextShare, ModelRunner
from blocktable.engine.sampling import Sampler
from blocktable.engine.sampling.grammar import GrammarRows
from blocktable.groups.keybook import CacheSink
from blocktable.manager import KVCacheManager
from blocktable.sched.config import SchedulerConfig
from blocktable.sched.scheduler import Scheduler


class Prepared(NamedTuple):
    """A model that was probed, and the KV cache that was laid out and sized for it."""

    loaded: LoadedModel
    options: EngineOptions
    probed: ProbeResult
    layout: KVLayout
    config: KVCacheConfig
    max_model_len: int
    max_num_batched_tokens: int
    share: ContextShare | None = None


def prepare_engine(
    loaded: LoadedModel,
    options: EngineOptions,
    *,
    probed: ProbeResult | None = None,
    agree: Callable[[KVCacheConfig], int] | None = None,
    share: ContextShare | None = None,
) -> Prepared:
    """Probe the model and size the pool. ``agree`` may lower the number of blocks, to what every
    rank of a parallel engine has; ``share`` is this rank's part in a context-parallel one. Raises
    UnsupportedModel or ConfigError."""
    model = loaded.model
    device = torch.device(options.device)
    if _accelerates(loaded, options):
        if options.on_gpu:
            from blocktable.engine.gpu.fuse import fuse_siblings

            fuse_siblings(model)
        else:
            from blocktable.engine.fuse import accelerate_model

            accelerate_model(model)
    if probed is None:
        probed = probe_model(model, paged_attention, write_kv)
    layout = plan_layout(probed, options.block_size, model.dtype)
    layout = layout.dealt_out(options.context_parallel_size)
    model_len = _model_limit(model.config.get_text_config(), options)
    if options.on_gpu and options.num_blocks is None and options.memory_bytes is None:
        from blocktable.engine.gpu.sizing import measured_num_blocks

        num_blocks = measured_num_blocks(model, probed, layout, options, model_len)
    else:
        num_blocks = choose_num_blocks(
            layout, num_blocks=options.num_blocks, memory_bytes=options.memory_bytes,
            available=available_memory(device), share=options.memory_share,
            max_useful_tokens=model_len * options.max_num_seqs,
        )  # fmt: skip
    if agree is not None:
        num_blocks = agree(layout.config(num_blocks))
    max_model_len = _fit_model_len(layout, options, model_len, num_blocks)
    batched = _token_budget(options, max_model_len)
    config = layout.config(num_blocks)
    return Prepared(loaded, options, probed, layout, config, max_model_len, batched, share)


def make_runner(prepared: Prepared, manager: Any) -> ModelRunner:
    """The runner over a manager's tables (or over anything with ``tables`` and ``tokens``)."""
    return _runner(
        prepared.options, prepared.max_num_batched_tokens, prepared.share, prepared.loaded.model,
        prepared.probed, prepared.layout, prepared.config, manager,
    )  # fmt: skip


def build_engine(
    loaded: LoadedModel,
    options: EngineOptions,
    *,
    probed: ProbeResult | None = None,
    make_sink: Callable[[KVCacheConfig], CacheSink] | None = None,
) -> Engine:
    """Probe the model, size the pool, and wire manager, scheduler, runner and sampler.

    ``probed`` is what the probe found for this very model object earlier, if it was probed;
    ``make_sink`` makes what hears of the cache's changes.
    Raises UnsupportedModel or ConfigError; nothing but the model's memory is held then.
    """
    return assemble_engine(prepare_engine(loaded, options, probed=probed), make_sink=make_sink)


def assemble_engine(
    prepared: Prepared,
    *,
    wrap: Callable[[ModelRunner], Any] | None = None,
    make_sink: Callable[[KVCacheConfig], CacheSink] | None = None,
) -> Engine:
    """The engine over a prepared model; ``wrap`` may put something in front of its runner."""
    loaded, options, probed = prepared.loaded, prepared.options, prepared.probed
    model, tokenizer = loaded.model, loaded.tokenizer
    manager = KVCacheManager(
        prepared.config, max_num_rows=options.max_num_seqs, max_model_len=prepared.max_model_len,
        max_num_batched_tokens=prepared.max_num_batched_tokens,
        enable_caching=options.enable_prefix_caching and not probed.mixers.modules,
        seed=options.seed, host_blocks=options.num_host_blocks,
        eviction=options.eviction, retain_share=options.retain_share,
        sink=None if make_sink is None else make_sink(prepared.config),
    )  # fmt: skip
    batched = prepared.max_num_batched_tokens
    vocab_size = model.config.get_text_config().vocab_size
    scheduler = Scheduler(
        _scheduler_config(options, batched, probed), manager,
        proposer=make_proposer(options, vocab_size),
    )  # fmt: skip
    runner = make_runner(prepared, manager)
    eos = eos_token_ids(model, tokenizer)
    grammars = GrammarRows(tokenizer, vocab_size, eos) if tokenizer else None
    sampler = Sampler(
        options.max_num_seqs, vocab_size, torch.device(options.device), eos_token_ids=eos,
        seed=options.seed, grammars=grammars,
    )  # fmt: skip
    limits = ModelLimits(vocab_size, prepared.max_model_len, eos)
    return Engine(
        runner if wrap is None else wrap(runner), scheduler, sampler, limits,
        tokenizer=tokenizer, layout=prepared.layout,
    )  # fmt: skip


def _runner(
    options: EngineOptions, batched: int, share: ContextShare | None, *parts: Any
) -> ModelRunner:
    """The runner for the device; ``parts`` are ModelRunner's positional arguments."""
    backend = {
        "attend": paged_attention, "write": write_kv, "num_host_blocks": options.num_host_blocks,
        "share": share,
    }  # fmt: skip
    if not options.on_gpu:
        from blocktable.attention import cpu

        backend |= {"attend": cpu.paged_attention, "write": cpu.write_kv}
        return ModelRunner(*parts, prepare=cpu.plan_step, **backend)
    from blocktable.engine.gpu.runner import GraphRunner

    return GraphRunner(
        *parts, max_num_seqs=options.max_num_seqs, max_num_batched_tokens=batched,
        compile=options.compile is not False, use_graphs=options.cuda_graphs,
        attention_backend=options.attention_backend, **backend,
    )  # fmt: skip


def _accelerates(loaded: LoadedModel, options: EngineOptions) -> bool:
    return loaded.owned if options.accelerate is None else options.accelerate


def _model_limit(text_config: Any, options: EngineOptions) -> int:
    """Most tokens a request may have by the model's or the caller's word."""
    own = getattr(text_config, "max_position_embeddings", None)
    if own is None:
        own = getattr(text_config, "n_positions", None) or 1 << 16
    if options.max_model_len is not None and options.max_model_len > own:
        raise ConfigError(
            f"max_model_len is {options.max_model_len}, but the model has positions for {own}"
        )
    return options.max_model_len or own


def _fit_model_len(
    layout: KVLayout, options: EngineOptions, model_len: int, num_blocks: int
) -> int:
    """The limit itself where the caller set it (the scheduler checks it), else lowered until a
    request of that length fits into the pool."""
    if options.max_model_len is not None or layout.blocks_for(model_len) <= num_blocks - 1:
        return model_len
    low, high = 1, model_len
    while low < high:
        middle = (low + high + 1) // 2
        if layout.blocks_for(middle) <= num_blocks - 1:
            low = middle
        else:
            high = middle - 1
    return max(low, 2)


def _token_budget(options: EngineOptions, max_model_len: int) -> int:
    if options.enable_chunked_prefill:
        return options.max_num_batched_tokens
    return max(options.max_num_batched_tokens, max_model_len)


def _scheduler_config(options: EngineOptions, batched: int, probed: ProbeResult) -> SchedulerConfig:
    swap = options.preemption == "swap"
    if swap and probed.mixers.modules:
        raise ConfigError("preemption 'swap' moves blocks alone; this model keeps states too")
    if options.num_draft_tokens and probed.mixers.modules:
        raise ConfigError(
            f"num_draft_tokens must be 0, got {options.num_draft_tokens}: this model keeps states "
            "that cannot be rolled back to before a rejected token"
        )
    return SchedulerConfig(
        max_num_seqs=options.max_num_seqs, max_num_batched_tokens=batched,
        policy=options.policy, chunked_prefill=options.enable_chunked_prefill,
        preemption=options.preemption,
        max_steps_in_flight=options.steps_in_flight, num_draft_tokens=options.num_draft_tokens,
    )  # fmt: skip


def eos_token_ids(model: Any, tokenizer: Any | None) -> tuple[int, ...]:
    """The model's end-of-sequence ids: its generation config's, its config's, the tokenizer's."""
    sources = (
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(model.config.get_text_config(), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    for found in sources:
        if found is not None:
            return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)
    return ()

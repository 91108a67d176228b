"""Proving, at load, that a model's attention really goes through the block table.

Replacing attention by name fails silently for some architectures: a few never call the function,
some drop its arguments, some keep a state of their own. So before a model is served, it runs two
short requests both ways::

    alone, transformers' own attention      A: a0 a1 a2 a3        B: b0 b1 b2 b3 b4 b5 b6
    through pages, in one ragged batch      step 1: a0 a1 a2 b0 b1 b2 b3   step 2: a3 b4 b5 b6

Every attention layer must be called exactly once a pass, and the logits at the end of A and B must
agree, and so must each layer on its own (:mod:`blocktable.engine.probe_layers`) and the keys of the
first one, which show wrong positions. What the layers asked for on the way (heads, head sizes,
window, softcap, sinks) is what the KV cache is laid out by: observed, not configured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from blocktable.core.errors import UnsupportedModel
from blocktable.engine.attention_glue import (
    ATTENTION_NAME,
    AttentionCall,
    AttentionSwitch,
    GroupStep,
    LayerCache,
    PagedStep,
    paged_forward,
    register_attention,
)
from blocktable.engine.loader.hub import one_line
from blocktable.engine.probe_layers import (
    LAYER_LIMITS,
    MASKS_NAME,
    LayerComparison,
    check_span,
    mask_predicate,
    register_masks,
    relative_difference,
)
from blocktable.engine.probe_mixers import continue_in_one_go
from blocktable.engine.stateful import StatefulMixers

_BLOCK_SIZE, _WIDTH = 4, 2
_LENGTHS = (4, 7)  # tokens of A and B
_SPLIT = (3, 4)  # of which step 1 computes so many
_TOLERANCE = {torch.float32: 2e-3, torch.float64: 2e-3}
_TOLERANCE_LOW = 0.5
"""Root mean square of the difference over that of the logits. SmolLM2 gives 4e-6 in float32 and
0.13 in bfloat16, where the order of additions alone changes that much: the layers are compared one
by one for that."""

ATTENTION_LAYER_TYPES = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid"}
)


@dataclass(slots=True)
class ProbedLayer:
    """One attention layer: its module, its name in the model, what it asked for."""

    module: torch.nn.Module
    name: str
    call: AttentionCall
    window: int | None
    """Window that the config states for a layer that passes none itself."""


@dataclass(slots=True)
class ProbeResult:
    """Attention layers in the order in which they run, and the mixers with states of their own."""

    layers: list[ProbedLayer]
    mixers: StatefulMixers
    error: float = 0.0
    """Relative difference of the logits, see the module's tolerance."""


@dataclass(slots=True)
class _Recorder:
    """Stands where a PagedStep will stand; makes each layer's little cache at its first call."""

    attend: Callable[..., Any]
    write: Callable[..., None]
    config: Any
    names: dict[int, str]
    layers: dict[int, ProbedLayer] = field(default_factory=dict)
    caches: dict[int, LayerCache] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)
    masks: dict[int, Callable[..., Any]] = field(default_factory=dict)  # predicates over positions
    first_keys: list[torch.Tensor] = field(default_factory=list)  # [T, Hkv, D] a call, first layer
    group: GroupStep | None = None
    serving: bool = True
    """The pass is one as the engine will run it, without masks."""

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        ident = id(module)
        if ident not in self.layers:
            self._add(module, query, key, value, kwargs)
        if self.serving:
            self._count(ident, attention_mask)
        elif (predicate := mask_predicate(attention_mask)) is not None:
            self.masks[ident] = predicate
        if ident == next(iter(self.layers)):
            self.first_keys.append(key[0].transpose(0, 1).clone())
        if self.group is None:
            raise UnsupportedModel("the probe was called outside a step")
        step = PagedStep(self.caches, [self.group], self.attend, self.write)
        kwargs["blocktable"] = step
        return paged_forward(module, query, key, value, attention_mask, **kwargs)

    def _count(self, ident: int, attention_mask: Any) -> None:
        self.calls[ident] = self.calls.get(ident, 0) + 1
        if attention_mask is not None:
            raise UnsupportedModel(
                f"{self.layers[ident].name} makes a mask of its own, which pages cannot follow"
            )

    def _add(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> None:
        name = self.names.get(id(module), type(module).__name__)
        if query.shape[0] != 1:
            raise UnsupportedModel(f"{name} attends over a batch of {query.shape[0]}, not one")
        if not getattr(module, "is_causal", True):
            raise UnsupportedModel(f"{name} attends in both directions: it is no decoder layer")
        chunk, window = _declared_span(self.config, module)
        scaling = kwargs.get("scaling")
        call = AttentionCall(
            num_heads=query.shape[1], num_kv_heads=key.shape[1], head_size=key.shape[3],
            head_size_v=value.shape[3],
            scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
            sliding_window=kwargs.get("sliding_window") or window, chunk=chunk,
            softcap=kwargs.get("softcap"), has_sinks=kwargs.get("s_aux") is not None,
        )  # fmt: skip
        blocks = 1 + _WIDTH * len(_LENGTHS)
        self.layers[id(module)] = ProbedLayer(module, name, call, window)
        self.caches[id(module)] = LayerCache(
            key.new_zeros((blocks, key.shape[1], _BLOCK_SIZE, key.shape[3])),
            value.new_zeros((blocks, value.shape[1], _BLOCK_SIZE, value.shape[3])),
            group=0, chunk=chunk, window=window,
        )  # fmt: skip


def _declared_span(config: Any, module: torch.nn.Module) -> tuple[int | None, int | None]:
    """Chunk and window of a layer that its config states by ``layer_types``; None, None if none."""
    kinds = getattr(config, "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if not kinds or index is None or index >= len(kinds):
        return None, None
    if kinds[index] == "chunked_attention":
        return getattr(config, "attention_chunk_size", None), None
    if kinds[index] == "sliding_attention":
        return None, getattr(config, "sliding_window", None)
    return None, None


def probe_model(model: Any, attend: Callable[..., Any], write: Callable[..., None]) -> ProbeResult:
    """Run the model both ways; see the module's docstring.

    ``attend`` and ``write`` are the ``paged_attention`` and ``write_kv`` that will serve it. Cost:
    five forward passes of at most 7 tokens, two of which run each attention layer twice. Raises
    UnsupportedModel, naming the architecture and what is wrong with it; the model is then as it
    was.
    """
    register_attention()
    register_masks()
    config = model.config.get_text_config()
    mixers = StatefulMixers(model)
    names = {id(module): name for name, module in model.named_modules()}
    recorder = _Recorder(attend, write, config, names)
    try:
        with torch.inference_mode():
            mixers.token_by_token = not continue_in_one_go(mixers.modules, model.config)
            paged = _paged_logits(model, recorder, mixers)
            _check_calls(model, config, recorder, mixers)
            alone = _own_logits(model, recorder)
            _check_masks(model, config, recorder)
        error = _difference(paged, alone)
        limit = _TOLERANCE.get(model.dtype, _TOLERANCE_LOW)
        if not error <= limit:
            raise UnsupportedModel(
                f"{_title(model)}: logits through the block table differ by {error:.2g} from "
                f"transformers' own attention, the limit is {limit:g}"
            )
    except BaseException:
        mixers.close()
        raise
    return ProbeResult(list(recorder.layers.values()), mixers, error)


def _probe_tokens(vocab_size: int) -> list[list[int]]:
    """Two sequences of different ids spread over the vocabulary."""
    seeds = torch.arange(sum(_LENGTHS), dtype=torch.int64)
    ids = ((seeds * 7919 + 11) % max(vocab_size - 3, 1) + 3).clamp(max=vocab_size - 1).tolist()
    return [ids[: _LENGTHS[0]], ids[_LENGTHS[0] :]]


def _paged_logits(model: Any, recorder: _Recorder, mixers: StatefulMixers) -> torch.Tensor:
    """Logits [2, V] at the last tokens of both requests, through pages in two steps."""
    tokens = _probe_tokens(model.config.get_text_config().vocab_size)
    switch, done, logits = AttentionSwitch(model), (0, 0), None
    for ends in (_SPLIT, _LENGTHS):
        parts = [tokens[i][done[i] : ends[i]] for i in range(2)]
        positions = [torch.arange(done[i], ends[i]) for i in range(2)]
        recorder.group = _group_step(done, ends, model.device)
        bounds = [0, len(parts[0]), len(parts[0]) + len(parts[1])]
        mixers.enter_step((0, 1), done, bounds)
        mixers.active = True
        try:
            with switch:
                logits = _run(
                    model, parts[0] + parts[1], "be handed a step",
                    position_ids=torch.cat(positions)[None].to(model.device),
                    logits_to_keep=torch.tensor(bounds[1:], device=model.device) - 1,
                    blocktable=recorder,
                )  # fmt: skip
        finally:
            mixers.active = False
        done = ends
    mixers.release((0, 1))
    if logits is None or logits.shape[:2] != (1, 2):
        raise UnsupportedModel(f"{_title(model)} does not pick rows of logits by index")
    return logits[0]


def _run(model: Any, tokens: Sequence[int], doing: str, **inputs: Any) -> torch.Tensor:
    """Logits of one flattened batch; whatever the model raises becomes UnsupportedModel."""
    ids = torch.tensor([tokens], device=model.device)
    try:
        return model(input_ids=ids, use_cache=False, **inputs).logits
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise UnsupportedModel(f"{_title(model)} cannot {doing}: {one_line(error)}") from error


def _group_step(starts: Sequence[int], ends: Sequence[int], device: torch.device) -> GroupStep:
    """The step that computes tokens starts[i]..ends[i] of the i-th request, whose blocks are the
    i-th ``_WIDTH`` after the null block."""
    table = 1 + torch.arange(_WIDTH * len(ends), dtype=torch.int32).reshape(len(ends), _WIDTH)
    places = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    slots = [
        table[i, place // _BLOCK_SIZE].long() * _BLOCK_SIZE + place % _BLOCK_SIZE
        for i, place in enumerate(places)
    ]
    bounds = torch.tensor([0, *(len(place) for place in places)]).cumsum(0, dtype=torch.int32)
    return GroupStep(
        table.to(device), torch.cat(slots).to(device), bounds.to(device),
        torch.tensor(ends, dtype=torch.int32, device=device),
    )  # fmt: skip


def _own_logits(model: Any, recorder: _Recorder) -> torch.Tensor:
    """The same logits, each request alone, by transformers' own eager attention. Each attention
    layer is run again through pages and compared; raises UnsupportedModel if one differs."""

    def again(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return module.forward(*args, **{**kwargs, ATTENTION_NAME: recorder})

    layers = {layer.module: layer.name for layer in recorder.layers.values()}
    comparison = LayerComparison(model, layers, again)
    in_steps, recorder.first_keys, recorder.serving = recorder.first_keys, [], False
    rows = []
    with AttentionSwitch(model, "eager"), comparison.watching():
        for tokens in _probe_tokens(model.config.get_text_config().vocab_size):
            recorder.group = _group_step((0,), (len(tokens),), model.device)
            rows.append(_run(model, tokens, "attend by itself", logits_to_keep=1)[0, -1])
    comparison.check(_title(model))
    if layers:
        _check_first_keys(model, in_steps, recorder.first_keys)
    return torch.stack(rows)


def _check_first_keys(
    model: Any, in_steps: Sequence[torch.Tensor], alone: Sequence[torch.Tensor]
) -> None:
    """Keys of the first attention layer: two steps of A and B together against A and B alone."""
    cuts = (_SPLIT[0], _LENGTHS[0] - _SPLIT[0])  # tokens of A in each step, before those of B
    of_a = [keys[:cut] for keys, cut in zip(in_steps, cuts, strict=True)]
    of_b = [keys[cut:] for keys, cut in zip(in_steps, cuts, strict=True)]
    together = torch.cat([*of_a, *of_b])
    error = relative_difference(together, torch.cat(list(alone)))
    limit = LAYER_LIMITS.get(together.dtype, _TOLERANCE_LOW)
    if not error <= limit:
        raise UnsupportedModel(
            f"{_title(model)}: keys of the first attention layer differ by {error:.2g} from those "
            f"of requests run alone, the limit is {limit:g}: positions are not followed"
        )


def _check_masks(model: Any, config: Any, recorder: _Recorder) -> None:
    """Each layer's mask, as transformers states it, against what the layer asked for."""
    tokens = _probe_tokens(config.vocab_size)[0]
    recorder.group = _group_step((0,), (len(tokens),), model.device)
    with AttentionSwitch(model, MASKS_NAME):
        _run(model, tokens, "be asked for its masks", logits_to_keep=1, blocktable=recorder)
    last = (getattr(config, "max_position_embeddings", None) or 1 << 16) - 1
    layers = {(mask, recorder.layers[i].call): i for i, mask in recorder.masks.items()}
    for (predicate, call), ident in layers.items():
        check_span(predicate, call, last, f"{_title(model)}: layer {recorder.layers[ident].name}")


def _check_calls(model: Any, config: Any, recorder: _Recorder, mixers: StatefulMixers) -> None:
    """Every attention layer was called once in each of the two passes."""
    kinds = getattr(config, "layer_types", None)
    if kinds and any(kind in ATTENTION_LAYER_TYPES for kind in kinds):
        expected = sum(kind in ATTENTION_LAYER_TYPES for kind in kinds)
    elif mixers.modules:
        expected = len(recorder.layers)
    else:
        expected = config.num_hidden_layers
    found = len(recorder.layers)
    if found < expected or (not found and not mixers.modules):
        raise UnsupportedModel(
            f"{_title(model)}: {found} of {expected} attention layers go through the attention "
            f"interface"
        )
    odd = [recorder.layers[i].name for i, count in recorder.calls.items() if count != 2]
    if odd:
        raise UnsupportedModel(
            f"{_title(model)}: layer {odd[0]} called attention {recorder.calls} times in 2 passes"
        )


def _difference(paged: torch.Tensor, alone: torch.Tensor) -> float:
    """Root mean square of the difference over that of the logits around their mean."""
    paged, alone = paged.double(), alone.double()
    spread = (alone - alone.mean(-1, keepdim=True)).pow(2).mean().sqrt()
    return float((paged - alone).pow(2).mean().sqrt() / spread.clamp(min=1e-30))


def _title(model: Any) -> str:
    return type(model).__name__

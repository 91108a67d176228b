"""The probe's closer look, one attention layer at a time.

Logits at the end of a model say little in bfloat16: SmolLM2's differ by 0.13 between two equally
good ways to add. A single layer that is given the same input both ways differs by 0.007 at most, so
a scale, softcap or window that got lost on the way shows::

    transformers' own pass        hidden --> layer i (eager)  --> hidden' --> layer i + 1 ...
    again, on the same input      hidden --> layer i (paged)  --> compared with hidden'

A window longer than the probe's sequences would not show in any output. transformers states each
layer's mask as a predicate over positions, so that one is asked about the furthest position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from blocktable.core.errors import UnsupportedModel
from blocktable.engine.attention_glue import AttentionCall, AttentionSwitch, register_attention

MASKS_NAME = "blocktable_masks"
"""Attention implementation under which a model makes masks that say what they stand for."""

LAYER_LIMITS = {torch.float32: 2e-3, torch.float64: 2e-3, torch.float16: 0.02, torch.bfloat16: 0.05}
"""Root mean square of the difference over that of the layer's output. Measured over 33
architectures: up to 1e-6, 8e-4 (float16) and 7e-3 (bfloat16)."""

_FURTHEST = 1 << 17  # positions that a mask is asked about, at most

PairedRun = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Runs an attention layer through pages on the arguments it has just been called with."""


class LayerComparison:
    """Compares each of ``layers`` (module -> name), whenever it runs, with ``again``."""

    def __init__(self, model: Any, layers: dict[torch.nn.Module, str], again: PairedRun) -> None:
        self._switch = AttentionSwitch(model)
        self._layers, self._again = layers, again
        self.errors: dict[str, float] = {}
        """Largest relative difference of each layer that ran."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compare the layers of the forward passes within the block."""
        hooks = [
            module.register_forward_hook(self._compare, with_kwargs=True) for module in self._layers
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def check(self, title: str) -> None:
        """Raise UnsupportedModel, naming the worst layer, if one differs or was never compared."""
        missing = set(self._layers.values()) - self.errors.keys()
        if missing:
            raise UnsupportedModel(f"{title}: layer {min(missing)} cannot be run on its own")
        for module, name in self._layers.items():
            parameter = next(module.parameters(), None)
            limit = LAYER_LIMITS.get(torch.float32 if parameter is None else parameter.dtype, 0.05)
            if not self.errors[name] <= limit:
                raise UnsupportedModel(
                    f"{title}: layer {name} differs by {self.errors[name]:.2g} from transformers' "
                    f"own attention on the same input, the limit is {limit:g}"
                )

    def _compare(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        with self._switch:
            again = self._again(module, args, kwargs)
        error = relative_difference(_hidden(again), _hidden(output))
        name = self._layers[module]
        self.errors[name] = max(error, self.errors.get(name, 0.0))


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of ``expected``; 0 where both are 0."""
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def _hidden(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def register_masks() -> None:
    """Make :data:`MASKS_NAME` known to transformers; safe to call again."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    register_attention(MASKS_NAME)
    ALL_MASK_ATTENTION_FUNCTIONS.register(MASKS_NAME, _named_mask)


def _named_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Any],
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    **_: Any,
) -> torch.Tensor:
    """A mask of zeros that carries the predicate it was to be made from."""
    mask = torch.zeros((batch_size, 1, q_length, kv_length), dtype=dtype, device=device)
    mask.blocktable_predicate = mask_function  # pyright: ignore[reportAttributeAccessIssue]
    return mask


def mask_predicate(mask: Any) -> Callable[..., Any] | None:
    """What a mask made under :data:`MASKS_NAME` stands for; None for any other."""
    return getattr(mask, "blocktable_predicate", None)


def check_span(predicate: Callable[..., Any], call: AttentionCall, last: int, name: str) -> None:
    """Raise UnsupportedModel if the mask lets the token at the furthest position see other tokens
    than ``call`` does. ``last`` is the model's last position; O(last)."""
    query = torch.tensor(min(last, _FURTHEST))
    keys = torch.arange(int(query) + 2)
    zero = torch.tensor(0)
    try:
        seen = torch.as_tensor(predicate(zero, zero, query, keys)).expand(keys.shape)
    except (IndexError, RuntimeError, TypeError):
        return  # a predicate over something else than positions
    ours = keys <= query
    if call.sliding_window is not None:
        ours &= keys > query - call.sliding_window
    if call.chunk is not None:
        ours &= keys // call.chunk == query // call.chunk
    if not torch.equal(seen, ours):
        raise UnsupportedModel(
            f"{name} masks all but {int(seen.sum())} tokens before position {int(query) + 1}, but "
            f"asks for attention to {int(ours.sum())}"
        )

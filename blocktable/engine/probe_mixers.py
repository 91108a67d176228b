"""Whether a model's stateful mixers take several tokens into a state that is not empty.

Some (Mamba 1, Jamba) read the state only for a single token and begin anew for more, silently. That
is a property of their code, so one mixer of each class is tried, as a float32 copy: the difference
drowns in the noise of a whole model in bfloat16 (0.066 of tiny Mamba's logits).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from blocktable.engine.probe_layers import relative_difference
from blocktable.engine.stateful import StatefulMixers

_LENGTH, _SPLIT = 7, 3
_TOLERANCE = 2e-3


def continue_in_one_go(mixers: Sequence[torch.nn.Module], config: Any) -> bool:
    """True if every class of mixers gives the same for tokens in two parts as in one.

    Copies the last mixer of each class, which is the one that caches ask about their length.
    """
    last = {type(mixer): mixer for mixer in mixers}
    return all(_continues(mixer, config) for mixer in last.values())


class _Alone(torch.nn.Module):
    """A mixer as a model of its own."""

    def __init__(self, mixer: torch.nn.Module, config: Any) -> None:
        super().__init__()
        self.mixer, self.config = mixer, config


def _continues(mixer: torch.nn.Module, config: Any) -> bool:
    clone = _float32_copy(mixer)
    generator = torch.Generator().manual_seed(0)
    shape = (1, _LENGTH, config.get_text_config().hidden_size)
    hidden = torch.randn(shape, generator=generator).to(next(clone.parameters()).device)
    states = StatefulMixers(_Alone(clone, config))
    states.active = True
    whole = _run(clone, states, hidden, 0, _LENGTH)
    parts = [_run(clone, states, hidden, 0, _SPLIT), _run(clone, states, hidden, _SPLIT, _LENGTH)]
    return relative_difference(torch.cat(parts, dim=1), whole) <= _TOLERANCE


def _run(
    mixer: torch.nn.Module, states: StatefulMixers, hidden: torch.Tensor, start: int, end: int
) -> torch.Tensor:
    states.enter_step((0,), (start,), (0, end - start))
    output = mixer(hidden[:, start:end])
    return output[0] if isinstance(output, tuple) else output


def _float32_copy(mixer: torch.nn.Module) -> torch.nn.Module:
    """A deep copy without the wrapper, which would lead back to the original."""
    wrapped = vars(mixer).pop("forward", None)
    try:
        return copy.deepcopy(mixer).float()
    finally:
        if wrapped is not None:
            mixer.forward = wrapped

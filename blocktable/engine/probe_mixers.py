"""Whether a model's stateful mixers take several tokens into a state that is not empty.

Some (Mamba 1, Jamba) read the state only for a single token and begin anew for more, silently. That
is a property of their code, so one mixer of each class is made anew and tried in float32: in a
whole model in bfloat16 the difference (0.066 of tiny Mamba's logits) drowns in the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from blocktable.engine.probe_layers import relative_difference
from blocktable.engine.stateful import StatefulMixers

_LENGTH, _SPLIT = 7, 3
_TOLERANCE = 2e-3


def continue_in_one_go(mixers: Sequence[torch.nn.Module], config: Any) -> bool:
    """True if every class of mixers gives the same for tokens in two parts as in one; False also
    where that cannot be tried: token by token is right for all.

    Tries each in the place of its last layer, the one that caches ask about their length.
    """
    last = {type(mixer): mixer for mixer in mixers}
    try:
        return all(_continues(mixer, config) for mixer in last.values())
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False


class _Alone(torch.nn.Module):
    """A mixer as a model of its own."""

    def __init__(self, mixer: torch.nn.Module, config: Any) -> None:
        super().__init__()
        self.mixer, self.config = mixer, config


def _continues(original: torch.nn.Module, config: Any) -> bool:
    generator = torch.Generator().manual_seed(0)
    mixer = _made_anew(original, config, generator)
    width = config.get_text_config().hidden_size
    hidden = torch.randn((1, _LENGTH, width), generator=generator)
    states = StatefulMixers(_Alone(mixer, config))
    states.active = True
    whole = _run(mixer, states, hidden, 0, _LENGTH)
    parts = [_run(mixer, states, hidden, 0, _SPLIT), _run(mixer, states, hidden, _SPLIT, _LENGTH)]
    return relative_difference(torch.cat(parts, dim=1), whole) <= _TOLERANCE


def _made_anew(original: Any, config: Any, generator: torch.Generator) -> torch.nn.Module:
    """A float32 mixer of that class in that layer, on the CPU, with small random weights. A copy
    would need weights that can be copied; packed ones cannot."""
    with torch.random.fork_rng(devices=()):
        mixer = type(original)(config.get_text_config(), original.layer_idx)
    for name, buffer in original.named_buffers(recurse=False):
        mixer.register_buffer(name, buffer.cpu())
    for parameter in mixer.parameters():
        parameter.normal_(0.0, 0.3, generator=generator)
    return mixer.float().eval()


def _run(
    mixer: torch.nn.Module, states: StatefulMixers, hidden: torch.Tensor, start: int, end: int
) -> torch.Tensor:
    states.enter_step((0,), (start,), (0, end - start))
    output = mixer(hidden[:, start:end])
    return output[0] if isinstance(output, tuple) else output

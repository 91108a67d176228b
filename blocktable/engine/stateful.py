"""Layers with a state of their own (Mamba, gated delta net, short convolution), one state a
request.

Attention finds a token's past through the block table; these layers carry theirs along in a
recurrent state. A flattened batch would run one request's state into the next, so each such mixer
is wrapped: it runs once for each request's segment of the batch, with that request's own cache::

    hidden [1, T, H] = | request 0 | request 1 | request 2 |
                            |           |           |
                        cache[r0]   cache[r1]   cache[r2]      (a transformers cache each)

Prefix blocks cannot be shared with such layers (the state at the end of a block is not kept), and a
preempted request starts from an empty state again.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from blocktable.core.errors import UnsupportedModel

_CACHE_NAMES = ("cache", "cache_params", "past_key_values")
"""What a mixer's forward may call its cache; transformers 5.24 renamed them all to ``cache``."""

_STATE_WORDS = ("conv_state", "recurrent_state", "ssm_state")


def stateful_mixers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules that keep a recurrent state in the cache they are given, innermost ones only."""
    return [module for module in model.modules() if _keeps_state(type(module))]


def _keeps_state(kind: type) -> bool:
    """Whether a module class takes a cache and its code touches a recurrent state in it."""
    if kind.__module__.startswith("torch.") or _cache_name(kind) is None:
        return False
    functions = (inspect.unwrap(f) for f in vars(kind).values() if inspect.isfunction(f))
    names = {name for function in functions for name in function.__code__.co_names}
    return any(word in name for name in names for word in _STATE_WORDS)


def _cache_name(kind: type) -> str | None:
    forward = inspect.unwrap(getattr(kind, "forward", lambda: None))
    names = inspect.signature(forward).parameters
    if "hidden_states" not in names and "input_states" not in names:
        return None
    return next((name for name in _CACHE_NAMES if name in names), None)


class StatefulMixers:
    """The wrapped mixers of one model and the states of its requests.

    Call :meth:`enter_step` before each forward pass. While :attr:`active` is False the mixers
    behave as transformers wrote them. ``close`` unwraps them.
    """

    def __init__(self, model: Any) -> None:
        self.modules = stateful_mixers(model)
        self._config = model.config
        self._states: dict[int, Any] = {}
        self._caches: list[Any] = []
        self._bounds: list[int] = []
        self._starts: list[int] = []
        self.active = False
        self.token_by_token = False
        """Continue a state one token at a time: for mixers (Mamba 1, Jamba) that take several
        tokens into an empty state only. The probe finds out."""
        self._originals: list[tuple[torch.nn.Module, Callable[..., Any]]] = []
        for module in self.modules:
            self._wrap(module)

    def enter_step(self, rows: Sequence[int], starts: Sequence[int], bounds: Sequence[int]) -> None:
        """Requests in batch order: their rows, how many tokens of each are in its state already
        (0 starts an empty one), and where their segments begin and end [n + 1]."""
        for row, start in zip(rows, starts, strict=True):
            if start == 0 or row not in self._states:
                self._states[row] = _new_cache(self._config)
        self._caches = [self._states[row] for row in rows]
        self._bounds, self._starts = list(bounds), list(starts)

    def fork(self, forks: Sequence[tuple[int, int]], released: Sequence[int] = ()) -> None:
        """Each child's state becomes a copy of its parent's, (parent row, child row), at once: a
        parent may be among the ``released`` rows, whose states are forgotten, and so may a row
        that a child is in now."""
        copies = [(child, copy.deepcopy(self._states[parent])) for parent, child in forks]
        self.release(released)
        self._states.update(copies)

    def release(self, rows: Sequence[int]) -> None:
        """Forget the states of these rows."""
        for row in rows:
            self._states.pop(row, None)

    def close(self) -> None:
        """Give the modules their own forward back."""
        for module, _ in self._originals:
            del module.forward
        self._originals.clear()

    def _wrap(self, module: torch.nn.Module) -> None:
        original = module.forward
        cache_name = _cache_name(type(module))
        names = list(inspect.signature(inspect.unwrap(type(module).forward)).parameters)[1:]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(*args, **kwargs)
            given = dict(zip(names, args, strict=False)) | kwargs
            return self._segments(original, given, names[0], str(cache_name))

        module.forward = forward
        self._originals.append((module, original))

    def _segments(
        self, original: Callable[..., Any], given: dict[str, Any], hidden_name: str, cache_name: str
    ) -> Any:
        """Run a mixer segment by segment and join what it gives."""
        hidden = given.pop(hidden_name)
        given.pop(cache_name, None)
        parts = []
        for segment, cache in self._pieces():
            own = {name: _cut(value, segment, hidden.shape[1]) for name, value in given.items()}
            own[cache_name] = cache
            parts.append(original(**{hidden_name: hidden[:, segment]}, **own))
        if isinstance(parts[0], torch.Tensor):
            return torch.cat(parts, dim=1)
        outputs = torch.cat([part[0] for part in parts], dim=1)
        return (outputs, *parts[0][1:])

    def _pieces(self) -> Iterator[tuple[slice, Any]]:
        """Tokens that go through a mixer in one call, and the cache they go with."""
        for index, cache in enumerate(self._caches):
            begin, end = self._bounds[index], self._bounds[index + 1]
            if self.token_by_token and self._starts[index] > 0:
                for token in range(begin, end):
                    yield slice(token, token + 1), cache
            else:
                yield slice(begin, end), cache


def _cut(value: Any, segment: slice, num_tokens: int) -> Any:
    """A per-token tensor [1, T, ...] cut to one request's tokens; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] == num_tokens:
        return value[:, segment]
    return value


def _new_cache(config: Any) -> Any:
    """An empty transformers cache with one state slot a layer."""
    from transformers.cache_utils import DynamicCache

    try:
        return DynamicCache(config=config)
    except (TypeError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"no per-request cache for {config.model_type}: {error}") from error

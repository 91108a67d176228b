"""What a request asks of the sampler, checked once, at the border.

Everything behind this module may trust the values: a ``SamplingParams`` that exists is valid, and
one that passed ``check_model`` fits the model it runs on.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from blocktable.core.errors import RequestError
from blocktable.prefix.hints import Retention


@dataclass(frozen=True)
class SamplingLimits:
    """Largest values a request may ask for. A server may lower (or raise) them in one place."""

    max_n: int = 128
    max_temperature: float = 100.0
    max_logprobs: int = 100
    max_stop_strings: int = 64
    max_stop_length: int = 1024
    max_token_lists: int = 4096
    max_logit_bias: int = 1024
    max_bias: float = 100.0
    max_penalty: float = 2.0
    max_repetition: float = 100.0
    max_schema_bytes: int = 256 * 1024


DEFAULT_LIMITS = SamplingLimits()
GuideKind = Literal["json_schema", "regex", "choice", "grammar"]
GUIDE_KINDS: tuple[GuideKind, ...] = ("json_schema", "regex", "choice", "grammar")


class Guide(NamedTuple):
    """What an output must follow; ``text`` of a choice is a JSON list of its strings."""

    kind: GuideKind
    text: str


_INT64 = 2**63
_COLDEST = 1e-6  # logits over less would leave the range of float32


def _integer(name: str, value: object, low: int, high: int | None) -> int:
    """``value`` as an int in [low, high]; bools, floats and strings are refused."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise RequestError(f"{name} must be an integer, got {value!r}") from None
    if number < low or (high is not None and number > high):
        limit = f"in [{low}, {high}]" if high is not None else f"at least {low}"
        raise RequestError(f"{name} must be {limit}, got {number}")
    return number


def _number(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> float:
    """``value`` as a finite float in [low, high], or in (low, high] with ``above_low``."""
    try:
        if isinstance(value, (bool, np.bool_, str, bytes)):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise RequestError(f"{name} must be a number, got {value!r}") from None
    inside = math.isfinite(number) and low <= number <= high and not (above_low and number == low)
    if not inside:
        bracket = "(" if above_low else "["
        raise RequestError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value!r}")
    return number


def _token_list(name: str, value: object, limits: SamplingLimits) -> tuple[int, ...]:
    try:
        if isinstance(value, (str, bytes, Mapping)):
            raise TypeError
        items = list(value)  # type: ignore[call-overload]
    except TypeError:
        raise RequestError(f"{name} must be a list of token ids, got {value!r}") from None
    ids = tuple(_integer(f"{name}[{i}]", token, 0, 2**31 - 1) for i, token in enumerate(items))
    if len(ids) > limits.max_token_lists:
        raise RequestError(f"{name} has {len(ids)} entries, the limit is {limits.max_token_lists}")
    return ids


def _stop_strings(value: object, limits: SamplingLimits) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if isinstance(strings, (bytes, Mapping)) or not isinstance(strings, Sequence):
        raise RequestError(f"stop must be a string or a list of strings, got {value!r}")
    if len(strings) > limits.max_stop_strings:
        raise RequestError(
            f"stop has {len(strings)} strings, the limit is {limits.max_stop_strings}"
        )
    for i, text in enumerate(strings):
        if not isinstance(text, str) or not text:
            raise RequestError(f"stop[{i}] must be a string that is not empty, got {text!r}")
        if len(text) > limits.max_stop_length:
            raise RequestError(
                f"stop[{i}] has {len(text)} characters, the limit is {limits.max_stop_length}"
            )
    return tuple(strings)


def _logit_bias(value: object, limits: SamplingLimits) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {value!r}")
    if len(value) > limits.max_logit_bias:
        raise RequestError(
            f"logit_bias has {len(value)} entries, the limit is {limits.max_logit_bias}"
        )
    bias: dict[int, float] = {}
    for key, amount in value.items():
        token: object = key
        if isinstance(key, str):
            try:
                token = int(key)
            except ValueError:
                raise RequestError(f"logit_bias key must be a token id, got {key!r}") from None
        token = _integer("logit_bias key", token, 0, 2**31 - 1)
        bias[token] = _number(f"logit_bias[{token}]", amount, -limits.max_bias, limits.max_bias)
    return bias


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence) or not value:
        raise RequestError(f"choice must be a list of at least 1 string, got {value!r}")
    for i, text in enumerate(value):
        if not isinstance(text, str) or not text:
            raise RequestError(f"choice[{i}] must be a string that is not empty, got {text!r}")
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to pick the next token, when to stop, what to report, and what to keep.

    The distribution is shaped in this order: ``logit_bias`` and token lists, penalties,
    ``temperature``, ``top_k``, ``top_p``, ``min_p``. Temperature 0 is greedy: the largest logit
    after bias and penalties.

    Attributes:
        n: completions drawn for one prompt; they share the prompt's blocks.
        max_tokens: most tokens to generate; None runs to the end of the model's context.
        min_tokens: no end-of-sequence or stop token is drawn, and no stop string ends the
            request, before this many tokens.
        temperature: 0 (or less than 1e-6) is greedy, 1 the model's own distribution.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this.
        min_p: drop tokens less likely than this fraction of the most likely one.
        repetition_penalty: divides (or multiplies, if negative) the logits of every token that
            is in the prompt or the output.
        presence_penalty: subtracted from the logit of every token that is in the output.
        frequency_penalty: subtracted once for each time a token is in the output.
        seed: a draw depends on the seed and the token's position alone, not on what else runs.
            None takes a fresh seed.
        stop: strings that end the text; the text is cut before them unless
            ``include_stop_str_in_output``.
        stop_token_ids: tokens that end the request, besides the model's own.
        ignore_eos: do not end at the model's end-of-sequence tokens.
        logprobs: report this many most likely tokens (and the chosen one) at each position;
            0 reports the chosen token alone, None nothing. They are of the model's own
            distribution, before anything above changes it.
        prompt_logprobs: the same for each token of the prompt but the first, which nothing
            comes before. The whole prompt is computed for it: cached blocks are not used, and its
            blocks are not found by others.
        logit_bias: added to the logits of these token ids.
        allowed_token_ids: if given, only these may be drawn.
        bad_token_ids: these are never drawn.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string in the text.
        json_schema: constrain the output to this JSON schema (a JSON text); needs llguidance, as
            do the next three. At most one of the four may be given.
        regex: constrain the output to this regular expression (Rust's syntax).
        choice: constrain the output to one of these strings.
        grammar: constrain the output to this context-free grammar (Lark's syntax).
        retention: how long the blocks of prompt and output are worth keeping in the prefix cache
            once the request has ended.

    Raises:
        RequestError: names the field, the value and its limit.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_token_ids: Sequence[int] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    json_schema: str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    retention: Retention | None = None
    limits: SamplingLimits = field(default=DEFAULT_LIMITS, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_distribution()
        self._check_lists()
        self._check_guide()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_counts(self) -> None:
        if not isinstance(self.limits, SamplingLimits):
            raise RequestError(f"limits must be SamplingLimits, got {self.limits!r}")
        self._set("n", _integer("n", self.n, 1, self.limits.max_n))
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1, None))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0, None))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, -_INT64, _INT64 - 1))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                limit = self.limits.max_logprobs
                self._set(name, _integer(name, getattr(self, name), 0, limit))
        if not isinstance(self.retention, (Retention, type(None))):
            raise RequestError(f"retention must be a Retention, got {self.retention!r}")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}")

    def _check_distribution(self) -> None:
        top, penalty = self.limits.max_temperature, self.limits.max_penalty
        temperature = _number("temperature", self.temperature, 0.0, top)
        self._set("temperature", 0.0 if temperature < _COLDEST else temperature)
        self._set("top_k", max(_integer("top_k", self.top_k, -1, 2**31 - 1), 0))
        self._set("top_p", _number("top_p", self.top_p, 0.0, 1.0, above_low=True))
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, _number(name, getattr(self, name), -penalty, penalty))
        repetition = _number(
            "repetition_penalty", self.repetition_penalty, 0.0, self.limits.max_repetition,
            above_low=True,
        )  # fmt: skip
        self._set("repetition_penalty", repetition)

    def _check_lists(self) -> None:
        limits = self.limits
        self._set("stop", _stop_strings(self.stop, limits))
        self._set("stop_token_ids", _token_list("stop_token_ids", self.stop_token_ids, limits))
        self._set("bad_token_ids", _token_list("bad_token_ids", self.bad_token_ids, limits))
        self._set("logit_bias", _logit_bias(self.logit_bias, limits))
        if self.allowed_token_ids is not None:
            allowed = _token_list("allowed_token_ids", self.allowed_token_ids, limits)
            if not allowed:
                raise RequestError("allowed_token_ids must name at least 1 token, got 0")
            if set(allowed) <= set(self.bad_token_ids):
                raise RequestError("bad_token_ids forbids every token of allowed_token_ids")
            self._set("allowed_token_ids", allowed)

    def _check_guide(self) -> None:
        given = [name for name in GUIDE_KINDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise RequestError(f"{given[1]} cannot be combined with {given[0]}")
        if self.choice is not None:
            self._set("choice", _choices(self.choice))
        guide = self.guide
        if guide is None:
            return
        if not isinstance(guide.text, str) or not guide.text:
            raise RequestError(f"{guide.kind} must be a text that is not empty, got {guide.text!r}")
        try:
            size = len(guide.text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{guide.kind} is not valid Unicode at character {error.start}"
            ) from None
        if size > self.limits.max_schema_bytes:
            raise RequestError(
                f"{guide.kind} has {size} bytes, the limit is {self.limits.max_schema_bytes}"
            )

    @property
    def guide(self) -> Guide | None:
        """What the output must follow, if anything."""
        if self.choice is not None:
            return Guide("choice", json.dumps(self.choice, ensure_ascii=False))
        for kind in GUIDE_KINDS:
            text = getattr(self, kind)
            if text is not None:
                return Guide(kind, text)
        return None

    @property
    def greedy(self) -> bool:
        """True if no draw is made: the largest logit wins."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, whatever form it was given in."""
        return self.stop  # type: ignore[return-value]

    def check_model(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have; RequestError names id and limit."""
        named = {
            "stop_token_ids": self.stop_token_ids,
            "bad_token_ids": self.bad_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": self.logit_bias or (),
        }
        for name, ids in named.items():
            for token in ids:
                if token >= vocab_size:
                    raise RequestError(
                        f"{name} holds token id {token}, the vocabulary has {vocab_size} "
                        f"(ids 0 to {vocab_size - 1})"
                    )
        if len(set(self.bad_token_ids)) >= vocab_size:
            raise RequestError(f"bad_token_ids forbids all {vocab_size} tokens of the vocabulary")

    def replace(self, **changes: Any) -> SamplingParams:
        """A checked copy with some fields changed."""
        return replace(self, **changes)


def check_prompt_ids(token_ids: object, vocab_size: int, max_model_len: int) -> list[int]:
    """The prompt as a list of ints, or RequestError naming the id or length and its limit.

    Refused: an empty prompt, ids that are not integers (bools and floats included), ids outside
    [0, vocab_size), and prompts that leave no room for one generated token. O(prompt length),
    vectorised.
    """
    import numpy as np

    if isinstance(token_ids, (str, bytes, Mapping)) or not hasattr(token_ids, "__len__"):
        raise RequestError(f"a prompt must be a list of token ids, got {token_ids!r}")
    if getattr(token_ids, "ndim", 1) != 1:
        shape = list(token_ids.shape)  # type: ignore[attr-defined]
        raise RequestError(f"a prompt must be a list of token ids, got an array of shape {shape}")
    count = len(token_ids)  # type: ignore[arg-type]
    if count == 0:
        raise RequestError("the prompt is empty: at least 1 token is needed")
    if count > max_model_len - 1:
        raise RequestError(
            f"the prompt has {count} tokens, the limit is {max_model_len - 1} "
            f"(max_model_len {max_model_len}, one place kept for the answer)"
        )
    kinds = {type(token) for token in token_ids} if isinstance(token_ids, (list, tuple)) else set()
    if kinds and not all(issubclass(k, (int, np.integer)) and k is not bool for k in kinds):
        odd = next(t for t in token_ids if isinstance(t, bool) or not hasattr(t, "__index__"))  # type: ignore[union-attr]
        raise RequestError(f"a prompt's token ids must be integers, got {odd!r}")
    try:
        ids = np.asarray(token_ids)
    except (OverflowError, ValueError):
        ids = np.empty(0, object)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        worst = max(token_ids, key=lambda t: abs(int(t))) if kinds else token_ids  # type: ignore[arg-type,call-overload]
        raise RequestError(f"a prompt's token ids must be in [0, {vocab_size - 1}], got {worst!r}")
    bad = (ids < 0) | (ids >= vocab_size)
    if bad.any():
        raise RequestError(
            f"token id {int(ids[bad][0])} at position {int(bad.argmax())} is outside the "
            f"vocabulary [0, {vocab_size - 1}]"
        )
    return ids.tolist()

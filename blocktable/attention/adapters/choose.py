"""Which library serves which kind of step: asked for by name, or measured.

A candidate that is installed and able runs three random steps of the layer's real shape beside our
own kernels. Where a result differs, it is dropped, with a line in the log; where it is faster by
more than 5%, it serves that kind of step. Takes about a second a kind of layer (FlashInfer
compiles its kernels the first time, a minute or so), once: the outcome is kept on disk. Where
nothing is installed, nothing is done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from blocktable.attention.adapters import ADAPTERS
from blocktable.attention.adapters.decisions import DecisionFile
from blocktable.attention.adapters.kind import Adapter, LayerKind
from blocktable.attention.adapters.problems import (
    Attend,
    Problem,
    difference,
    make_problems,
    microseconds,
)
from blocktable.attention.options import BACKENDS, OURS
from blocktable.core.errors import ConfigError

_LOG = logging.getLogger("blocktable")

STEPS = ("decode", "prefill", "mixed")
MARGIN = 0.95
"""A candidate is taken where its time is less than this times ours."""
TOLERANCE = 1e-2
"""Most difference of a token's output between two 16-bit kernels; each is within 3e-3 of float64
on random data."""


class Choice(NamedTuple):
    """What serves each kind of step: "triton" (ours) or the name of a library."""

    decode: str = OURS
    prefill: str = OURS
    mixed: str = OURS

    @property
    def libraries(self) -> set[str]:
        """The libraries that serve some kind of step."""
        return {*self} - {OURS}


class Trial(NamedTuple):
    """How a candidate did: microseconds by step ("triton" among the candidates), or why it is out.

    broken: it raised an error, whose cause may be gone at the next start (a missing compiler).
    """

    times: dict[str, float]
    fault: str | None = None
    broken: bool = False


Measure = Callable[[LayerKind, torch.device, Sequence[str]], dict[str, Trial]]


def choose(
    wanted: str, kind: LayerKind, device: torch.device, *, layer: str = "layers",
    decisions: DecisionFile | None = None, measure: Measure | None = None,
) -> Choice:  # fmt: skip
    """What serves layers of ``kind``; ``layer`` names one of them. Raises ConfigError for a library
    that is asked for by name and is not installed, not able, or gives other results than ours."""
    if wanted not in BACKENDS:
        raise ConfigError(f"attention_backend is {wanted!r}; it may be {', '.join(BACKENDS)}")
    if wanted == OURS:
        return Choice()
    names = list(ADAPTERS) if wanted == "auto" else [wanted]
    reasons = {name: ADAPTERS[name].reason_against(kind, device) for name in names}
    if wanted != "auto" and reasons[wanted] is not None:
        raise _refusal(wanted, layer, kind, reasons[wanted])
    able = [name for name in names if reasons[name] is None]
    if not able:
        return Choice()
    known = DecisionFile() if decisions is None else decisions
    trials = _tried(kind, device, able, known, measure or try_out, forced=wanted != "auto")
    if wanted != "auto":
        if trials[wanted].fault is not None:
            raise _refusal(wanted, layer, kind, trials[wanted].fault)
        return Choice(*[wanted] * len(STEPS))
    return best(trials)


def best(trials: dict[str, Trial]) -> Choice:
    """The fastest candidate for each kind of step; ours where none wins by more than 5%."""
    chosen = []
    for step in STEPS:
        ours = trials[OURS].times.get(step, 0.0)
        times = {n: t.times[step] for n, t in trials.items() if step in t.times and not t.fault}
        first = min(times, key=lambda name: times[name], default=OURS)
        chosen.append(first if times.get(first, 0.0) < MARGIN * ours else OURS)
    return Choice(*chosen)


def _tried(
    kind: LayerKind, device: torch.device, able: Sequence[str], decisions: DecisionFile,
    measure: Measure, *, forced: bool,
) -> dict[str, Trial]:  # fmt: skip
    """The candidates' trials, from the file or measured now. What is asked for by name gets
    another chance after a fault."""
    keys = {name: _key(name, kind, device) for name in (OURS, *able)}
    trials = {name: _decoded(decisions.get(key)) for name, key in keys.items()}
    known = {n: t for n, t in trials.items() if t is not None and not (forced and t.fault)}
    if len(known) == len(keys):
        return known
    _LOG.warning("trying attention by %s for layers of %s (FlashInfer compiles its kernels the "
                 "first time, which takes minutes)", " and ".join(able), kind)  # fmt: skip
    measured = measure(kind, device, able)  # times are compared, so all are taken in one run
    for name, trial in measured.items():
        if measured[OURS].times and not trial.broken:  # else nothing was learnt
            decisions.put(keys[name], {"times": trial.times, "fault": trial.fault})
        if trial.fault is not None:
            _LOG.warning("attention by %s is not used: %s (attention_backend='triton' does not "
                         "try it)", name, trial.fault)  # fmt: skip
    times = {name: trial.times for name, trial in measured.items()}
    _LOG.info("attention for layers of %s, microseconds: %s", kind, times)
    return measured


def _decoded(entry: dict[str, Any] | None) -> Trial | None:
    """A trial from the file; None for one that another version wrote."""
    if entry is None:
        return None
    times, fault = entry.get("times"), entry.get("fault")
    if not isinstance(times, dict) or not all(isinstance(t, int | float) for t in times.values()):
        return None
    if not (fault is None or isinstance(fault, str)):
        return None
    return Trial(times, fault)


def _key(name: str, kind: LayerKind, device: torch.device) -> str:
    from blocktable import __version__

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    library = f"blocktable {__version__}" if name == OURS else ADAPTERS[name].versions()
    others = ", ".join(str(adapter.versions()) for adapter in ADAPTERS.values())
    return f"{name} | {library} | {others} | torch {torch.__version__} | {gpu} | {kind.key}"


def _refusal(name: str, layer: str, kind: LayerKind, reason: str | None) -> ConfigError:
    return ConfigError(f"attention_backend {name!r} cannot serve {layer} ({kind}): {reason}")


def try_out(kind: LayerKind, device: torch.device, names: Sequence[str]) -> dict[str, Trial]:
    """Run and time ours and the candidates on the GPU. Never raises for a candidate's fault; where
    not even ours can be run (no memory left), all candidates are out."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return _try_out(kind, device, names)


def _try_out(kind: LayerKind, device: torch.device, names: Sequence[str]) -> dict[str, Trial]:
    try:
        problems = make_problems(kind, device)
        ours = {
            step: our_attend(kind, problem, in_graph=step == "decode")
            for step, problem in problems.items()
        }
        want = {step: _run(ours[step], problem) for step, problem in problems.items()}
        times = {step: _time(ours[step], problem) for step, problem in problems.items()}
    except (RuntimeError, ConfigError) as error:
        fault = f"our own kernels could not be tried beside it: {_line(error)}"
        return {OURS: Trial({}), **{name: Trial({}, fault) for name in names}}
    trials = {OURS: Trial(times)}
    for name in names:
        trials[name] = _trial(ADAPTERS[name], kind, problems, want)
    del problems, ours, want
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return trials


def _trial(
    adapter: Adapter, kind: LayerKind, problems: dict[str, Problem], want: dict[str, torch.Tensor]
) -> Trial:
    times: dict[str, float] = {}
    try:
        for step, problem in problems.items():
            attend = library_attend(adapter, kind, problem, in_graph=step == "decode")
            apart = difference(_run(attend, problem), want[step])
            if not apart <= TOLERANCE:
                return Trial({}, f"in a {step} step its output differs from ours by {apart:.1e}"
                             " (inf: NaN of unused slots comes through)")  # fmt: skip
            times[step] = _time(attend, problem)
    except Exception as error:  # whatever a library raises, it is not used
        return Trial({}, f"{type(error).__name__}: {_line(error)}", broken=True)
    return Trial(times)


def library_attend(
    adapter: Adapter, kind: LayerKind, problem: Problem, *, in_graph: bool
) -> Attend:
    """A library's attention over a step, planned as the engine plans it."""
    size = len(problem.batch.lens)
    planner = adapter.planner(kind, problem.tables, size, {})
    if not in_graph:
        return planner.plan(problem.batch).attend
    buffers = planner.buffers(size)
    buffers.load(problem.batch)
    return buffers.plan.attend


def our_attend(kind: LayerKind, problem: Problem, *, in_graph: bool) -> Attend:
    """Our own attention over a step, planned as the engine plans it."""
    from blocktable.attention.options import AttentionOptions
    from blocktable.attention.plan import plan_attention
    from blocktable.attention.triton import PlanBuffers, plan_config, upload_plan
    from blocktable.attention.triton.launch import launch
    from blocktable.attention.triton.layer import LayerTensors

    batch, device = problem.batch, problem.query.device
    config = plan_config(
        problem.query, problem.k_cache, problem.v_cache, sliding_window=kind.sliding_window
    )
    held = PlanBuffers(config, kind.head_size_v, len(batch.lens), device) if in_graph else None
    config = config if held is None else held.config
    host = plan_attention(config, batch.starts, batch.lens, num_tokens=batch.num_tokens)
    if held is None:
        plan = upload_plan(host, config, kind.head_size_v, device)
    else:
        held.load(host)
        plan = held.plan
    options = AttentionOptions(
        scale=kind.scale, sliding_window=kind.sliding_window, softcap=kind.softcap
    )

    def attend(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        nothing = (None, None, None, None, None)  # lse, sinks, slopes, scales
        launch(LayerTensors(query, k, v, problem.tables.device, out, *nothing), options, plan)
        return out

    return attend


def _run(attend: Attend, problem: Problem) -> torch.Tensor:
    return attend(problem.query, problem.k_cache, problem.v_cache)


def _time(attend: Attend, problem: Problem) -> float:
    return microseconds(lambda: _run(attend, problem))


def _line(error: BaseException) -> str:
    """The first line of an error's text, for a log."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__

"""Find a model's configuration: a mapping, a ``config.json``, a folder, the head of a ``.gguf``
file, or a name: of a bundled model, or on the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from blocktable.core.errors import LoadError
from blocktable.core.split_plan import is_split
from blocktable.engine.loader import BUNDLED, check_path


class ReadConfig(NamedTuple):
    """``values`` has the defaults of the model's family filled in where transformers knows it.

    ``num_parameters`` counts the model built without memory; None where transformers cannot.
    ``num_whole`` of them stay whole on every rank under ``split_plan``, transformers' plan for the
    family: empty where it has none, None where the family is unknown.
    """

    name: str
    values: dict[str, Any]
    num_parameters: int | None
    num_whole: int = 0
    split_plan: Mapping[str, str] | None = None


def read_config(model: str | Path | Mapping[str, Any], *, count: bool = True) -> ReadConfig:
    """Read a configuration; weights are never read. Raises LoadError."""
    if isinstance(model, Mapping):
        name, raw = str(model.get("_name_or_path") or model.get("model_type") or "model"), model
    else:
        name, raw = str(model), _read_json(model)
    known = _known_to_transformers(raw)
    if known is None:
        return ReadConfig(name, dict(raw), None)
    plan = getattr(known.get_text_config(), "base_model_tp_plan", None) or {}
    plan = plan if any("layers" in layer for layer in plan) else {}
    total, whole = _count_parameters(known) if count else (None, 0)
    return ReadConfig(name, known.to_dict(), total, whole, plan)


def _read_json(model: str | Path) -> Mapping[str, Any]:
    path = Path(model)
    if path.suffix.lower() == ".gguf" or str(model) in BUNDLED:
        return _read_gguf(model)
    if path.is_dir():
        path = path / "config.json"
    if path.exists():
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise LoadError(f"{path} is not a readable configuration: {error}") from error
        if not isinstance(found, dict):
            raise LoadError(f"{path} holds a {type(found).__name__}, not a configuration")
        return found
    if path.suffix == ".json" or path.is_absolute():
        raise LoadError(f"there is no {path}")
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(str(model))[0]
    except Exception as error:  # the hub's client raises many kinds
        raise LoadError(f"cannot find a configuration of {str(model)!r}: {error}") from error


def _read_gguf(model: str | Path) -> Mapping[str, Any]:
    """The configuration that the engine would build from the file's head."""
    from blocktable.engine.loader.gguf_file import GGUFFile
    from blocktable.engine.loader.gguf_model import gguf_config

    return gguf_config(GGUFFile(check_path(model))).to_dict()


def _known_to_transformers(raw: Mapping[str, Any]) -> Any | None:
    from transformers import AutoConfig

    fields = {key: value for key, value in raw.items() if key != "model_type"}
    try:
        return AutoConfig.for_model(str(raw.get("model_type")), **fields)
    except Exception:  # unknown family, or fields this release refuses: the raw values remain
        return None


def _count_parameters(config: Any) -> tuple[int | None, int]:
    """All parameters, and those that the family's plan leaves whole on every rank."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception:  # no causal language model of this family, or a dependency is missing
        return None, 0
    plan = getattr(model, "_tp_plan", None) or {}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return sum(sizes.values()), sum(n for name, n in sizes.items() if not is_split(name, plan))

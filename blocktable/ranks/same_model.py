"""Whether all ranks have the same model.

Ranks that are started by hand or on several machines may each find another one under the same
path. Where the shapes are alike nothing else would notice, and the text would be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import xxhash

from blocktable.core.errors import ConfigError
from blocktable.core.protocols import Communicator

_OF_THE_PLACE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
_MOST_FIELDS = 3


def check_config(config: Any, communicator: Communicator) -> None:
    """Compare the models' configurations. Collective; raises ConfigError, naming the ranks that
    differ from rank 0 and in what, on all of them."""
    fields = json.loads(config.to_json_string(use_diff=False))
    told = communicator.gather_objects({k: v for k, v in fields.items() if k not in _OF_THE_PLACE})
    _compare(told, "another model")


def check_weights(model: Any, communicator: Communicator) -> None:
    """Compare the weights of the norms over the hidden size, which every rank has whole and which
    no two trainings leave alike. Collective; raises ConfigError as `check_config`. Cost: a
    download of a few hundred KB."""
    _compare(
        communicator.gather_objects({"the digest of the norms": _digest(model)}), "other weights"
    )


def _digest(model: Any) -> str:
    size = (model.config.get_text_config().hidden_size,)
    digest = xxhash.xxh3_64()
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if "norm" not in type(module).__name__.lower() or hasattr(weight, "placements"):
            continue
        if tuple(getattr(weight, "shape", ())) == size:
            digest.update(name.encode())
            digest.update(weight.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _compare(told: Sequence[dict[str, Any]], what: str) -> None:
    first = told[0]
    for rank, other in enumerate(told[1:], 1):
        names = [name for name in first.keys() | other.keys() if first.get(name) != other.get(name)]
        if names:
            names.sort(key=lambda name: (name != "model_type", name))  # it explains the others
            shown = "; ".join(
                f"{name} is {_short(first.get(name))} on rank 0 and {_short(other.get(name))} on "
                f"rank {rank}"
                for name in names[:_MOST_FIELDS]
            )
            more = f"; and {len(names) - _MOST_FIELDS} more" if len(names) > _MOST_FIELDS else ""
            raise ConfigError(f"rank {rank} has {what} than rank 0: {shown}{more}")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."

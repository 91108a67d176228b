"""Loading one rank's shard of a model by transformers' own tensor-parallel plan."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from blocktable.core.errors import ConfigError, LoadError
from blocktable.core.split_plan import is_own_heads, splits_heads
from blocktable.engine.loader import BUNDLED, LoadedModel, begin, check_path
from blocktable.engine.loader.dtypes import choose_dtype
from blocktable.engine.loader.hub import load_tokenizer, one_line
from blocktable.engine.options import EngineOptions
from blocktable.parallel.handshake import kv_head_map
from blocktable.ranks.local import local_part, plain_linear

_KV_PROJECTIONS = ("k_proj", "v_proj")


@contextmanager
def shardable(source: str, options: EngineOptions) -> Iterator[tuple[str, Any]]:
    """The model as one that transformers can split, and its tokenizer where that is not with it.

    A GGUF file is written out as a Hugging Face directory for the length of the ``with`` block,
    since the plan is applied while weights are read; that takes its size in the chosen dtype on
    disk. Everything else, and every model that is not split, is its own source. Raises LoadError
    for a path where nothing is.
    """
    check_path(source)
    is_file = source in BUNDLED or source.lower().endswith(".gguf")
    if options.tensor_parallel_size == 1 or not is_file:
        yield source, None
        return
    with tempfile.TemporaryDirectory(prefix="blocktable-") as folder:
        dtype = str(choose_dtype(options.dtype, options.device)).removeprefix("torch.")
        loaded = begin(source).finish(dtype)
        loaded.model.save_pretrained(folder)
        tokenizer, loaded = loaded.tokenizer, None
        yield folder, tokenizer


def load_shard(
    source: str, rank: int, world_size: int, *, dtype: str, device: str,
    allow_download: bool = False, tokenizer: Any = None,
    check: Callable[[Any], None] = lambda config: None,
) -> LoadedModel:  # fmt: skip
    """This rank's part of the causal language model in a directory or under an id.

    torch.distributed must be initialised. KV heads are shared out, or, where there are fewer than
    ranks, held by every rank whose query heads read them. ``check`` is shown the configuration
    before any weight is read. Raises LoadError where transformers has no plan for the family,
    ConfigError where the heads cannot be spread.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    local_only = not allow_download
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=local_only)
        plan = _plan(AutoModelForCausalLM, config)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise LoadError(f"cannot load {source}: {one_line(error)}") from error
    check(config)
    heads = _heads(config.get_text_config(), plan, world_size, rank)
    chosen = choose_dtype(dtype, device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the argument's next name is not in all
            model = AutoModelForCausalLM.from_pretrained(  # releases that this package supports
                source,
                dtype=chosen,
                local_files_only=local_only,
                tp_plan="auto",
                tp_size=world_size,
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise LoadError(f"cannot load rank {rank} of {source}: {one_line(error)}") from error
    if heads is not None:
        _keep_heads(model, heads, plan)
    found = tokenizer or load_tokenizer(source, local_only=local_only)
    return LoadedModel(model.eval(), found, source, owned=False)


def _plan(auto: Any, config: Any) -> dict[str, str]:
    """Style of each split layer, by the pattern of its name."""
    with torch.device("meta"):
        plan = auto.from_config(config)._tp_plan or {}
    if not any("layers" in name for name in plan):
        raise LoadError(f"transformers has no tensor-parallel plan for {config.model_type!r}")
    return plan


def _heads(config: Any, plan: dict[str, str], world_size: int, rank: int) -> Any:
    """The KV heads this rank keeps where ranks must share them, None where the plan can split, or
    where it leaves every rank all heads: attention is not split, or is brought together before."""
    if not splits_heads(plan):
        return None
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    held = kv_head_map(config.num_attention_heads, num_kv_heads, world_size, rank)
    return None if num_kv_heads % world_size == 0 else torch.from_numpy(held).long()


def _keep_heads(model: Any, heads: torch.Tensor, plan: dict[str, str]) -> None:
    """Give this rank its heads' rows of the K and V projections, which the plan split evenly.

    Collective: the split parts are gathered, and each rank keeps what its query heads read.
    """
    found = 0
    for path, module in model.named_modules():
        if not all(isinstance(getattr(module, n, None), torch.nn.Linear) for n in _KV_PROJECTIONS):
            continue
        if not all(is_own_heads(f"{path}.{name}", plan) for name in _KV_PROJECTIONS):
            continue  # all heads come together on every rank, those of the queries too
        size, found = module.head_dim, found + 1
        rows = (heads[:, None] * size + torch.arange(size)).flatten()
        for name in _KV_PROJECTIONS:
            setattr(module, name, _rows_of(getattr(module, name), rows))
        local_queries = local_part(module.q_proj.weight).shape[0] // size
        module.num_key_value_groups = local_queries // len(heads)
    if not found:
        raise ConfigError(
            "this model has fewer KV heads than ranks, and its K and V projections are not layers "
            f"of their own ({' and '.join(_KV_PROJECTIONS)}) that ranks could hold copies of; use "
            "as many ranks as KV heads at most"
        )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A distributed tensor gathered from all ranks; any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyright: ignore


def _rows_of(linear: torch.nn.Linear, rows: torch.Tensor) -> torch.nn.Linear:
    weight, bias = _whole(linear.weight), None
    if linear.bias is not None:
        bias = _whole(linear.bias)[rows.to(weight.device)]
    return plain_linear(weight[rows.to(weight.device)], bias)

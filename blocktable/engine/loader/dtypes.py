"""Which dtype a model runs in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blocktable.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

DTYPES = ("auto", "float32", "bfloat16", "float16")


def check_device(name: str) -> None:
    """ConfigError for a GPU that this PyTorch does not see."""
    import torch

    if name == "cpu":
        return
    try:
        index = torch.device(name).index or 0
    except RuntimeError:
        raise ConfigError(f"device must be cpu, cuda or cuda:<index>, got {name!r}") from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise ConfigError(f"device is {name!r}, but this PyTorch sees {count} GPUs")


def choose_dtype(name: str, device: str) -> torch.dtype:
    """The torch dtype for an option value; ConfigError for one that is not in DTYPES.

    ``auto`` is bfloat16 where the device computes it fast (any GPU that has it; a CPU with AMX or
    AVX-512 BF16: 1,618 against 280 GFLOP/s measured for float32), else float16 on GPUs and float32
    on CPUs.
    """
    import torch

    if name not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    if name != "auto":
        return getattr(torch, name)
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if cpu_has_fast_bfloat16() else torch.float32


def cpu_has_fast_bfloat16() -> bool:
    """True on a CPU with AMX tiles or AVX-512 BF16 instructions."""
    import torch

    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, probe, bool)() for probe in probes)

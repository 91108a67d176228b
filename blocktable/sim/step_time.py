"""How long a step takes, as a stated formula: a roofline, not a measurement.

::

    step = overhead
         + max(weight_bytes / bandwidth, flops / compute)
         + kv_bytes_per_token * attended_tokens / bandwidth
    flops = 2 * parameters * new_tokens + 4 * layers * hidden * pairs of positions

``attended_tokens`` sums, over the requests in the step, the tokens whose KV is read: a request's
whole length once a step. Bandwidth and compute are those of all devices together.
"""

from __future__ import annotations

from dataclasses import dataclass

from blocktable.core.errors import ConfigError
from blocktable.core.types import Counts


@dataclass(frozen=True, kw_only=True)
class StepTimeModel:
    """A model on a machine. Units: bytes, bytes/s, FLOP/s, seconds.

    The defaults are Llama-3-8B in bfloat16 (8.0e9 parameters, 32 layers, 8 KV heads x 128) over 4
    GPUs of 4.3 TB/s and 600 TFLOP/s each as reached, with 2 ms of overhead a step: one such GPU
    cannot keep up with the conversation trace, two cannot with the hits of 5,000 blocks, whose
    335 GB of KV they could not hold either. ``bandwidth`` and ``compute`` are one device's.
    """

    devices: int = 4
    num_parameters: float = 8.0e9
    bytes_per_parameter: float = 2.0
    kv_bytes_per_token: int = 131072
    num_layers: int = 32
    hidden_size: int = 4096
    bandwidth: float = 4.3e12
    compute: float = 600e12
    overhead: float = 2e-3

    def __post_init__(self) -> None:
        for name in ("num_parameters", "bytes_per_parameter", "kv_bytes_per_token",
                     "num_layers", "hidden_size", "devices", "bandwidth", "compute"):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)!r}")
        if self.overhead < 0:
            raise ConfigError(f"overhead must be >= 0 seconds, got {self.overhead!r}")

    def seconds(self, num_computed: Counts, num_scheduled: Counts, num_total: int) -> float:
        """Time of a step over batch entries; all arrays [n], O(n) vectorised."""
        lengths = num_computed.astype("float64")
        pairs = float(num_scheduled @ lengths) + 0.5 * float(num_scheduled @ num_scheduled)
        bandwidth, compute = self.bandwidth * self.devices, self.compute * self.devices
        flops = 2.0 * self.num_parameters * num_total
        flops += 4.0 * self.num_layers * self.hidden_size * pairs
        weights = self.num_parameters * self.bytes_per_parameter / bandwidth
        attended = float(lengths.sum()) + num_total
        read = attended * self.kv_bytes_per_token / bandwidth
        return self.overhead + max(weights, flops / compute) + read

    def describe(self) -> str:
        """The formula with its numbers, one line."""
        return (
            f"step = {self.overhead * 1e3:g} ms + max({self.num_parameters / 1e9:g}B parameters x "
            f"{self.bytes_per_parameter:g} B / bandwidth, FLOPs / compute) + KV read x "
            f"{self.kv_bytes_per_token:,} B a token / bandwidth; {self.devices} devices of "
            f"{self.bandwidth / 1e12:g} TB/s and {self.compute / 1e12:g} TFLOP/s"
        )

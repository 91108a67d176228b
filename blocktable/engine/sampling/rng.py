"""Counter-based random numbers: a draw is a pure function of (seed, position).

No generator state is carried from step to step, so batch order, preemption, chunking and the
other requests cannot change a draw. The numbers are made on the host (a few vector operations for
the whole batch) and are therefore bit-equal for every device.

Source: the SplitMix64 stream of Steele, Lea and Flood ("Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014): output = mix(key + position * golden).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def _mix_int(x: int) -> int:
    """SplitMix64's finaliser on one Python int in [0, 2**64)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def stream_key(seed: int, index: int = 0) -> int:
    """The 64-bit key of a request's stream; ``index`` tells its ``n`` completions apart."""
    return _mix_int((_mix_int(seed & _MASK) + (index + 1) * 0xD1B54A32D192ED03) & _MASK)


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One uniform in [0, 1) for each (key, position); 53 bits, shape as the inputs."""
    x = keys + positions.astype(np.uint64) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53

"""Paged attention for CPU tensors: a compiled kernel, or Numba where it could not be built.

``BLOCKTABLE_CPU_KERNEL`` = ``native`` | ``numba`` | ``reference`` forces a back end.
"""

from blocktable.attention.cpu.backend import paged_attention, plan_step, write_kv

__all__ = ["paged_attention", "plan_step", "write_kv"]

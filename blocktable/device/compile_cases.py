"""How a module says which builds of its Triton kernels must compile.

Each module that defines Triton kernels has a list ``COMPILE_CASES``. The tests find those modules,
compile every case for NVIDIA sm_90 and AMD gfx942 (Gluon kernels for sm_90) without a GPU, and fail
for a kernel (a jit function that no other one calls) without a case::

    COMPILE_CASES = [
        CompileCase(scale_kernel, {"x": "*fp32", "n": "i32"}, {"TILE": 128}),
    ]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class CompileCase(NamedTuple):
    """One build of one kernel: the type of every run-time argument, the value of every constant."""

    kernel: Any
    """A ``triton.jit`` function."""
    signature: Mapping[str, str]
    """Run-time argument -> Triton type ("*bf16", "i32", ...); constants are left out."""
    constants: Mapping[str, Any]
    """``tl.constexpr`` argument -> value."""
    num_warps: int = 4
    num_stages: int = 3

"""Attention and cache write in Triton, for CUDA tensors.

The same kernels run in Triton's interpreter on CPU tensors (``TRITON_INTERPRET=1`` before the first
import), which is how their tests run without a GPU.
"""

from blocktable.attention.triton.buffers import (
    DevicePlan,
    PlanBuffers,
    Workspace,
    make_workspace,
    upload_plan,
)
from blocktable.attention.triton.cache_write import write_kv, write_kv_by_table
from blocktable.attention.triton.launch import paged_attention, plan_config

__all__ = [
    "DevicePlan",
    "PlanBuffers",
    "Workspace",
    "make_workspace",
    "paged_attention",
    "plan_config",
    "upload_plan",
    "write_kv",
    "write_kv_by_table",
]

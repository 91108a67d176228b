"""Where the Triton kernels run in tests: on a GPU where there is one, else in the interpreter.

Import this before any kernel: Triton decides when a kernel is defined.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Device of all test tensors."""

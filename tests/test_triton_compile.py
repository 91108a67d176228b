"""Every Triton kernel of the package compiles for NVIDIA sm_90 and AMD gfx942, without a GPU.

Modules list their builds in ``COMPILE_CASES`` (`blocktable.device.compile_cases`), or they stand in
``triton_cases.py``. They are compiled in processes of their own: other tests may have chosen
Triton's interpreter.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tests.triton_cases import cases

targets = [GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)]
for case in cases(sys.argv[1]):
    types = {**case.signature, **{name: "constexpr" for name in case.constants}}
    signature = {name: types[name] for name in case.kernel.arg_names}
    for target in targets:
        source = ASTSource(case.kernel, signature=signature, constexprs=dict(case.constants))
        options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
        built = triton.compile(source, target=target, options=options)
        assert built.asm, (case, target)
    print("compiled", case.kernel.__name__)
"""


def kernel_modules() -> dict[str, set[str]]:
    """Module -> names of its launched kernels (``triton.jit`` functions called ``*_kernel``)."""
    found = {}
    for path in sorted((ROOT / "blocktable").rglob("*.py")):
        text = path.read_text()
        if "triton.jit" not in text:
            continue
        kernels = {
            node.name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef)
            and node.name.endswith("_kernel")
            and any("triton.jit" in ast.unparse(mark) for mark in node.decorator_list)
        }
        if kernels:
            found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = kernels
    return found


def test_there_are_kernels() -> None:
    assert "blocktable.device.slot_kernel" in kernel_modules()


@pytest.mark.parametrize("module", sorted(kernel_modules()))
def test_compiles_for_nvidia_and_amd(module: str) -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE, module],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    compiled = {line.split()[1] for line in run.stdout.splitlines() if line.startswith("compiled")}
    assert kernel_modules()[module] <= compiled, "a kernel has no COMPILE_CASES entry"

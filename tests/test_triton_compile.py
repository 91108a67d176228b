"""Every Triton kernel of the package compiles for NVIDIA sm_90 and AMD gfx942, without a GPU.

Gluon kernels are written for one architecture and compile for sm_90 alone. Modules list their
builds in ``COMPILE_CASES`` (`blocktable.device.compile_cases`), or they stand in
``triton_cases.py``. They are compiled in processes of their own: other tests may have chosen
Triton's interpreter.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
JIT = {"triton.jit", "gluon.jit"}

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tests.triton_cases import cases

hopper, amd = GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)
for case in cases(sys.argv[1]):
    types = {**case.signature, **{name: "constexpr" for name in case.constants}}
    signature = {name: types[name] for name in case.kernel.arg_names}
    make, targets = ASTSource, [hopper, amd]
    if case.kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        make, targets = GluonASTSource, [hopper]
    for target in targets:
        source = make(case.kernel, signature=signature, constexprs=dict(case.constants))
        options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
        built = triton.compile(source, target=target, options=options)
        assert built.asm, (case, target)
    print("compiled", case.kernel.__name__)
"""


class Module(NamedTuple):
    """What one file of the package says to Triton."""

    functions: set[str]  # decorated with triton.jit or gluon.jit
    calls: set[str]  # names these functions use
    gluon: bool


def jit_modules(root: Path) -> dict[str, Module]:
    """Module name -> its jit functions. A jit that is no decorator cannot be followed: refused."""
    found = {}
    for path in sorted((root / "blocktable").rglob("*.py")):
        tree = ast.parse(path.read_text())
        marked = {
            node: {ast.unparse(mark).split("(")[0] for mark in node.decorator_list} & JIT
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
        }
        functions = {node: marks for node, marks in marked.items() if marks}
        uses = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n) in JIT]
        assert len(uses) == len(functions), f"{path} compiles a function without a decorator"
        if functions:
            body = [n for node in functions for n in ast.walk(node)]
            names = {n.id for n in body if isinstance(n, ast.Name)}
            names |= {n.attr for n in body if isinstance(n, ast.Attribute)}
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            gluon = any("gluon.jit" in marks for marks in functions.values())
            found[module] = Module({node.name for node in functions}, names, gluon)
    return found


def kernel_modules(root: Path = ROOT) -> dict[str, set[str]]:
    """Module -> its kernels: jit functions that no other jit function of the package calls."""
    modules = jit_modules(root)
    called = set().union(*(module.calls for module in modules.values()))
    kernels = {name: module.functions - called for name, module in modules.items()}
    return {name: found for name, found in kernels.items() if found}


def test_kernels_are_found_whatever_their_name(tmp_path: Path) -> None:
    assert {"slot_kernel", "tile_hopper", "attend", "copy_kernel"} <= {
        name.rsplit(".", 1)[1] for name in kernel_modules()
    }
    package = tmp_path / "blocktable"
    package.mkdir()
    (package / "new.py").write_text(
        "@triton.jit\ndef helper(x): pass\n"
        "@triton.jit(do_not_specialize=[])\ndef add(x): helper(x)\n"
        "@gluon.jit\ndef other(x): pass\n"
    )
    assert kernel_modules(tmp_path) == {"blocktable.new": {"add", "other"}}
    (package / "hidden.py").write_text("def f(x): pass\ng = triton.jit(f)\n")
    with pytest.raises(AssertionError, match="without a decorator"):
        kernel_modules(tmp_path)


@pytest.mark.parametrize("module", sorted(kernel_modules()))
def test_compiles_for_nvidia_and_amd(module: str) -> None:
    pytest.importorskip("triton")
    if jit_modules(ROOT)[module].gluon:
        pytest.importorskip(
            "triton.experimental.gluon._runtime", reason="this Triton has no Gluon to compile"
        )
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
    missing = kernel_modules()[module] - compiled
    assert not missing, f"no compile case for {missing}"

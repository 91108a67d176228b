"""The layer rule of the design: no package imports one that stands above it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "blocktable"

# Each layer may import itself and what its line names.
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "prefix": {"core"},
    "groups": {"core", "prefix"},
    "manager": {"core", "prefix", "groups"},
    "sched": {"core", "prefix", "groups", "manager"},
    "device": {"core"},
    "attention": {"core", "device"},
    "engine": {"core", "prefix", "groups", "manager", "sched", "device", "attention"},
    "parallel": {"core", "device", "attention"},
    "transfer": {"core", "device", "attention", "parallel"},
    "check": {"core", "prefix", "groups", "manager", "sched", "device", "attention", "engine"},
    "sim": {
        "core", "prefix", "groups", "manager", "sched", "device", "attention", "engine", "check",
    },
    "plan": {"core", "prefix", "groups", "manager", "sched", "device", "attention", "engine"},
}
FREE = {
    "serve", "llm", "cli", "ranks", "disaggregated", "publishing",
    "__init__", "__main__",
}  # fmt: skip


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_layers(path: Path) -> set[str]:
    """Layers a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    inner = [name.split(".")[1] for name in names if name.startswith("blocktable.")]
    return {n for n in inner if (PACKAGE / n).is_dir() or (PACKAGE / f"{n}.py").exists()}


FILES = sorted(p for p in PACKAGE.rglob("*.py") if layer_of(p) not in FREE)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_layer_imports_upwards(path: Path) -> None:
    layer = layer_of(path)
    assert layer in ALLOWED, f"{layer} is not a layer of the design"
    upward = imported_layers(path) - ALLOWED[layer] - {layer}
    assert not upward, f"{path.relative_to(PACKAGE)} imports {sorted(upward)}"


def test_core_needs_only_numpy() -> None:
    probe = (
        "import sys, blocktable.core.pool, blocktable.manager, blocktable.sched.scheduler;"
        "print([m for m in ('torch', 'transformers', 'numba', 'triton') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_import_is_cheap_and_loads_no_torch() -> None:
    probe = (
        "import sys, time; t = time.perf_counter(); import blocktable;"
        "print(time.perf_counter() - t, 'torch' in sys.modules)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    seconds, torch_loaded = zip(*(run.stdout.split() for run in runs), strict=True)
    assert set(torch_loaded) == {"False"}
    assert min(map(float, seconds)) < 0.2


def test_no_bare_assert_in_the_package() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert found == []

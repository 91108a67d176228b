"""Builds the optional compiled parts; everything else is declared in pyproject.toml.

All extensions are optional: where there is no compiler the wheel is built without them, and
the package runs the same operations in NumPy and Numba (it says so once, when first used).
"""

import platform
from pathlib import Path

from setuptools import Extension, setup

COMMON = ["-O3", "-fno-math-errno", "-fvisibility=hidden"]


def extensions() -> list[Extension]:
    if platform.system() not in ("Linux", "Darwin"):
        return []
    found = []
    if Path("blocktable/core/_native.c").exists():
        found.append(
            Extension(
                "blocktable.core._native",
                ["blocktable/core/_native.c"],
                depends=sorted(str(path) for path in Path("blocktable/core").glob("*.h")),
                extra_compile_args=COMMON,
                optional=True,
            )
        )
    if Path("blocktable/device/_commit.c").exists():
        found.append(
            Extension(
                "blocktable.device._commit",
                ["blocktable/device/_commit.c"],
                extra_compile_args=COMMON,
                optional=True,
            )
        )
    if Path("blocktable/parallel/_bits.c").exists():
        found.append(
            Extension(
                "blocktable.parallel._bits",
                ["blocktable/parallel/_bits.c"],
                extra_compile_args=COMMON,
                optional=True,
            )
        )
    if Path("blocktable/attention/cpu/_kernels.cpp").exists():
        found.append(
            Extension(
                "blocktable.attention.cpu._kernels",
                ["blocktable/attention/cpu/_kernels.cpp"],
                depends=sorted(str(path) for path in Path("blocktable/attention/cpu").glob("*.h")),
                language="c++",
                extra_compile_args=[*COMMON, "-std=c++17"],
                optional=True,
            )
        )
    return found


setup(ext_modules=extensions())

"""Builds of kernels whose modules list none themselves, for ``test_triton_compile.py``."""

from __future__ import annotations

import importlib
from typing import Any

from blocktable.device.compile_cases import CompileCase


def _case(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> CompileCase:
    """Integers unless said otherwise: arguments that are neither typed nor constant are i32."""
    signature = {n: types.get(n, "i32") for n in kernel.arg_names if n not in constants}
    return CompileCase(kernel, signature, constants, num_warps=warps)


def _attend(module: Any, group: int, block_m: int, plain: bool) -> CompileCase:
    types = {
        "query": "*bf16", "k_cache": "*bf16", "v_cache": "*bf16", "block_table": "*i32",
        "items": "*i32", "tokens": "*i32", "out": "*bf16", "part_out": "*fp32",
        "part_lse": "*fp32", "counters": "*i32", "scale": "fp32", "softcap": "fp32",
        "lse_out": "*fp32", "sinks": "*fp32", "slopes": "*fp32", "k_scale": "*fp32",
        "v_scale": "*fp32",
    }  # fmt: skip
    absent = ("lse_out", "sinks", "slopes", "k_scale", "v_scale") if plain else ()
    constants: dict[str, Any] = {
        "HQ": 8 * group, "HKV": 8, "D": 128, "DV": 128, "BS": 16, "D1": 128, "D2": 0,
        "BLOCK_DV": 128, "BLOCK_M": block_m, "BLOCK_N": 64, "STAGES": 3, "CAUSAL": True,
        "WINDOW": 0 if plain else 512, "CHUNK": 0, "SOFTCAP": not plain, "HAS_SINK": not plain,
        "HAS_ALIBI": not plain, "K_SCALED": not plain, "V_SCALED": not plain,
        "HAS_LSE": not plain, "V_IN_K": False, "GATHERS": block_m > 16, "SKIP_MASK": block_m > 16,
        "AS_HALF": False, "PRECISION": "tf32", "WIDE": False, "STARTS_NEXT": False,
        "FOLLOWS": False, "MERGE_P": 8,
        **dict.fromkeys(absent),
    }  # fmt: skip
    return _case(module.attend_kernel, types, constants, 4)


def _write(module: Any, from_table: bool) -> CompileCase:
    types = {
        "key": "*bf16", "value": "*bf16", "k_cache": "*bf16", "v_cache": "*bf16", "slots": "*i64",
        "block_table": "*i32", "token_rows": "*i32", "positions": "*i64",
    }  # fmt: skip
    absent = ("slots",) if from_table else ("block_table", "token_rows", "positions")
    constants = {
        "HKV": 8, "D": 128, "DV": 128, "BS": 16, "TOKENS": 1, "HEADS": 8, "BLOCK_D": 128,
        "BLOCK_DV": 128, "FROM_TABLE": from_table, "K_SCALED": False, "V_SCALED": False,
        "K_LIMIT": 0.0, "V_LIMIT": 0.0, "k_scale": None, "v_scale": None, **dict.fromkeys(absent),
    }  # fmt: skip
    return _case(module.write_kernel, types, constants, 4)


def _merge(module: Any) -> CompileCase:
    types = {"merges": "*i32", "part_out": "*fp32", "part_lse": "*fp32", "out": "*bf16"}
    constants = {
        "HQ": 32, "HKV": 8, "DV": 128, "BLOCK_DV": 128, "HAS_SINK": False, "V_SCALED": False,
        "HAS_LSE": False, "MERGE_P": 8, "lse_out": None, "sinks": None, "v_scale": None,
    }  # fmt: skip
    return _case(module.merge_kernel, types, constants, 1)


def _tile(module: Any, size: int, block_n: int, stages: int, plain: bool) -> CompileCase:
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout(128, 16, 2)
    types = {
        **dict.fromkeys(("k_desc", "v_desc"), f"tensordesc<bf16[16, 64],{layout!r}>"),
        **dict.fromkeys(("query", "out"), "*bf16"),
        **dict.fromkeys(("block_table", "items", "tokens"), "*i32"),
        **dict.fromkeys(("lse_out", "part_out", "part_lse", "sinks"), "*fp32"),
        "scale": "fp32", "softcap": "fp32",
    }  # fmt: skip
    constants = {
        "HQ": 32, "HKV": 8, "D": size, "BS": 16, "ROWS": 16, "BLOCK_N": block_n, "STAGES": stages,
        "CAUSAL": True, "WINDOW": 0 if plain else 512, "CHUNK": 0, "SOFTCAP": not plain,
        "HAS_SINK": not plain, "HAS_LSE": not plain, "STARTS_NEXT": plain,
    }  # fmt: skip
    return _case(module.tile_kernel, types, constants, 4)


def cases(name: str) -> list[CompileCase]:
    """``COMPILE_CASES`` of a module, or the ones listed here."""
    module = importlib.import_module(name)
    if hasattr(module, "COMPILE_CASES"):
        return list(module.COMPILE_CASES)
    if name.endswith("triton.attend"):
        return [_attend(module, *shape) for shape in ((4, 16, True), (4, 64, True), (4, 16, False))]
    if name.endswith("triton.cache_write"):
        return [_write(module, from_table) for from_table in (False, True)]
    if name.endswith("triton.merge"):
        return [_merge(module)]
    if name.endswith("triton.tile_hopper"):
        shapes = ((128, 128, 2, True), (64, 64, 4, True), (128, 128, 2, False))
        return [_tile(module, *shape) for shape in shapes]
    if name.endswith("device.copy_kernel"):
        types = dict.fromkeys(("source_bases", "target_bases", "pairs"), "*i64")
        types |= dict.fromkeys(("source_stride", "target_stride", "words"), "i64")
        return [_case(module.copy_blocks_kernel, types, {"CHUNK": module.CHUNK}, 8)]
    raise LookupError(f"{name} has no COMPILE_CASES")

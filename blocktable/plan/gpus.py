"""Memory and shared memory of devices by name, as their vendors state them."""

from __future__ import annotations

from typing import NamedTuple

from blocktable.core.errors import ConfigError

GIB = 1 << 30


class Device(NamedTuple):
    """A device to plan for. ``shared_memory_bytes`` is what one kernel program may use."""

    name: str
    memory_bytes: int
    shared_memory_bytes: int


_KIB = 1 << 10
DEVICES: dict[str, Device] = {
    name: Device(name, int(gib * GIB), shared * _KIB)
    for name, gib, shared in (
        ("t4", 15, 64), ("v100", 32, 96), ("a10g", 22.5, 99), ("l4", 22.5, 99),
        ("l40s", 45, 99), ("a100-40g", 40, 163), ("a100", 80, 163), ("a100-80g", 80, 163),
        ("rtx3090", 24, 99), ("rtx4090", 24, 99), ("rtx5090", 32, 99), ("rtx6000-pro", 96, 99),
        ("h100", 80, 227), ("h100-nvl", 94, 227), ("h20", 96, 227), ("h200", 141, 227),
        ("gh200", 96, 227), ("b200", 180, 227), ("b300", 270, 227), ("mi300x", 192, 64),
        ("mi325x", 256, 64), ("mi355x", 288, 160),
    )
}  # fmt: skip


def find_device(name: str, memory_bytes: int | None = None) -> Device:
    """The device called ``name``, with other memory where given; ConfigError lists the names."""
    known = DEVICES.get(name.lower().replace("_", "-"))
    if known is None and memory_bytes is None:
        raise ConfigError(
            f"unknown device {name!r}: give its memory, or one of {', '.join(sorted(DEVICES))}"
        )
    if known is None:
        return Device(name, int(memory_bytes or 0), 48 * _KIB)
    return known if memory_bytes is None else known._replace(memory_bytes=memory_bytes)

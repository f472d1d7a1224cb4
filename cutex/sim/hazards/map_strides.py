"""Tensor maps whose base or strides have lost their low bits.

A map keeps addresses and strides in units of 16 bytes (32 for padded elements). Host code that
encodes a tensor with others, as that of the DSL does, drops the low bits without a word: the copy
then takes other bytes. The map alone does not show it, so it is compared with the launch's tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cutex.sim.isa.tensormap import TensorMap
from cutex.sim.machine.events import Observer
from cutex.sim.machine.memory import HostTensor, description
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

UNIT = 16  # bytes


class MapStrides(Observer):
    """The tensor maps that a launch has used, each compared with the tensors once."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.seen: dict[int, TensorMap] = {}  # by identity

    def box_issued(
        self, warp: int, tmap: TensorMap, at: tuple[int, ...], write: bool, ins: Instruction
    ) -> None:
        if id(tmap) in self.seen:
            return
        self.seen[id(tmap)] = tmap
        region = self.m.memory.find(tmap.address) or self.m.memory.find(tmap.address + UNIT)
        tensors = [t for one in region.tensors for t in (one, *one.views)] if region else []
        near = [t for t in tensors if t.itemsize == tmap.itemsize]
        if any(_explains(t, tmap) for t in near):
            return
        for tensor in near:
            if lost := list(_lost(tensor, tmap)):
                self.m.findings.add(
                    "tensor map",
                    f"the tensor map of {tensor.name} ({description(tensor)}) has lost the low "
                    f"bits of {' and '.join(lost)}: a map takes multiples of {UNIT} bytes, so TMA "
                    f"{'writes' if write else 'reads'} other bytes than the tensor's; pad its "
                    "rows, or copy it",
                    ins,
                )
                return


def _strides(tensor: HostTensor) -> list[int]:
    """The strides in bytes of the dimensions that have some."""
    pairs = zip(tensor.shape, tensor.strides, strict=True)
    return [stride * tensor.itemsize for size, stride in pairs if size > 1]


def _explains(tensor: HostTensor, tmap: TensorMap) -> bool:
    """Whether the map may be the tensor's, or of a part of it, as it is."""
    strides = _strides(tensor)
    used = [s for n, s in zip(tmap.dims[1:], tmap.strides[1:], strict=True) if n > 1]
    whole = {n for n in tmap.dims if n > 1} <= set(tensor.shape)
    zero = not any(tensor.itemsize < s < UNIT for s in strides)  # else it may be one of these
    return (
        whole
        and tmap.address >= tensor.address
        and all(s in strides or (s == 0 and zero) for s in used)
    )


def _lost(tensor: HostTensor, tmap: TensorMap) -> Iterator[str]:
    """What the map would have lost if it were the tensor's; nothing if it cannot be."""
    lost, strides = [], _strides(tensor)
    if tensor.address % UNIT and tensor.address // UNIT * UNIT == tmap.address:
        lost.append(f"its base, 0x{tensor.address:x}")
    for size, stride in zip(tmap.dims[1:], tmap.strides[1:], strict=True):
        whole = [s for s in strides if s % UNIT and s // UNIT * UNIT == stride]
        if size > 1 and stride not in strides:
            if not whole:
                return
            lost.append(f"its stride of {whole[0]} bytes, of which {stride} are left")
    yield from lost

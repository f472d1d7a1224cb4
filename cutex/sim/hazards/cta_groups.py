"""tcgen05 instructions of one CTA beside those of a pair in one kernel: by the letter all of a
kernel's have one .cta_group (PTX ISA 9.7.16.7.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

_GROUPS = ("cta_group::1", "cta_group::2")


def tell(machine: Machine) -> None:
    """Report a kernel that has both, at its first instruction of each kind."""
    code = [i for i in machine.program.code if i.name == "tcgen05"]
    one, pair = (next((i for i in code if group in i.op), None) for group in _GROUPS)
    if one is not None and pair is not None:
        machine.findings.add(
            "tensor memory",
            f"the kernel has tcgen05 instructions of one CTA ({one.where()}) beside those of a "
            "pair: by the letter all of a kernel's have one .cta_group",
            pair,
            advisory=True,
        )

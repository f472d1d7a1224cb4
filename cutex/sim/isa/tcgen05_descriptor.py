"""The 32-bit instruction descriptor of tcgen05.mma (PTX ISA 9.7.16.4.2), and the shapes that exist.

Dense forms only: a descriptor of another form, or of a type not defined here, is a BadOperand.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutex.sim.errors import BadOperand
from cutex.sim.ptx.program import Instruction

_NARROW = {0: "e4m3", 1: "e5m2", 3: "padded e2m3", 4: "padded e3m2", 5: "padded e2m1"}
TYPES: dict[str, dict[int, str]] = {  # of A and B, by kind and code
    "f16": {0: "f16", 1: "bf16"}, "tf32": {2: "tf32"}, "i8": {0: "u8", 1: "s8"},
    "f8f6f4": _NARROW, "mxf8f6f4": _NARROW, "mxf4": {1: "e2m1"}, "mxf4nvf4": {1: "e2m1"},
}  # fmt: skip
_RESULTS: dict[str, dict[int, str]] = {  # of D
    "f16": {0: "f16", 1: "f32"}, "tf32": {1: "f32"}, "f8f6f4": {0: "f16", 1: "f32"},
    "i8": {2: "s32"},
}  # fmt: skip
_FACTORS: dict[str, dict[int, str]] = {  # scale factors
    "mxf8f6f4": {1: "ue8m0"}, "mxf4": {1: "ue8m0"}, "mxf4nvf4": {0: "ue4m3", 1: "ue8m0"},
}  # fmt: skip
_K = {"tf32": 8, "f16": 16, "bf16": 16, "e2m1": 64}  # other types have 8 bits


@dataclass(frozen=True)
class InstructionDescriptor:
    """The types and the shape of one multiplication."""

    a: str
    b: str
    out: str
    m: int
    n: int
    a_mn: bool = False  # MN-major
    b_mn: bool = False
    negate: bool = False
    saturate: bool = False
    # with block scaling: the type of the factors, and which bytes of a word hold A's and B's
    factors: str = ""
    a_byte: int = 0
    b_byte: int = 0
    half_more: bool = False  # K = 96, of sm_103a

    @property
    def k(self) -> int:
        """The elements of K in one instruction; padded elements count as 8 bits."""
        return 96 if self.half_more else _K.get(self.a, 32)

    @property
    def k_bytes(self) -> int:
        """The bytes of K in each row."""
        return 48 if self.half_more else 32

    @property
    def integer(self) -> bool:
        return self.out == "s32"


def read_instruction(
    bits: int, kind: str, ins: Instruction, target: str = "sm_100a"
) -> InstructionDescriptor:
    """Decode an instruction descriptor (tables 42, 43 and 44)."""
    scaled = kind in _FACTORS
    half_more = bool(kind.startswith("mxf4") and target.startswith("sm_103") and bits >> 31)
    # NOTE: with 4-bit operands, bit 12 is of sparse ones ("version", which the DSL's builder sets)
    wide = 3 if kind.startswith("mxf4") else 7
    a, b, out = (bits >> 7 & 7, bits >> 10 & wide, bits >> 4 & 3)
    reserved = bits >> 24 & 7 | (bits >> 31) - half_more if scaled else bits >> 29 | bits >> 23 & 1
    odd = bits & (0b0111 if kind == "i8" else 0b1111) or bits >> 6 & 1 or reserved
    names, results = TYPES[kind], _RESULTS.get(kind, {out: "f32"})
    factors = _FACTORS[kind].get(bits >> 23 & 1) if scaled else ""
    if a not in names or b not in names or out not in results or odd or factors is None:
        raise BadOperand.at(
            ins,
            f"instruction descriptor 0x{bits:08x} asks for a sparse form, a type or an "
            f"accumulator that the simulator does not define for kind::{kind}",
        )
    if kind == "i8" and bits >> 13 & 3:
        raise BadOperand.at(ins, f"instruction descriptor 0x{bits:08x} negates integers")
    for name, transposed in ((names[a], bits >> 15 & 1), (names[b], bits >> 16 & 1)):
        if transposed and name.removeprefix("padded ") in ("e2m1", "e2m3", "e3m2"):
            raise BadOperand.at(
                ins,
                f"instruction descriptor 0x{bits:08x} transposes operands of 4 or 6 bits, which "
                "the simulator does not define",
            )
    return InstructionDescriptor(
        a=names[a],
        b=names[b],
        out=results[out],
        m=(bits >> 27 & 3) << 7 if scaled else (bits >> 24 & 31) << 4,
        n=(bits >> 17 & 63) << 3,
        a_mn=bool(bits >> 15 & 1),
        b_mn=bool(bits >> 16 & 1),
        negate=bool(bits >> 13 & 1) != bool(bits >> 14 & 1),
        saturate=bool(bits >> 3 & 1),
        factors=factors,
        a_byte=bits >> 29 & 3 if scaled else 0,
        b_byte=out if scaled else 0,
        half_more=half_more,
    )


def check_shape(
    desc: InstructionDescriptor, group: int, ins: Instruction, ws: bool = False
) -> None:
    """Check the shape (table 39): M 64 or 128 (one CTA), 128 or 256 (pair); N in steps of 8 or 16,
    for integers 16 (besides 8 and 24) or 32; twice that where B has 8 bits and is N-major (the
    DSL's own check); with ``ws`` M 32, 64 or 128 and N 64, 128 or 256.
    """
    if ws:
        if group != 1 or desc.m not in (32, 64, 128) or desc.n not in (64, 128, 256):
            raise BadOperand.at(
                ins,
                f"tcgen05.mma.ws of M={desc.m}, N={desc.n} with cta_group::{group}: takes one CTA, "
                "M in (32, 64, 128), N in (64, 128, 256)",
            )
        return
    ms: tuple[int, ...] = (64, 128) if group == 1 else (128, 256)
    step = 8 * group
    if desc.b_mn and desc.b in ("e4m3", "e5m2"):
        step = 16 * group
    if desc.factors:
        ms, step = ((128,), 8) if group == 1 else ((128, 256), 16)
        if group == 2 and desc.m == 128:
            step = 64  # NOTE: the place of a half's factors is unknown unless it is whole words
    if desc.integer:
        step = 32 if group == 2 else 16
    small = desc.integer and group == 1 and desc.n in (8, 24)
    if desc.m not in ms or (desc.n % step and not small) or not 8 <= desc.n <= 256:
        raise BadOperand.at(
            ins,
            f"tcgen05.mma of M={desc.m}, N={desc.n} with cta_group::{group}: takes M in {ms}, N in "
            f"steps of {step} up to 256",
        )

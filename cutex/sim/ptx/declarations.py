"""Declarations of PTX: parameters and variables (PTX ISA chapters 4.5, 5.1 and 5.4).

A declaration that cannot be read is an error with its line, never skipped: continuing would give a
wrong result.
"""

from __future__ import annotations

import re

from cutex.sim.errors import UnknownInstruction
from cutex.sim.ptx.program import Param, Variable

WIDTH = {  # bits of a fundamental type (PTX ISA 5.2.1)
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16,
    "b32": 32, "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "tf32": 32,
    "b64": 64, "u64": 64, "s64": 64, "f64": 64, "f32x2": 64, "b128": 128,
}  # fmt: skip


_INT = re.compile(r"([+-]?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?")
_CLOSES = {")": "(", "]": "[", "}": "{"}
SPACES = (".shared", ".global", ".const", ".local")
_LARGEST = {"shared": 232448, "const": 65536, "local": 512 << 10, "global": 1 << 34}  # bytes
_MOST_PARAMS = 32764  # bytes of a kernel's parameters (PTX ISA 7.1.1)


def unreadable(line: int, text: str, why: str = "") -> UnknownInstruction:
    text = text if len(text) <= 110 else text[:107] + "..."
    return UnknownInstruction(
        f"PTX line {line} cannot be read{': ' + why if why else ''}: {' '.join(text.split())}"
    )


def integer(text: str) -> int | None:
    """The value of an integer constant (PTX ISA 4.5.1); None if ``text`` is none of 64 bits."""
    m = _INT.fullmatch(text)
    if m is None:
        return None
    sign, digits = m.groups()
    octal = len(digits) > 1 and digits.isdigit() and digits[0] == "0"
    value = int(digits, 8) if octal else int(digits, 0)
    return None if value >> 64 else -value if sign == "-" else value


def line_at(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\b[^,\n]*?\s)?"
    r"([\w$]+)(?:\[(\d+)\])?\s*(?=,|\n|\))"
)


def parameters(header: str, line: int) -> tuple[list[Param], int]:
    params: list[Param] = []
    offset = 0
    found = _PARAM.findall(header)
    if len(found) != len(re.findall(r"\.param\b", header)):
        raise unreadable(line, header, "its parameters")
    for align, kind, name, count in found:
        unit = _bytes(kind, line, header)
        size = unit * int(count or 1)
        align_bytes = _alignment(align or unit, line, header)
        if name in {p.name for p in params} or size > _MOST_PARAMS:
            raise unreadable(line, header, f"the parameter {name}")
        offset = -(-offset // align_bytes) * align_bytes
        params.append(Param(name, size, align_bytes, offset))
        offset += size
    return params, offset


def _bytes(kind: str, line: int, text: str) -> int:
    """The size of a fundamental type in bytes."""
    if WIDTH.get(kind, 1) < 8:
        raise unreadable(line, text, f"the type .{kind}")
    return WIDTH[kind] // 8


def _alignment(given: str | int, line: int, text: str) -> int:
    align = int(given)
    if align < 1 or align & (align - 1) or align > 1 << 20:
        raise unreadable(line, text, f"the alignment {align}")
    return align


_VARIABLE = re.compile(
    r"^\s*(?:\.(?:extern|visible|weak)\s+)*\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?"
    r"(?:\.attribute\([^)]*\)\s*)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?\s*(?:=\s*(.*))?$",
    re.S,
)


def variable(statement: str, line: int) -> Variable:
    """The variable that a statement declares; raises UnknownInstruction if it declares none."""
    m = _VARIABLE.match(statement)
    if not m:
        raise unreadable(line, statement, "the declaration")
    space, align, kind, name, count, init = m.groups()
    unit = _bytes(kind, line, statement)
    size = 0 if count == "" else unit * int(count or 1)
    if size > _LARGEST[space]:
        raise unreadable(line, statement, f"more than {_LARGEST[space]} bytes of .{space}")
    data = None
    if init:
        values = [
            integer(v) for v in split_operands(init.strip().removeprefix("{").removesuffix("}"))
        ]
        if any(v is None for v in values) or len(values) > size // unit:
            raise unreadable(line, statement, "the initial value")
        limit = (1 << (8 * unit)) - 1
        data = b"".join(((v or 0) & limit).to_bytes(unit, "little") for v in values)
        data = data.ljust(size, b"\0")
    return Variable(name, size, _alignment(align or unit, line, statement), space, data)


_MARKS = re.compile("[{};]")


def module_variables(text: str) -> dict[str, Variable]:
    """Variables declared at module scope (outside every function body)."""
    found: dict[str, Variable] = {}
    depth, start = 0, 0
    for mark in _MARKS.finditer(text):
        at, char = mark.start(), mark.group()
        if char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth < 0:
                raise unreadable(line_at(text, at), "}", "there is nothing that it closes")
            if depth == 0 and ";" not in text[at : at + 3]:
                start = at + 1
        elif char == ";" and depth == 0:
            # NOTE: directives without a semicolon (.version, .target) may stand before the
            # declaration
            for piece in re.split(r"\n(?=\s*\.)", text[start:at]):
                words = piece.split()
                if words and not words[0].startswith("."):
                    raise unreadable(line_at(text, at), piece, "it is in no kernel")
                if words and set(words[:3]) & set(SPACES):
                    line = line_at(text, start)
                    v = variable(" ".join(words), line)
                    if v.name in found:
                        raise unreadable(line, piece, "a second variable of that name")
                    found[v.name] = v
            start = at + 1
    if text[start:].strip() and not text[start:].lstrip().startswith("."):
        raise unreadable(line_at(text, start), text[start:], "it is in no kernel")
    return found


def split_operands(text: str) -> list[str]:
    """The parts of ``text`` between commas outside brackets and braces. Raises ValueError where
    those do not match.
    """
    out, opened, piece = [], "", ""
    for char in text:
        if char in "{[(":
            opened += char
        elif char in _CLOSES:
            if opened[-1:] != _CLOSES[char]:
                raise ValueError(f"an unmatched {char}")
            opened = opened[:-1]
        if char == "," and not opened:
            out.append(piece.strip())
            piece = ""
        else:
            piece += char
    if opened:
        raise ValueError(f"an unmatched {opened[-1]}")
    if piece.strip() or out:
        out.append(piece.strip())
    if "" in out:
        raise ValueError("an operand is missing")
    return out

"""The names of a PTX function body, scope by scope: registers, labels, and the operands' names.

Each pair of braces opens a scope (PTX ISA 4.4), whose names hide those around it.
"""

from __future__ import annotations

import re

from cutex.sim.ptx.declarations import WIDTH, integer, split_operands, unreadable
from cutex.sim.ptx.operands import (
    Address,
    Imm,
    Not,
    Operand,
    Pair,
    Reg,
    Sink,
    Special,
    Symbol,
    Vector,
)

_FLOAT = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")


class Scopes:
    """The scopes of one body, numbered from 0, the outermost, which resolve names.

    ``banks``: per width in bits, the registers that operands name, each with its index.
    """

    def __init__(self) -> None:
        self.banks: dict[int, dict[str, int]] = {1: {}, 16: {}, 32: {}, 64: {}, 128: {}}
        self.parents: dict[int, int] = {0: -1}
        # -> bank, unique name, declared type
        self.names: dict[int, dict[str, tuple[int, str, str]]] = {0: {}}
        # scope, "%r": count, bank, declared type
        self.ranges: dict[tuple[int, str], tuple[int, int, str]] = {}
        self.vectors: dict[tuple[int, str], int] = {}  # scope, name: elements
        self.labels: dict[tuple[int, str], int] = {}  # scope, name: index of an instruction
        self.call_params: set[str] = set()  # .param variables of the body, which calls pass

    def open(self, scope: int) -> int:
        """Open a scope within ``scope``; return its number."""
        inner = len(self.parents)
        self.parents[inner], self.names[inner] = scope, {}
        return inner

    def declare(self, statement: str, scope: int, line: int) -> None:
        m = re.fullmatch(r"\.reg\s+(?:\.v([24])\s+)?\.(\w+)\s+(.*)", statement)
        if not m or m.group(2) not in WIDTH:
            raise unreadable(line, statement, "the declaration")
        kind = m.group(2)
        bank = max(WIDTH[kind], 16) if kind != "pred" else 1
        known = self.names[scope]
        for name in m.group(3).replace(" ", "").split(","):
            ranged = re.fullmatch(r"([%\w$]+)<(\d+)>", name)
            if not ranged and not re.fullmatch(r"[%\w$]+", name):
                raise unreadable(line, statement, f"the name {name}")
            if name in known or (ranged and (scope, ranged.group(1)) in self.ranges):
                raise unreadable(line, statement, f"{name} is declared twice")
            if m.group(1):  # a vector: its elements are registers (PTX ISA 5.4.2)
                if ranged or bank == 1:
                    raise unreadable(line, statement, "the declaration")
                self.vectors[scope, name] = int(m.group(1))
                for x, r in zip("xyzw"[: int(m.group(1))], "rgba", strict=False):
                    unique = f"{name}.{x}" if scope == 0 else f"{name}.{x}@{scope}"
                    known[f"{name}.{x}"] = known[f"{name}.{r}"] = bank, unique, kind
                known[name] = bank, name, kind  # the vector's own name, which no operand uses alone
            elif ranged:
                self.ranges[scope, ranged.group(1)] = int(ranged.group(2)), bank, kind
            else:
                known[name] = bank, name if scope == 0 else f"{name}@{scope}", kind

    def _in_range(self, name: str, scope: int) -> tuple[int, str, str] | None:
        """A register of a range such as %r<100>, which declares %r0 to %r99, as (bank, unique
        name, declared type).
        """
        prefix = name.rstrip("0123456789")
        number = name[len(prefix) :]
        while number:
            count, bank, kind = self.ranges.get((scope, prefix), (0, 0, ""))
            if (number == "0" or number[0] != "0") and int(number) < count:
                return bank, name if scope == 0 else f"{name}@{scope}", kind
            prefix, number = prefix + number[0], number[1:]  # as in %r1<5>
        return None

    def declare_param(self, statement: str, scope: int, line: int) -> None:
        """Declare a .param that passes one scalar to a call or back (PTX ISA 5.1.6.4); here it is a
        register.
        """
        m = re.fullmatch(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+([\w$]+)", statement)
        if not m or m.group(1) not in WIDTH:
            raise unreadable(line, statement, "the declaration")
        unique = f"{m.group(2)}@{scope}"
        self.names[scope][m.group(2)] = max(WIDTH[m.group(1)], 16), unique, m.group(1)
        self.call_params.add(unique)

    def register(self, name: str, scope: int) -> Reg | None:
        while scope >= 0:
            hit = self.names[scope].get(name) or self._in_range(name, scope)
            if hit:
                bank, unique, kind = hit
                index = self.banks[bank].setdefault(unique, len(self.banks[bank]))
                return Reg(bank, index, unique, kind)
            scope = self.parents[scope]
        return None

    def _vector(self, name: str, scope: int) -> Vector | None:
        """All elements of a register that was declared with .v2 or .v4."""
        while scope >= 0:
            if count := self.vectors.get((scope, name)):
                items = [self.register(f"{name}.{x}", scope) for x in "xyzw"[:count]]
                return Vector(tuple(item for item in items if item))
            if name in self.names[scope]:
                return None
            scope = self.parents[scope]
        return None

    def label(self, name: str, scope: int) -> int | None:
        while scope >= 0:
            if (scope, name) in self.labels:
                return self.labels[scope, name]
            scope = self.parents[scope]
        return None

    def operand(self, text: str, scope: int) -> Operand:
        """The operand that ``text`` names. Raises ValueError with the part that cannot be read."""
        if text == "_":
            return Sink()
        if text[:1] in ("{", "("):
            return Vector(tuple(self.operand(t, scope) for t in split_operands(text[1:-1])))
        if text[:1] == "[":
            return self._address(text[1:-1].strip(), scope)
        if text.count("|") == 1:
            a, b = (self.operand(t.strip(), scope) for t in text.split("|"))
            return Pair(a, b)
        value = integer(text)
        if value is not None:
            return Imm(value)
        if m := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", text):
            return Imm(int(m.group(1) or m.group(2), 16), 32 if m.group(1) else 64)
        if _FLOAT.fullmatch(text):
            return Imm(float(text))
        if text[:1] == "!":
            reg = self.register(text[1:].strip(), scope)
            if reg and reg.bank == 1:
                return Not(reg)
        if self.vectors and (vector := self._vector(text, scope)):
            return vector
        reg = self.register(text, scope)
        if reg:
            return reg
        if re.fullmatch(r"%\w+(\.\w+)?", text):
            return Special(text)
        m = re.fullmatch(r"([A-Za-z_$][\w$]*)\s*(?:\+\s*(-?\w+))?", text)
        offset = integer(m.group(2) or "0") if m else None
        if m is None or offset is None:
            raise ValueError(f"the operand {text!r}")
        return Symbol(m.group(1), offset)

    def _address(self, inner: str, scope: int) -> Address:
        parts = split_operands(inner)
        if not 1 <= len(parts) <= 2:
            raise ValueError(f"the address [{inner}]")
        coords = None
        if len(parts) > 1:
            vector = self.operand(parts[1], scope)
            coords = vector.items if isinstance(vector, Vector) else (vector,)
        m = re.fullmatch(r"(.+?)\s*\+\s*(-?\w+)", parts[0])
        base, offset = (m.group(1), integer(m.group(2))) if m else (parts[0], 0)
        if offset is None:
            raise ValueError(f"the address [{inner}]")
        found = self.operand(base, scope)
        if not isinstance(found, Reg | Symbol | Imm) or (
            isinstance(found, Reg) and (found.bank not in (32, 64) or found.declared[0] == "f")
        ):
            raise ValueError(f"the address [{inner}]")
        return Address(found, offset, coords)

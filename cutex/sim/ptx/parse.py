"""PTX text -> Program: instructions with resolved registers, labels, scopes and source lines.

Grammar: PTX ISA chapters 4 and 5. Handles what the DSL and inline assembly emit: scoped braces with
labels and registers of their own, vector operands, predicates, ``_`` sinks and ``a|b`` pairs.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from cutex.sim.errors import UnknownInstruction

WIDTH = {  # bits of a fundamental type (PTX ISA 5.2.1)
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16,
    "b32": 32, "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "tf32": 32,
    "b64": 64, "u64": 64, "s64": 64, "f64": 64, "f32x2": 64, "b128": 128,
}  # fmt: skip


@dataclass(frozen=True)
class Reg:
    """A virtual register: ``bank`` is its width in bits (1 for predicates), ``index`` its place in
    that bank.
    """

    bank: int
    index: int
    name: str


@dataclass(frozen=True)
class Imm:
    value: int | float


@dataclass(frozen=True)
class Special:
    name: str  # "%tid.x"


@dataclass(frozen=True)
class Symbol:
    name: str  # a parameter, a shared or global variable
    offset: int = 0


@dataclass(frozen=True)
class Address:
    """``[base+offset]``; ``coords`` where the bracket holds ``[map, {c0, c1}]``."""

    base: Operand
    offset: int = 0
    coords: tuple[Operand, ...] | None = None


@dataclass(frozen=True)
class Vector:
    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    first: Operand  # ``%r1|%p1``
    second: Operand


@dataclass(frozen=True)
class Not:
    reg: Reg  # ``!%p1`` as a source operand


@dataclass(frozen=True)
class Sink:
    pass


Operand = Reg | Imm | Special | Symbol | Address | Vector | Pair | Not | Sink


@dataclass
class Instruction:
    op: str  # "add.s32"
    operands: list[Operand]
    guard: Reg | None  # @%p
    negated: bool  # @!%p
    line: int  # in the PTX text, from 1
    text: str
    source: tuple[str, int] | None = None  # (file, line) of the DSL program
    target: int = 0  # of a branch: index into Program.code
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.parts = tuple(p for p in re.split(r"\.|::", self.op) if p)

    @property
    def name(self) -> str:
        return self.parts[0]

    def where(self) -> str:
        """One line for reports: the PTX line and its text, and the Python line if known."""
        text = self.text if len(self.text) <= 110 else self.text[:107] + "..."
        source = f" ({self.source_line()})" if self.source else ""
        return f"PTX line {self.line}: {text}{source}"

    def source_line(self) -> str:
        """'kernels/gemm/sm90/stage2.py:74', relative to the working directory where the file is
        below it.
        """
        if self.source is None:
            return f"PTX line {self.line}"
        path, line = self.source
        here = os.getcwd() + os.sep
        return f"{path.removeprefix(here)}:{line}"


@dataclass
class Param:
    name: str
    size: int
    align: int
    offset: int = 0  # in the parameter space


@dataclass
class Variable:
    name: str
    size: int  # bytes; 0 for the dynamic part (``extern ...[]``)
    align: int
    space: str  # "shared", "global", "const", "local"
    init: bytes | None = None


@dataclass
class Program:
    name: str
    target: str  # "sm_100a"
    code: list[Instruction]
    params: list[Param]
    param_bytes: int
    variables: dict[str, Variable]
    registers: dict[int, int]  # bank -> how many
    max_threads: int | None = None
    labels: dict[str, int] = field(default_factory=dict)


_STATEMENT = re.compile(r"\s*(?:@(!?)([\w$%.]+)\s+)?([\w.:]+)\s*(.*)", re.S)
_FLOAT = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?$")
_INT = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|\d+)U?$")


def parse(text: str) -> dict[str, Program]:
    """Every ``.entry`` of a PTX module, by name."""
    text = text.rstrip("\0")
    target = re.search(r"\.target\s+(\w+)", text)
    files = {int(n): path for n, path in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)}
    module = _module_variables(text)
    programs = {}
    for entry in re.finditer(r"\.entry\s+([\w$]+)\s*(\()?", text):
        body_at = text.index(
            "{", _skip_parens(text, entry.end() - 1) if entry.group(2) else entry.end()
        )
        header = text[entry.start() : body_at]
        reader = _Body(text, body_at, files, dict(module))
        params, size = _params(header)
        threads = re.search(r"\.(?:reqntid|maxntid)\s+([\d,\s]+)", header)
        limit = None
        if threads:
            limit = 1
            for n in threads.group(1).split(","):
                limit *= int(n)
        programs[entry.group(1)] = Program(
            entry.group(1), target.group(1) if target else "", reader.code, params, size,
            reader.variables, {b: len(r) for b, r in reader.banks.items()}, limit,
            reader.all_labels,
        )  # fmt: skip
    return programs


def _skip_parens(text: str, at: int) -> int:
    return text.index(")", at) + 1


_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\b[^,\n]*?\s)?"
    r"([\w$]+)(?:\[(\d+)\])?\s*(?=,|\n|\))"
)


def _params(header: str) -> tuple[list[Param], int]:
    params, offset = [], 0
    for align, kind, name, count in _PARAM.findall(header):
        unit = WIDTH[kind] // 8
        size = unit * int(count or 1)
        align_bytes = int(align or unit)
        offset = -(-offset // align_bytes) * align_bytes
        params.append(Param(name, size, align_bytes, offset))
        offset += size
    return params, offset


_VARIABLE = re.compile(
    r"^\s*(?:\.(?:extern|visible|weak)\s+)*\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?"
    r"(?:\.attribute\([^)]*\)\s*)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?\s*(?:=\s*(.*))?$",
    re.S,
)


def _variable(statement: str) -> Variable | None:
    m = _VARIABLE.match(statement)
    if not m:
        return None
    space, align, kind, name, count, init = m.groups()
    unit = WIDTH[kind] // 8
    size = 0 if count == "" else unit * int(count or 1)
    data = None
    if init:
        values = [int(v, 0) for v in re.findall(r"-?0[xX][0-9a-fA-F]+|-?\d+", init)]
        data = b"".join((v & ((1 << (8 * unit)) - 1)).to_bytes(unit, "little") for v in values)
        data = data.ljust(size, b"\0")
    return Variable(name, size, int(align or unit), space, data)


def _module_variables(text: str) -> dict[str, Variable]:
    """Variables declared at module scope (outside every function body)."""
    found: dict[str, Variable] = {}
    depth, start = 0, 0
    clean = re.sub(r"//[^\n]*", lambda m: " " * len(m.group()), text)
    for at, char in enumerate(clean):
        if char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0 and ";" not in clean[at : at + 3]:
                start = at + 1
        elif char == ";" and depth == 0:
            # NOTE: directives without a semicolon (.version, .target) may stand before the
            # declaration
            for piece in re.split(r"\n(?=\s*\.)", clean[start:at]):
                v = _variable(" ".join(piece.split("\n")).strip())
                if v:
                    found[v.name] = v
            start = at + 1
    return found


class _Body:
    """Reads one function body: statements, scopes, labels; then resolves names."""

    def __init__(
        self, text: str, at: int, files: dict[int, str], variables: dict[str, Variable]
    ) -> None:
        self.files, self.variables = files, variables
        self.banks: dict[int, dict[str, int]] = {1: {}, 16: {}, 32: {}, 64: {}, 128: {}}
        self.declared: list[dict[str, tuple[int, str]]] = [
            {}
        ]  # per scope: name -> (bank, unique name)
        self.ranges: list[tuple[str, int, int]] = []  # "%r<100>": prefix, count, bank
        self.labels: dict[tuple[int, str], int] = {}
        self.all_labels: dict[str, int] = {}
        self.code: list[Instruction] = []
        self.call_params: set[str] = set()  # .param variables of the body: what calls pass
        self._parents: dict[int, int] = {0: -1}
        self._scopes_of: dict[int, dict[str, tuple[int, str]]] = {0: {}}
        self._read(text, at + 1)

    def _read(self, text: str, at: int) -> None:
        line = text.count("\n", 0, at) + 1
        scope, next_scope, piece, began = 0, 1, "", line
        pending: list[tuple[int, str, int, tuple[str, int] | None]] = []
        source: tuple[str, int] | None = None
        while at < len(text):
            char = text[at]
            if char == "\n":
                if piece.strip().startswith(".loc"):
                    source, piece = self._location(piece), ""
                elif piece.strip().startswith((".pragma", ".file")) and ";" not in piece:
                    piece = ""
                line += 1
            if text.startswith("//", at):
                at = text.index("\n", at)
                continue
            blank = not piece.strip()
            if blank and not char.isspace():
                began = line
            if char == "{" and blank:
                self._parents[next_scope], scope = scope, next_scope
                self._scopes_of[scope] = {}
                next_scope += 1
                piece = ""
            elif char == "}" and blank:
                if scope == 0:
                    break
                scope, piece = self._parents[scope], ""
            elif (
                char == ":"
                and text[at + 1] != ":"
                and text[at - 1] != ":"
                and re.fullmatch(r"\s*[$\w]+", piece)
            ):
                self.labels[scope, piece.strip()] = len(pending)
                self.all_labels[piece.strip()] = len(pending)
                piece = ""
            elif char == ";":
                statement = " ".join(piece.split())
                piece = ""
                if statement.startswith(".reg"):
                    self._declare(statement, scope)
                elif statement.startswith(".param"):
                    self._declare_param(statement, scope)
                elif statement.startswith("."):
                    v = _variable(statement)
                    if v:
                        self.variables[v.name] = v
                elif statement:
                    pending.append((scope, statement, began, source))
            else:
                piece += char
            at += 1
        for where, statement, began, source in pending:
            self.code.append(self._instruction(where, statement, began, source))

    def _location(self, piece: str) -> tuple[str, int] | None:
        m = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", piece)
        return (self.files.get(int(m.group(1)), "?"), int(m.group(2))) if m else None

    def _declare(self, statement: str, scope: int) -> None:
        m = re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement)
        assert m, statement
        bank = max(WIDTH[m.group(1)], 16) if m.group(1) != "pred" else 1
        for name in m.group(2).replace(" ", "").split(","):
            ranged = re.fullmatch(r"([%\w$]+)<(\d+)>", name)
            if ranged:
                for i in range(int(ranged.group(2))):
                    self._scopes_of[scope][f"{ranged.group(1)}{i}"] = (
                        bank,
                        f"{ranged.group(1)}{i}",
                    )
            else:
                self._scopes_of[scope][name] = (bank, name if scope == 0 else f"{name}@{scope}")

    def _declare_param(self, statement: str, scope: int) -> None:
        """What passes one scalar to a call or back (PTX ISA 5.1.6.4) is a register here."""
        m = re.fullmatch(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+([\w$]+)", statement)
        if m:
            unique = f"{m.group(2)}@{scope}"
            self._scopes_of[scope][m.group(2)] = max(WIDTH[m.group(1)], 16), unique
            self.call_params.add(unique)

    def _register(self, name: str, scope: int) -> Reg | None:
        while scope >= 0:
            hit = self._scopes_of[scope].get(name)
            if hit:
                bank, unique = hit
                index = self.banks[bank].setdefault(unique, len(self.banks[bank]))
                return Reg(bank, index, unique)
            scope = self._parents[scope]
        return None

    def _label(self, name: str, scope: int) -> int | None:
        while scope >= 0:
            if (scope, name) in self.labels:
                return self.labels[scope, name]
            scope = self._parents[scope]
        return None

    def _instruction(
        self, scope: int, text: str, line: int, source: tuple[str, int] | None
    ) -> Instruction:
        m = _STATEMENT.match(text)
        if not m:
            raise UnknownInstruction(f"PTX line {line} cannot be read: {text}")
        negated, guard, op, rest = m.groups()
        guard_reg = None
        if guard:
            guard_reg = self._register(guard, scope)
            if guard_reg is None:
                raise UnknownInstruction(
                    f"PTX line {line}: predicate {guard} is not declared: {text}"
                )
        target: int | None = None
        operands: list[Operand] = []
        if op.split(".")[0] == "bra":
            target = self._label(rest.strip(), scope)
            if target is None:
                raise UnknownInstruction(f"PTX line {line}: label {rest.strip()} is not defined")
        else:
            operands = [self._operand(o, scope, line) for o in _split(rest)]
            op, operands = self._passed(op, operands)
        return Instruction(op, operands, guard_reg, negated == "!", line, text, source, target or 0)

    def _passed(self, op: str, operands: list[Operand]) -> tuple[str, list[Operand]]:
        """A store to what a call passes, or a load from it, as the move that it is."""
        if op.startswith(("st.param.", "ld.param.")):
            for i, o in enumerate(operands):
                if (
                    isinstance(o, Address)
                    and isinstance(o.base, Reg)
                    and o.base.name in self.call_params
                    and not o.offset
                ):
                    kind = op.rpartition(".")[2]
                    return f"mov.{kind}", [*operands[:i], o.base, *operands[i + 1 :]]
        return op, operands

    def _operand(self, text: str, scope: int, line: int) -> Operand:
        if text == "_":
            return Sink()
        if text[0] in "{(":
            return Vector(tuple(self._operand(t, scope, line) for t in _split(text[1:-1])))
        if text[0] == "[":
            return self._address(text[1:-1].strip(), scope, line)
        if "|" in text:
            a, b = (self._operand(t.strip(), scope, line) for t in text.split("|"))
            return Pair(a, b)
        if _INT.match(text):
            return Imm(int(text.rstrip("U"), 0))
        if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
            return Imm(int(text[2:], 16))  # the bits; read by type
        if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
            return Imm(int(text[2:], 16))
        if _FLOAT.match(text):
            return Imm(float(text))
        if text[0] == "!":
            reg = self._register(text[1:], scope)
            if reg:
                return Not(reg)
        reg = self._register(text, scope)
        if reg:
            return reg
        if text[0] == "%":
            return Special(text)
        m = re.fullmatch(r"([\w$]+)\s*(?:\+\s*(-?\d+))?", text)
        if m:
            return Symbol(m.group(1), int(m.group(2) or 0))
        raise UnknownInstruction(f"PTX line {line}: operand {text!r} cannot be read")

    def _address(self, inner: str, scope: int, line: int) -> Address:
        pieces = _split(inner)
        coords = None
        if len(pieces) > 1:
            vector = self._operand(pieces[1], scope, line)
            coords = vector.items if isinstance(vector, Vector) else (vector,)
        m = re.fullmatch(r"(.+?)\s*\+\s*(-?(?:0x[0-9a-fA-F]+|\d+))", pieces[0])
        base, offset = (m.group(1), int(m.group(2), 0)) if m else (pieces[0], 0)
        return Address(self._operand(base, scope, line), offset, coords)


def _split(text: str) -> list[str]:
    """Split at commas outside brackets and braces."""
    out, depth, piece = [], 0, ""
    for char in text:
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            out.append(piece.strip())
            piece = ""
        else:
            piece += char
    if piece.strip():
        out.append(piece.strip())
    return out

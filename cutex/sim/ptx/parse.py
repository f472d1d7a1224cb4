"""PTX text -> Program: instructions with resolved registers, labels, scopes and source lines.

Grammar: PTX ISA chapters 4 and 5. Handles what the DSL and inline assembly emit: scoped braces with
labels and registers of their own, vector operands, predicates, ``_`` sinks and ``a|b`` pairs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any, NamedTuple, SupportsIndex, TypeVar, overload

from cutex.debug_info import Buffer, DebugInfo, Stack, debug_info_of, where
from cutex.sim.ptx.declarations import (
    SPACES,
    WIDTH,
    Param,
    Variable,
    integer,
    line_at,
    module_variables,
    parameters,
    split_operands,
    unreadable,
    variable,
)

Found = TypeVar("Found")


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
    bits: int = 0  # of a float written as its bits: 0f... 32, 0d... 64


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


BRANCHES = ("bra", "ret", "exit", "trap")  # what the scheduler itself executes

Operand = Reg | Imm | Special | Symbol | Address | Vector | Pair | Not | Sink


class Source(NamedTuple):
    """A place in the DSL program, as .loc gives it; the column counts from 1, 0 if unknown.

    ``stack``: the place and its function, what called that, and so on to the kernel; empty where
    the trace was not recorded.
    """

    file: str
    line: int
    column: int
    stack: Stack = ()

    def where(self) -> str:
        """'tma.py:50:9, called at kernel.py:74:9': the second where the kernel is in another file.

        Files are relative to the working directory where they are below it.
        """
        here = where(self)
        if not self.stack or self.stack[-1].file == self.file:
            return here
        own = next(call for call in self.stack if call.file == self.stack[-1].file)
        return f"{here}, called at {where(own)}"


class Operands(list[Operand]):
    """The operands of an instruction, which know which of them a definition has looked at.

    What nobody looked at is not understood: see `Decoder.account`.
    """

    def __init__(self, operands: Iterable[Operand] = ()) -> None:
        super().__init__(operands)
        self.asked: set[int] = set()

    @overload
    def __getitem__(self, k: SupportsIndex) -> Operand: ...
    @overload
    def __getitem__(self, k: slice) -> list[Operand]: ...
    def __getitem__(self, k: SupportsIndex | slice) -> Operand | list[Operand]:
        found = super().__getitem__(k)
        if isinstance(k, slice):
            self.asked.update(range(len(self))[k])
        else:
            self.asked.add(range(len(self))[k])
        return found


@lru_cache(maxsize=4096)
def opcode_parts(op: str) -> tuple[str, ...]:
    """Of "mbarrier.test_wait.shared::cta": ("mbarrier", "test_wait", "shared", "cta")."""
    return tuple(p for p in re.split(r"\.|::", op) if p)


@dataclass
class Instruction:
    op: str  # "add.s32"
    operands: Operands
    guard: Reg | None  # @%p
    negated: bool  # @!%p
    line: int  # in the PTX text, from 1
    text: str
    source: Source | None = None  # of the DSL program
    target: int = 0  # of a branch: index into Program.code
    parts: tuple[str, ...] = ()
    name: str = field(init=False)  # the first part of its opcode

    def __post_init__(self) -> None:
        self.parts = opcode_parts(self.op)
        self.name = self.parts[0]

    def where(self) -> str:
        """One line for reports: the PTX line and its text, and the Python line if known."""
        text = self.text if len(self.text) <= 110 else self.text[:107] + "..."
        source = f" ({self.source.where()})" if self.source else ""
        return f"PTX line {self.line}: {text}{source}"

    def place(self) -> str:
        """Of the source, as `Source.where`; else the PTX line."""
        return self.source.where() if self.source else f"PTX line {self.line}"


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
    buffers: list[Buffer] = field(default_factory=list)  # of dynamic shared memory, where named
    derived: dict[object, Any] = field(default_factory=dict, repr=False)  # see `once`


def once(derive: Callable[[Program], Found]) -> Callable[[Program], Found]:
    """What ``derive`` makes of a program, worked out once however often that is launched."""

    @wraps(derive)
    def derived(program: Program) -> Found:
        if derive not in program.derived:
            program.derived[derive] = derive(program)
        return program.derived[derive]

    return derived


_STATEMENT = re.compile(
    r"(?:@(!?)([\w$%.]+)\s+)?([a-z]\w*(?:(?:\.|::)\w+)*)(?:\s+(.*)|(?=\()(.*))?", re.S
)
_FLOAT = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


def _without_comments(text: str) -> str:
    """The same text with blanks for comments, and for .loc within inline assembly.

    NOTE: there the DSL counts lines on from the one at which the assembly stands, which is the one
    that is meant.
    """
    inline = False
    lines = []
    for line in text.split("\n"):
        if "// begin inline asm" in line:
            inline = True
        elif "// end inline asm" in line:
            inline = False
        lines.append("" if inline and line.lstrip().startswith(".loc") else line)
    return _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), "\n".join(lines))


def parse(text: str) -> dict[str, Program]:
    """Every ``.entry`` of a PTX module, by name. Raises UnknownInstruction, with the line, for what
    is no PTX that the simulator knows.
    """
    debug_info = debug_info_of(text)
    text = _without_comments(text.rstrip("\0"))
    target = re.search(r"\.target\s+(\w+)", text)
    files = {int(n): path for n, path in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)}
    module = module_variables(text)
    programs = {}
    entries = len(re.findall(r"\.entry\s", text))
    for entry in re.finditer(r"\.entry\s+([\w$]+)\s*(\()?", text):
        began = line_at(text, entry.start())
        closed = text.find(")", entry.end()) if entry.group(2) else entry.end()
        body_at = text.find("{", closed)
        if closed < 0 or body_at < 0:
            raise unreadable(began, entry.group(), "the kernel has no body")
        header = text[entry.start() : body_at]
        if entry.group(1) in programs:
            raise unreadable(began, entry.group(), "a second kernel of that name")
        reader = _Body(text, body_at, files, dict(module), debug_info)
        params, size = parameters(header, began)
        threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+(?:\s*,\s*\d+)*)", header)
        limit = None
        if threads:
            limit = 1
            for n in threads.group(1).split(","):
                limit *= int(n)
        programs[entry.group(1)] = Program(
            entry.group(1), target.group(1) if target else "", reader.code, params, size,
            reader.variables, {b: len(r) for b, r in reader.banks.items()}, limit,
            reader.all_labels, debug_info.of_kernel(entry.group(1), entries),
        )  # fmt: skip
    return programs


class _Body:
    """Reads one function body: statements, scopes, labels; then resolves names."""

    def __init__(
        self,
        text: str,
        at: int,
        files: dict[int, str],
        variables: dict[str, Variable],
        debug_info: DebugInfo,
    ) -> None:
        self.files, self.variables, self.debug_info = files, variables, debug_info
        self.banks: dict[int, dict[str, int]] = {1: {}, 16: {}, 32: {}, 64: {}, 128: {}}
        self.declared: list[dict[str, tuple[int, str]]] = [
            {}
        ]  # per scope: name -> (bank, unique name)
        self.ranges: dict[tuple[int, str], tuple[int, int]] = {}  # scope, "%r": count, bank
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
        pending: list[tuple[int, str, int, Source | None]] = []
        source: Source | None = None
        while True:
            if at >= len(text):
                raise unreadable(line, piece or "end of the text", "the body has no closing brace")
            char = text[at]
            if char == "\n":
                if piece.strip().startswith(".loc"):
                    source, piece = self._location(piece), ""
                elif piece.strip().startswith((".pragma", ".file")) and ";" not in piece:
                    piece = ""
                line += 1
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
                and text[at + 1 : at + 2] != ":"
                and text[at - 1] != ":"
                and re.fullmatch(r"\s*[$\w]+", piece)
            ):
                name = piece.strip()
                if (scope, name) in self.labels:
                    raise unreadable(began, f"{name}:", "a second label of that name")
                self.labels[scope, name] = self.all_labels[name] = len(pending)
                piece = ""
            elif char == ";":
                statement = " ".join(piece.split())
                piece = ""
                if statement.startswith(".reg"):
                    self._declare(statement, scope, began)
                elif statement.startswith(".param"):
                    self._declare_param(statement, scope, began)
                elif statement.startswith(SPACES):
                    v = variable(statement, began)
                    self.variables[v.name] = v
                elif statement.startswith("."):
                    if not statement.startswith(".pragma"):
                        raise unreadable(began, statement, "the directive")
                elif statement:
                    pending.append((scope, statement, began, source))
            else:
                piece += char
            at += 1
        if not pending or pending[-1][1] != "ret" or len(pending) in self.labels.values():
            pending.append((0, "ret", line, source))  # PTX ISA 9.7.12.7: the end of the body
        for inside, statement, began, source in pending:
            self.code.append(self._read_instruction(inside, statement, began, source))

    def _location(self, piece: str) -> Source | None:
        m = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)(?:\s+(\d+))?", piece)
        if m is None:
            return None
        file, line = self.files.get(int(m.group(1)), "?"), int(m.group(2))
        column = int(m.group(3) or 0)  # from 0, which also says that it is not known
        stack = self.debug_info.calls.get((file, line, column), ())
        if stack:
            return Source(*stack[0][:3], stack)
        return Source(file, line, column + 1 if column else 0)

    def _declare(self, statement: str, scope: int, line: int) -> None:
        m = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", statement)
        if not m or m.group(1) not in WIDTH:
            raise unreadable(line, statement, "the declaration")
        bank = max(WIDTH[m.group(1)], 16) if m.group(1) != "pred" else 1
        known = self._scopes_of[scope]
        for name in m.group(2).replace(" ", "").split(","):
            ranged = re.fullmatch(r"([%\w$]+)<(\d+)>", name)
            if not ranged and not re.fullmatch(r"[%\w$]+", name):
                raise unreadable(line, statement, f"the name {name}")
            if name in known or (ranged and (scope, ranged.group(1)) in self.ranges):
                raise unreadable(line, statement, f"{name} is declared twice")
            if ranged:
                self.ranges[scope, ranged.group(1)] = int(ranged.group(2)), bank
            else:
                known[name] = (bank, name if scope == 0 else f"{name}@{scope}")

    def _in_range(self, name: str, scope: int) -> tuple[int, str] | None:
        """A register of a range such as %r<100>, which declares %r0 to %r99."""
        prefix = name.rstrip("0123456789")
        number = name[len(prefix) :]
        while number:
            count, bank = self.ranges.get((scope, prefix), (0, 0))
            if (number == "0" or number[0] != "0") and int(number) < count:
                return bank, name if scope == 0 else f"{name}@{scope}"
            prefix, number = prefix + number[0], number[1:]  # as in %r1<5>
        return None

    def _declare_param(self, statement: str, scope: int, line: int) -> None:
        """What passes one scalar to a call or back (PTX ISA 5.1.6.4) is a register here."""
        m = re.fullmatch(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+([\w$]+)", statement)
        if not m or m.group(1) not in WIDTH:
            raise unreadable(line, statement, "the declaration")
        unique = f"{m.group(2)}@{scope}"
        self._scopes_of[scope][m.group(2)] = max(WIDTH[m.group(1)], 16), unique
        self.call_params.add(unique)

    def _register(self, name: str, scope: int) -> Reg | None:
        while scope >= 0:
            hit = self._scopes_of[scope].get(name) or self._in_range(name, scope)
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

    def _read_instruction(
        self, scope: int, text: str, line: int, source: Source | None
    ) -> Instruction:
        m = _STATEMENT.fullmatch(text)
        if not m:
            raise unreadable(line, text)
        negated, guard, op, rest, call = m.groups()
        rest = rest or call or ""
        guard_reg = None
        if guard:
            guard_reg = self._register(guard, scope)
            if guard_reg is None or guard_reg.bank != 1:
                raise unreadable(line, text, f"the predicate {guard} is not declared")
        target: int | None = None
        operands: list[Operand] = []
        name = op.split(".")[0]
        if name in BRANCHES:
            if op not in (name, f"{name}.uni") or (name != "bra" and rest):
                raise unreadable(line, text)
            if name == "bra":
                target = self._label(rest.strip(), scope)
                if target is None:
                    raise unreadable(line, text, f"the label {rest.strip()} is not defined")
        else:
            try:
                operands = [self._operand(o, scope) for o in split_operands(rest)]
            except ValueError as error:
                raise unreadable(line, text, str(error)) from None
            op, operands = self._passed(op, operands)
        given = Operands(operands)
        return Instruction(op, given, guard_reg, negated == "!", line, text, source, target or 0)

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

    def _operand(self, text: str, scope: int) -> Operand:
        """What one operand names. Raises ValueError, which says what cannot be read."""
        if text == "_":
            return Sink()
        if text[:1] in ("{", "("):
            return Vector(tuple(self._operand(t, scope) for t in split_operands(text[1:-1])))
        if text[:1] == "[":
            return self._address(text[1:-1].strip(), scope)
        if text.count("|") == 1:
            a, b = (self._operand(t.strip(), scope) for t in text.split("|"))
            return Pair(a, b)
        value = integer(text)
        if value is not None:
            return Imm(value)
        if m := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", text):
            return Imm(int(m.group(1) or m.group(2), 16), 32 if m.group(1) else 64)
        if _FLOAT.fullmatch(text):
            return Imm(float(text))
        if text[:1] == "!":
            reg = self._register(text[1:].strip(), scope)
            if reg and reg.bank == 1:
                return Not(reg)
        reg = self._register(text, scope)
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
        pieces = split_operands(inner)
        if not 1 <= len(pieces) <= 2:
            raise ValueError(f"the address [{inner}]")
        coords = None
        if len(pieces) > 1:
            vector = self._operand(pieces[1], scope)
            coords = vector.items if isinstance(vector, Vector) else (vector,)
        m = re.fullmatch(r"(.+?)\s*\+\s*(-?\w+)", pieces[0])
        base, offset = (m.group(1), integer(m.group(2))) if m else (pieces[0], 0)
        if offset is None:
            raise ValueError(f"the address [{inner}]")
        found = self._operand(base, scope)
        if not isinstance(found, Reg | Symbol | Imm) or (
            isinstance(found, Reg) and found.bank not in (32, 64)
        ):
            raise ValueError(f"the address [{inner}]")
        return Address(found, offset, coords)

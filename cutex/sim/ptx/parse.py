"""PTX text -> Program: instructions with resolved registers, labels, scopes and source lines.

Grammar: PTX ISA chapters 4 and 5. Handles what the DSL and inline assembly emit: scoped braces with
labels and registers of their own, vector operands, predicates, ``_`` sinks and ``a|b`` pairs.
"""

from __future__ import annotations

import re

from cutex.debug_info import DebugInfo, debug_info_of
from cutex.sim.errors import UnknownInstruction
from cutex.sim.ptx.contraction import contract
from cutex.sim.ptx.declarations import (
    SPACES,
    line_at,
    module_variables,
    parameters,
    split_operands,
    unreadable,
    variable,
)
from cutex.sim.ptx.forms import BRANCHES
from cutex.sim.ptx.operands import Address, Operand, Operands, Reg
from cutex.sim.ptx.program import Instruction, Program, Source, Variable
from cutex.sim.ptx.sass_lines import assembled_text, sass_lines
from cutex.sim.ptx.scopes import Scopes
from cutex.sim.ptx.vocabulary import NO_NAME, nonexistent

_STATEMENT = re.compile(
    r"(?:@(!?)([\w$%.]+)\s+)?([a-z]\w*(?:(?:\.|::)\w+)*)(?:\s+(.*)|(?=\()(.*))?", re.S
)
_PLAIN = re.compile(r"[^\n{}:;]+")  # text that ends no statement, label, scope or line
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


def _without_comments(text: str) -> str:
    """The same text with blanks for comments, and for .loc within inline assembly.

    NOTE: there the DSL counts the lines of the assembly on from its own line, and only that line is
    meaningful.
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


def parse(text: str, cubin: bytes | None = None) -> dict[str, Program]:
    """Every ``.entry`` of a PTX module, by name. Raises UnknownInstruction, with the line, for PTX
    that the simulator does not define. ``cubin``: what ptxas made of it, if that is known.
    """
    assembled = cubin is not None and _code_of(text) == _code_of(assembled_text(cubin))
    compiled = sass_lines(cubin) if assembled and cubin else {}
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
        if not assembled:
            _refuse_nonexistent(reader.code)
        contract(reader.code, compiled.get(entry.group(1)))
        params, size = parameters(header, began)
        threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+(?:\s*,\s*\d+)*)", header)
        limit = None
        if threads:
            limit = 1
            for n in threads.group(1).split(","):
                limit *= int(n)
        beside = re.search(r"\.minnctapersm\s+(\d+)", header)
        programs[entry.group(1)] = Program(
            entry.group(1), target.group(1) if target else "", reader.code, params, size,
            reader.variables, {b: len(r) for b, r in reader.scopes.banks.items()}, limit,
            reader.all_labels, debug_info.of_kernel(entry.group(1), entries),
            assembled, max(int(beside.group(1)), 1) if beside else 1,
        )  # fmt: skip
    return programs


def _code_of(text: str) -> list[str]:
    """The lines of PTX without those that say where they come from."""
    lines = (line.strip() for line in text.rstrip("\0").split("\n"))
    return [line for line in lines if line and not line.startswith((".loc", ".file", "//"))]


def _refuse_nonexistent(code: list[Instruction]) -> None:
    """Raise UnknownInstruction for the first instruction that the PTX ISA does not have, whether
    or not a run would reach it.
    """
    for ins in code:
        if wrong := nonexistent(ins.op):
            what = "it" if wrong == NO_NAME else "this form"
            raise UnknownInstruction.of(ins, what, wrong)


class _Body:
    """A reader of one function body: statements, scopes, labels; then it resolves names."""

    def __init__(
        self,
        text: str,
        at: int,
        files: dict[int, str],
        variables: dict[str, Variable],
        debug_info: DebugInfo,
    ) -> None:
        self.files, self.variables, self.debug_info = files, variables, debug_info
        self.scopes = Scopes()
        self.all_labels: dict[str, int] = {}
        self.code: list[Instruction] = []
        self._read(text, at + 1)

    def _read(self, text: str, at: int) -> None:
        line = text.count("\n", 0, at) + 1
        scope, piece, began = 0, "", line
        pending: list[tuple[int, str, int, Source | None]] = []
        source: Source | None = None
        while True:
            if at >= len(text):
                raise unreadable(line, piece or "end of the text", "the body has no closing brace")
            if plain := _PLAIN.match(text, at):
                began = line if not piece.strip() and plain.group().strip() else began
                piece, at = piece + plain.group(), plain.end()
                continue
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
                scope, piece = self.scopes.open(scope), ""
            elif char == "}" and blank:
                if scope == 0:
                    break
                scope, piece = self.scopes.parents[scope], ""
            elif (
                char == ":"
                and text[at + 1 : at + 2] != ":"
                and text[at - 1] != ":"
                and re.fullmatch(r"\s*[$\w]+", piece)
            ):
                name = piece.strip()
                if (scope, name) in self.scopes.labels:
                    raise unreadable(began, f"{name}:", "a second label of that name")
                self.scopes.labels[scope, name] = self.all_labels[name] = len(pending)
                piece = ""
            elif char == ";":
                statement = " ".join(piece.split())
                piece = ""
                if statement.startswith(".reg"):
                    self.scopes.declare(statement, scope, began)
                elif statement.startswith(".param"):
                    self.scopes.declare_param(statement, scope, began)
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
        if not pending or pending[-1][1] != "ret" or len(pending) in self.scopes.labels.values():
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
            guard_reg = self.scopes.register(guard, scope)
            if guard_reg is None or guard_reg.bank != 1:
                raise unreadable(line, text, f"the predicate {guard} is not declared")
        target: int | None = None
        operands: list[Operand] = []
        name = op.split(".")[0]
        if name in BRANCHES:
            if op not in (name, f"{name}.uni") or (name != "bra" and rest):
                raise unreadable(line, text)
            if name == "bra":
                target = self.scopes.label(rest.strip(), scope)
                if target is None:
                    raise unreadable(line, text, f"the label {rest.strip()} is not defined")
        else:
            try:
                operands = [self.scopes.operand(o, scope) for o in split_operands(rest)]
            except ValueError as error:
                raise unreadable(line, text, str(error)) from None
            op, operands = self._passed(op, operands)
        given = Operands(operands)
        return Instruction(op, given, guard_reg, negated == "!", line, text, source, target or 0)

    def _passed(self, op: str, operands: list[Operand]) -> tuple[str, list[Operand]]:
        """A store to a call's parameter, or a load from it, as the register move that it is."""
        if op.startswith(("st.param.", "ld.param.")):
            for i, o in enumerate(operands):
                if (
                    isinstance(o, Address)
                    and isinstance(o.base, Reg)
                    and o.base.name in self.scopes.call_params
                    and not o.offset
                ):
                    kind = op.rpartition(".")[2]
                    return f"mov.{kind}", [*operands[:i], o.base, *operands[i + 1 :]]
        return op, operands

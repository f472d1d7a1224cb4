"""Broken PTX, drawn from a seed: the fault is in a token, an operand, a modifier, a line or a
character.
"""

from __future__ import annotations

import random
import re

_OPCODE = re.compile(r"(?<![\w.%:])[a-z]\w*(?:(?:\.|::)\w+)+")
_TOKEN = re.compile(r"[\w$%]+|\S")
_NUMBERS = (
    "0", "-1", "1", "3", "32", "1024", "4294967295", "2147483648", "9223372036854775808",
    "1000000000", "0x7fffffffffffffff", "-94040066256720", "08", "1.5", "0f3F800000", "5U", "0b11",
    "99999999999999999999999",
)  # fmt: skip
_CHARACTERS = '{}[]();,.:|!@%_-+0 \n"/*#~\0é'
_OPERANDS = ("%r5", "7", "%p1", "%d3", "[%d1]", "{%r1, %r2}", "_", "smem", "%r1|%p2")


def broken(text: str, choose: random.Random, words: list[str]) -> str:
    """Return `text` with one change behind its header; `words` are modifiers to draw from."""
    at = text.index("{", text.index(".entry"))
    head, body = text[:at], text[at:]
    change = choose.choice(
        (_modifier, _modifier, _operand, _operand, _number, _token, _token, _character, _line)
    )
    if choose.random() < 0.05:  # the header too
        head, body = "", text
    return head + change(body, choose, words)


def _replace(body: str, span: tuple[int, int], new: str) -> str:
    return body[: span[0]] + new + body[span[1] :]


def _modifier(body: str, choose: random.Random, words: list[str]) -> str:
    found = list(_OPCODE.finditer(body))
    if not found:
        return body
    m = choose.choice(found)
    parts = re.findall(r"(?:\.|::)?\w+", m.group())
    at = choose.randrange(1, len(parts))
    match choose.randrange(3):
        case 0:
            parts.insert(at, "." + choose.choice(words))
        case 1:
            parts.pop(at)
        case _:
            parts[at] = "." + choose.choice(words)
    return _replace(body, m.span(), "".join(parts))


def _operand(body: str, choose: random.Random, words: list[str]) -> str:
    found = list(_OPCODE.finditer(body))
    if not found:
        return body
    m = choose.choice(found)
    end = body.find(";", m.end())
    operands = body[m.end() : end].split(",")
    at = choose.randrange(len(operands))
    match choose.randrange(3):
        case 0:
            operands.insert(at, f" {choose.choice(_OPERANDS)}")
        case 1:
            operands.pop(at)
        case _:
            operands[at] = f" {choose.choice(_OPERANDS)}"
    return _replace(body, (m.end(), end), " " + ",".join(operands))


def _number(body: str, choose: random.Random, words: list[str]) -> str:
    found = [m for m in _TOKEN.finditer(body) if m.group()[0].isdigit()]
    return _replace(body, choose.choice(found).span(), choose.choice(_NUMBERS)) if found else body


def _token(body: str, choose: random.Random, words: list[str]) -> str:
    found = list(_TOKEN.finditer(body))
    new = "" if choose.random() < 0.4 else choose.choice(found).group()
    return _replace(body, choose.choice(found).span(), new)


def _character(body: str, choose: random.Random, words: list[str]) -> str:
    at = choose.randrange(len(body))
    return _replace(body, (at, at + choose.randrange(2)), choose.choice(_CHARACTERS))


def _line(body: str, choose: random.Random, words: list[str]) -> str:
    lines = body.split(";")
    at = choose.randrange(len(lines))
    match choose.randrange(4):
        case 0:
            lines.pop(at)
        case 1:
            lines.insert(at, lines[at])
        case 2:
            return ";".join(lines[:at])
        case _:
            other = choose.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
    return ";".join(lines)

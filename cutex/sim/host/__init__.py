"""The host side: a kernel's own host code run on the CPU, and stand-ins for torch and the DSL."""

from __future__ import annotations

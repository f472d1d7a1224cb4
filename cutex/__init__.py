"""cutex: a workbench for writing, checking and timing CuTe DSL kernels for Hopper and Blackwell.

Public names are imported on first use, so that `import cutex` loads neither torch nor the DSL.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutex.ops.attention import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
        flash_mla_with_kvcache,
        get_mla_metadata,
    )
    from cutex.ops.fp8_linear import fp8_linear
    from cutex.ops.grouped import grouped_mm, scaled_grouped_mm
    from cutex.ops.matmul import kernels_built, matmul, tuning, warm_up
    from cutex.ops.mixture import moe
    from cutex.ops.quantize import dequantize, quantize
    from cutex.ops.row.cross_entropy import cross_entropy
    from cutex.ops.row.histogram import histogram
    from cutex.ops.row.linear_cross_entropy import linear_cross_entropy
    from cutex.ops.row.map import map
    from cutex.ops.row.norms import layer_norm, rms_norm
    from cutex.ops.row.reduce import reduce
    from cutex.ops.row.rope import rope
    from cutex.ops.row.scan import scan
    from cutex.ops.row.softmax import softmax
    from cutex.ops.scaled_mm import scaled_mm
    from cutex.ops.tune import tune
    from cutex.ops.w4.pack import pack_w4
    from cutex.sim import simulate

__version__ = "0.1.0"

if sys.version_info < (3, 11):  # noqa: UP036  pip refuses it, a mounted tree does not
    _SAYS = f"cutex needs Python 3.11 or newer, this is {sys.version.split()[0]}"
    if sys.argv[:1] == ["-m"]:
        print(f"cutex: {_SAYS}", file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(_SAYS)

if sys.argv[:1] == ["-m"]:  # Ctrl-C while a command is imported, which takes seconds

    def _interrupted(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print("cutex: interrupted", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = _interrupted

_HOMES = {
    "cross_entropy": "cutex.ops.row",
    "dequantize": "cutex.ops.quantize",
    "flash_attn_func": "cutex.ops.attention",
    "flash_attn_kvpacked_func": "cutex.ops.attention",
    "flash_attn_qkvpacked_func": "cutex.ops.attention",
    "flash_attn_varlen_func": "cutex.ops.attention",
    "flash_attn_varlen_kvpacked_func": "cutex.ops.attention",
    "flash_attn_varlen_qkvpacked_func": "cutex.ops.attention",
    "flash_attn_with_kvcache": "cutex.ops.attention",
    "flash_mla_with_kvcache": "cutex.ops.attention",
    "get_mla_metadata": "cutex.ops.attention",
    "grouped_mm": "cutex.ops.grouped",
    "fp8_linear": "cutex.ops.fp8_linear",
    "histogram": "cutex.ops.row",
    "kernels_built": "cutex.ops.matmul",
    "layer_norm": "cutex.ops.row",
    "linear_cross_entropy": "cutex.ops.row",
    "map": "cutex.ops.row",
    "matmul": "cutex.ops.matmul",
    "moe": "cutex.ops.mixture",
    "pack_w4": "cutex.ops.w4.pack",
    "quantize": "cutex.ops.quantize",
    "reduce": "cutex.ops.row",
    "rms_norm": "cutex.ops.row",
    "rope": "cutex.ops.row",
    "scaled_grouped_mm": "cutex.ops.grouped",
    "scaled_mm": "cutex.ops.scaled_mm",
    "scan": "cutex.ops.row",
    "simulate": "cutex.sim",
    "softmax": "cutex.ops.row",
    "tune": "cutex.ops.tune",
    "tuning": "cutex.ops.matmul",
    "warm_up": "cutex.ops.matmul",
}

_MODULES = ("attention", "ops")  # cutex.attention.activate, cutex.ops.simulated

__all__ = [
    "__version__",
    "cross_entropy",
    "dequantize",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flash_mla_with_kvcache",
    "fp8_linear",
    "get_mla_metadata",
    "grouped_mm",
    "histogram",
    "kernels_built",
    "layer_norm",
    "linear_cross_entropy",
    "map",
    "matmul",
    "moe",
    "pack_w4",
    "quantize",
    "reduce",
    "rms_norm",
    "rope",
    "scaled_grouped_mm",
    "scaled_mm",
    "scan",
    "simulate",
    "softmax",
    "tune",
    "tuning",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"cutex.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'cutex' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})


class _Package(ModuleType):
    """The package, of which importing the module of a command, cutex/softmax.py, does not make the
    module an attribute where a function has that name: `cutex.softmax` stays the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

"""Where nvdisasm is."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from cutex.errors import NoDisassembler


def nvdisasm() -> Path:
    """NoDisassembler where there is none."""
    for folder in sys.path:
        for name in ("cu*/bin/nvdisasm", "cuda_nvdisasm/bin/nvdisasm"):
            for found in sorted(Path(folder or ".").glob(f"nvidia/{name}")):
                return found
    if in_path := shutil.which("nvdisasm"):
        return Path(in_path)
    raise NoDisassembler("nvdisasm is not here, pip install nvidia-cuda-nvdisasm brings it")

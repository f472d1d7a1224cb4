"""cutex on a rented GPU: its commands, run by Modal.

modal run modal_app.py --op gemm --stage all --mnk 8192,8192,4096 --gpu B200 --compare cublas,quack
modal run modal_app.py --op script mine.py --gpu B200 -- its own arguments
modal run modal_app.py --op tests --gpu B200
modal run modal_app.py --op sweep --gpu B200,H200,H100! --compare cublas
modal run modal_app.py --op layers --gpu H200,B200 --compare cublas,quack
modal run modal_app.py --op confirm --gpu B200

python modal_app.py takes the same options, needs no token for --help, --dry-run (the plan and its
price) and --preflight-only (compiled and simulated as well), and starts nothing on Modal, not even
an image, before the preflight has passed. modal run builds the image and
uploads the code before it calls cutex, and so before the preflight; a GPU is rented after it.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

from cutex.cloud import calls, prices, remote, rental, server
from cutex.command import refuse

try:
    import modal
except ModuleNotFoundError:
    raise SystemExit(
        refuse("modal is not installed; pip install -e '.[cu13,modal]' in this clone installs it")
    ) from None

HERE = Path(__file__).resolve().parent
CACHES = ["**/__pycache__", "**/*.pyc"]  # all other files travel, C sources too
THERE = "/root"  # the folder in which Modal puts Python sources
WHEELS = (  # as in constraints.txt; the DSL needs no CUDA toolkit
    "torch==2.13.0",
    "nvidia-cutlass-dsl[cu13]==4.8.1",
    "apache-tvm-ffi==0.1.15.post2",
    "nvidia-cuda-nvdisasm==13.5.37",
    "numpy==2.4.6",
    "ml-dtypes==0.6.0",
    "filelock==4.2.11",
    "rich==15.0.0",
    "threadpoolctl==3.8.0",
    "quack-kernels==0.6.5",
    "flash-attn-4==4.0.0b36",
    "pytest==9.2.0",
    "pytest-timeout==2.4.0",
    "hypothesis==6.170.15",
)

PYTHON = "3.12"  # the image's version; the tests take it too, where it is installed

image = (
    modal.Image.debian_slim(python_version=PYTHON)
    .apt_install("gcc", "libc6-dev")  # the simulator's shim, which the tests use
    .uv_pip_install(*WHEELS)
    .env({"CUTEX_CACHE": "/tmp/cutex"})
    .add_local_python_source("cutex", "cutex.kernels", "cutex.schedulers", ignore=CACHES)
    .add_local_dir(HERE / "tests", f"{THERE}/tests", ignore=["**/__pycache__", "**/.*"])
    .add_local_file(HERE / "pyproject.toml", f"{THERE}/pyproject.toml")
)
app = modal.App("cutex", image=image)
kernels = modal.Volume.from_name("cutex-kernels", create_if_missing=True)


@app.function(
    gpu="B200",
    cpu=prices.CORES,
    memory=prices.GIB * 1024,
    timeout=600,
    startup_timeout=calls.STARTUP_LIMIT,
    retries=0,
    max_containers=1,
    scaledown_window=2,
    volumes={remote.VOLUME: kernels},
)
def run(request: dict) -> dict:
    return remote.execute(request)


async def rent(gpu: str, requests: list[dict], timeout: int) -> AsyncIterator[rental.Reply]:
    """Yield one reply or exception per request, as they arrive."""
    replies = run.with_options(gpu=gpu, timeout=timeout).starmap.aio(
        [(request,) for request in requests], order_outputs=False, return_exceptions=True
    )
    async for reply in replies:
        yield reply


@app.local_entrypoint()
def main(*argv: str) -> None:
    raise SystemExit(rental.main(rental.as_typed(argv, sys.argv), rent))


def connect() -> None:
    """End with one sentence, at once, where Modal's server cannot be connected to."""
    of = modal.config.config
    if why := server.why_silent(of["server_url"], proxies=not of.get("disable_api_proxy")):
        raise SystemExit(refuse(why))


@contextmanager
def running() -> Iterator[None]:
    connect()
    try:
        with modal.enable_output(), app.run():
            yield
    except modal.exception.AuthError as error:  # says how to get a token
        raise SystemExit(f"cutex: {error}") from None
    except modal.exception.Error as error:
        raise SystemExit(refuse(f"Modal: {error}")) from None


def is_modal_run(argv: list[str]) -> bool:
    """Whether `argv` is a command line of `modal run` that needs the server."""
    program = Path(argv[0])
    return "modal" in (program.name, program.parent.name) and "run" in argv and "--help" not in argv


if __name__ == "__main__":
    raise SystemExit(rental.main(sys.argv[1:], rent, running))
if is_modal_run(sys.argv):
    connect()

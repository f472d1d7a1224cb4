"""A stand-in for Modal, in the tests of renting."""

from __future__ import annotations

from cutex.results import Result, Timing


class Cloud:
    """Replies to every request with one right result per stage; records the requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict, int]] = []
        self.times = 1  # how often each reply is delivered
        self.error: BaseException | None = None

    async def rent(self, gpu: str, requests: list[dict], timeout: int):
        for request in requests:
            self.asked.append((gpu, request, timeout))
            if self.error is not None:
                yield self.error
                continue
            rows = [self.row(request, number).to_json() for number in request["stages"]]
            reply = {"index": request["index"], "results": rows, "notices": [], "seconds": 36.0}
            for _ in range(self.times):
                yield {**reply, "code": 0}

    def row(self, request: dict, stage: int) -> Result:
        return Result(
            op=request["op"],
            stage=stage,
            title="",
            arch=request["arch"],
            device="cuda",
            device_name=f"NVIDIA {request['gpu']}",
            problem=request["problem"],
            config={},
            ok=True,
            max_error=0.0,
            tolerance=1.0,
            message="",
            run=request["run"],
            environment={"commit": request["commit"]},
            timing=Timing(100.0, 99.0, 101.0, 50, 8, "cold", 3.0),
            tflops=1.0,
            gbs=1.0,
            percent_of_peak=1.0,
            id=request["options"]["id"],
            expect=request["options"]["expect"],
        )

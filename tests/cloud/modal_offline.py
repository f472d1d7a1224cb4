"""As much of Modal's control plane as `modal run` needs, on a port of this machine.

Functions run in this process, in threads. The client's requests are kept in `seen`; attributes turn
on a cloud's failures (a preemption, a late answer). It is for the stock client of modal 1.6, and
speaks the protocol of that minor version, which is private to the package.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpclib.server
from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from modal._serialization import deserialize_data_format, serialize_data_format
from modal_proto import api_grpc
from modal_proto import api_pb2 as pb

PICKLE = pb.DATA_FORMAT_PICKLE
SUCCESS = pb.GenericResult.GENERIC_STATUS_SUCCESS
FAILURE = pb.GenericResult.GENERIC_STATUS_FAILURE
TOKEN = "e30.eyJleHAiOjk5OTk5OTk5OTl9.x"  # a JWT that expires in the year 2286
BUILDER = pb.ImageMetadata(image_builder_version="2025.06")

# Requests with a constant answer.
ANSWERS: dict[str, Callable[[], Any]] = {
    "ClientHello": pb.ClientHelloResponse,
    "AuthTokenGet": lambda: pb.AuthTokenGetResponse(token=TOKEN),
    "EnvironmentGetOrCreate": lambda: pb.EnvironmentGetOrCreateResponse(
        environment_id="en-1",
        metadata=pb.EnvironmentMetadata(
            name="main", settings=pb.EnvironmentSettings(image_builder_version="2025.06")
        ),
    ),
    "AppCreate": lambda: pb.AppCreateResponse(app_id="ap-1", app_page_url="http://offline/ap-1"),
    "AppPublish": lambda: pb.AppPublishResponse(url="http://offline/ap-1"),
    "AppHeartbeat": Empty,
    "AppClientDisconnect": Empty,
    "ImageGetOrCreate": lambda: pb.ImageGetOrCreateResponse(
        image_id="im-1", metadata=BUILDER, result=pb.GenericResult(status=SUCCESS)
    ),
    "MountGetOrCreate": lambda: pb.MountGetOrCreateResponse(
        mount_id="mo-1", handle_metadata=pb.MountHandleMetadata(content_checksum_sha256_hex="0")
    ),
    "MountBatchedCheckExistence": pb.MountBatchedCheckExistenceResponse,
    "MountPutFile": lambda: pb.MountPutFileResponse(exists=True),
    "VolumeGetOrCreate": lambda: pb.VolumeGetOrCreateResponse(
        volume_id="vo-1", version=2, metadata=pb.VolumeMetadata(name="cutex-kernels", version=2)
    ),
}


@dataclass
class Call:
    """One function call: its pending inputs, and those with a result."""

    function: str
    waiting: deque[pb.FunctionPutInputsItem] = field(default_factory=deque)
    entries: int = 0


class ControlPlane(api_grpc.ModalClientBase):
    """The server, with `functions` by name: one server and thread for any number of clients in
    turn."""

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        self.functions = functions
        self.seen: list[tuple[str, Any]] = []  # (RPC, request)
        self.preempt = 0  # how many inputs are to be run, lost, and run again
        self.runs: list[tuple[str, Any]] = []  # (GPU, arguments) of every time a function ran
        self.calls: dict[str, Call] = {}
        self.gpus: dict[str, str] = {}  # by function id
        self.port = 0

    def asked(self, rpc: str) -> list[Any]:
        return [request for name, request in self.seen if name == rpc]

    # ---- serving

    def __enter__(self) -> ControlPlane:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self.loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        async def stop() -> None:
            self.server.close()

        asyncio.run_coroutine_threadsafe(stop(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

    async def _start(self) -> None:
        self.server = grpclib.server.Server([self])
        await self.server.start("127.0.0.1", 0)
        self.port = self.server._server.sockets[0].getsockname()[1]

    # ---- functions

    async def FunctionPrecreate(self, stream: Any) -> None:
        r = await self._receive("FunctionPrecreate", stream)
        handle = self._handle(r.function_name, r.function_schema)
        made = pb.FunctionPrecreateResponse(
            function_id=f"fu-{r.function_name}", handle_metadata=handle
        )
        await stream.send_message(made)

    async def FunctionCreate(self, stream: Any) -> None:
        r = await self._receive("FunctionCreate", stream)
        f = r.function
        self.gpus[r.existing_function_id] = f.resources.gpu_config.gpu_type
        ranked = pb.FunctionData.RankedFunction(rank=0, function=f)
        await stream.send_message(
            pb.FunctionCreateResponse(
                function_id=r.existing_function_id,
                function=f,
                function_data=pb.FunctionData(ranked_functions=[ranked]),
                handle_metadata=self._handle(f.function_name, f.function_schema),
            )
        )

    async def FunctionBindParams(self, stream: Any) -> None:
        """Handle with_options: the same function, on another GPU."""
        r = await self._receive("FunctionBindParams", stream)
        gpu = r.function_options.resources.gpu_config.gpu_type
        bound = f"{r.function_id}@{gpu}"
        self.gpus[bound] = gpu
        name = r.function_id.removeprefix("fu-")
        await stream.send_message(
            pb.FunctionBindParamsResponse(
                bound_function_id=bound, handle_metadata=self._handle(name)
            )
        )

    def _handle(self, name: str, schema: Any = None) -> pb.FunctionHandleMetadata:
        return pb.FunctionHandleMetadata(
            function_name=name,
            function_type=pb.Function.FUNCTION_TYPE_FUNCTION,
            function_schema=schema,
            supported_input_formats=[PICKLE],
            supported_output_formats=[PICKLE],
        )

    # ---- calls

    async def FunctionMap(self, stream: Any) -> None:
        r = await self._receive("FunctionMap", stream)
        name = f"fc-{len(self.calls)}"
        self.calls[name] = Call(r.function_id)
        await stream.send_message(
            pb.FunctionMapResponse(
                function_call_id=name,
                function_call_jwt="jwt",
                max_inputs_outstanding=1000,
                pipelined_inputs=self._put(name, r.pipelined_inputs),
            )
        )

    async def FunctionPutInputs(self, stream: Any) -> None:
        r = await self._receive("FunctionPutInputs", stream)
        put = self._put(r.function_call_id, r.inputs)
        await stream.send_message(pb.FunctionPutInputsResponse(inputs=put))

    def _put(self, call: str, items: Any) -> list[pb.FunctionPutInputsResponseItem]:
        self.calls[call].waiting.extend(items)
        return [
            pb.FunctionPutInputsResponseItem(
                idx=item.idx, input_id=f"in-{call}-{item.idx}", input_jwt="jwt"
            )
            for item in items
        ]

    async def FunctionGetOutputs(self, stream: Any) -> None:
        r = await self._receive("FunctionGetOutputs", stream)
        call = self.calls[r.function_call_id]
        until = self.loop.time() + (r.timeout or 0.1)
        while not call.waiting and self.loop.time() < until:
            await asyncio.sleep(0.02)
        outputs = []
        if call.waiting:
            item = call.waiting.popleft()
            if self.preempt:
                self.preempt -= 1
                await asyncio.to_thread(self._run, call.function, item)
            result = await asyncio.to_thread(self._run, call.function, item)
            input_id = f"in-{r.function_call_id}-{item.idx}"
            call.entries += 1
            outputs = [
                pb.FunctionGetOutputsItem(
                    idx=item.idx, input_id=input_id, data_format=PICKLE, result=result
                )
            ]
        await stream.send_message(
            pb.FunctionGetOutputsResponse(
                last_entry_id=f"{call.entries}-0",
                outputs=outputs,
                num_unfinished_inputs=len(call.waiting),
            )
        )

    def _run(self, function: str, item: pb.FunctionPutInputsItem) -> pb.GenericResult:
        args, kwargs = deserialize_data_format(item.input.args, PICKLE, None)
        gpu = self.gpus[function]
        self.runs.append((gpu, args))
        name = function.removeprefix("fu-").partition("@")[0]
        try:
            value = self.functions[name](*args, **kwargs)
        except Exception as error:
            told = traceback.format_exc()
            return pb.GenericResult(
                status=FAILURE, data=pickle.dumps(error), exception=repr(error), traceback=told
            )
        return pb.GenericResult(status=SUCCESS, data=serialize_data_format(value, PICKLE))

    # ---- the rest

    async def AppGetLogs(self, stream: Any) -> None:
        await self._receive("AppGetLogs", stream)
        await stream.send_message(pb.TaskLogsBatch(app_done=True))

    async def _receive(self, rpc: str, stream: Any) -> Any:
        request = await stream.recv_message()
        self.seen.append((rpc, request))
        return request


def _answer(rpc: str) -> Callable[[ControlPlane, Any], Any]:
    async def serve(self: ControlPlane, stream: Any) -> None:
        await self._receive(rpc, stream)
        if rpc not in ANSWERS:
            raise GRPCError(Status.UNIMPLEMENTED, f"{rpc} is not in the offline control plane")
        await stream.send_message(ANSWERS[rpc]())

    return serve


for _rpc in ControlPlane.__abstractmethods__:
    setattr(ControlPlane, _rpc, _answer(_rpc))
ControlPlane.__abstractmethods__ = frozenset()

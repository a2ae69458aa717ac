# SPDX-License-Identifier: Apache-2.0
"""A stand-in for NVIDIA's device plugin: as much of it as a kubelet needs, and no more.

Answers by environment. In a test's process, or as the program of a pod:
`python3 -c TEXT_OF_THIS_FILE FOLDER ID...`
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from allotment.agent.kubelet.proto import deviceplugin_pb2 as messages
from allotment.agent.kubelet.services import (
    ALLOCATE,
    CHANNEL_OPTIONS,
    LIST_AND_WATCH,
    OPTIONS,
    REGISTER,
    handlers,
)

RESOURCE = "nvidia.com/gpu"
SOCKET = "nvidia-gpu.sock"


class OthersPlugin:
    """Offers ids as `nvidia.com/gpu`, from `start` to `stop`."""

    def __init__(self, folder: Path, ids: list[str]) -> None:
        self._folder = folder
        self._ids = ids
        self._ended = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(4))
        answered: dict[Any, Any] = {
            OPTIONS: lambda _, __: messages.DevicePluginOptions(),
            LIST_AND_WATCH: self._list,
            ALLOCATE: self._allocate,
        }
        self._server.add_generic_rpc_handlers(handlers(answered))
        self._server.add_insecure_port(f"unix://{folder / SOCKET}")

    def start(self) -> None:
        self._server.start()
        target = f"unix://{self._folder / 'kubelet.sock'}"
        with grpc.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
            request = messages.RegisterRequest(
                version="v1beta1", endpoint=SOCKET, resource_name=RESOURCE
            )
            REGISTER.on(channel)(request, timeout=60)

    def stop(self) -> None:
        self._ended.set()
        self._server.stop(1).wait()
        (self._folder / SOCKET).unlink(missing_ok=True)

    def _list(self, _: Any, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: ANN401
        devices = [messages.Device(ID=each, health="Healthy") for each in self._ids]
        yield messages.ListAndWatchResponse(devices=devices)
        while context.is_active() and not self._ended.wait(0.2):
            pass

    @staticmethod
    def _allocate(request: messages.AllocateRequest, _: grpc.ServicerContext) -> Any:  # noqa: ANN401
        answers = [
            messages.ContainerAllocateResponse(
                envs={"NVIDIA_VISIBLE_DEVICES": ",".join(sorted(each.devices_ids))}
            )
            for each in request.container_requests
        ]
        return messages.AllocateResponse(container_responses=answers)


def main() -> None:
    """The program of a pod: until SIGTERM."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    folder, *ids = sys.argv[1:]
    plugin = OthersPlugin(Path(folder), ids)
    plugin.start()
    ended.wait()
    plugin.stop()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The PodResources service, asked of a twin of the kubelet."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import podresources_pb2 as messages
import pytest
from podresources import GET_POD, LIST_ALLOCATABLE, LIST_PODS, Held, PodResources

from allotment.agent.kubelet.services import handlers
from allotment.model.errors import NotFoundError, StateError


def pod() -> messages.PodResources:
    made = messages.PodResources(name="train", namespace="team")
    container = made.containers.add(name="main")
    container.devices.add(resource_name="nvidia.com/gpu", device_ids=["GPU-0"])
    container.devices.add(resource_name="nvidia.com/gpu", device_ids=["GPU-1"])
    made.containers.add(name="side")
    return made


def answer_list(
    _request: messages.ListPodResourcesRequest, _context: grpc.ServicerContext
) -> messages.ListPodResourcesResponse:
    return messages.ListPodResourcesResponse(pod_resources=[pod()])


def answer_get(
    request: messages.GetPodResourcesRequest, context: grpc.ServicerContext
) -> messages.GetPodResourcesResponse:
    if request.pod_name != "train":
        name = request.pod_name
        context.abort(grpc.StatusCode.UNKNOWN, f"pod {name} in namespace team not found")
    return messages.GetPodResourcesResponse(pod_resources=pod())


def answer_allocatable(
    _request: messages.AllocatableResourcesRequest, _context: grpc.ServicerContext
) -> messages.AllocatableResourcesResponse:
    return messages.AllocatableResourcesResponse(devices=pod().containers[0].devices)


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "kubelet.sock"
    server = grpc.server(futures.ThreadPoolExecutor(2))
    answers: dict[Any, Any] = {
        LIST_PODS: answer_list,
        GET_POD: answer_get,
        LIST_ALLOCATABLE: answer_allocatable,
    }
    server.add_generic_rpc_handlers(handlers(answers))
    server.add_insecure_port(f"unix:{path}")
    server.start()
    yield path
    server.stop(None).wait()


MAIN = Held(
    namespace="team",
    pod="train",
    container="main",
    ids={"nvidia.com/gpu": frozenset({"GPU-0", "GPU-1"})},
)
SIDE = Held(namespace="team", pod="train", container="side")


def test_what_is_listed_in_parts_is_one(socket: Path) -> None:
    with PodResources(socket) as kubelet:
        assert kubelet.list() == (MAIN, SIDE)
        assert kubelet.get("team", "train") == (MAIN, SIDE)
        assert kubelet.allocatable() == {"nvidia.com/gpu": 2}


def test_a_pod_that_is_not_there_is_not_found(socket: Path) -> None:
    with PodResources(socket) as kubelet, pytest.raises(NotFoundError, match="pod gone"):
        kubelet.get("team", "gone")


def test_it_is_used_while_it_is_entered(socket: Path) -> None:
    with pytest.raises(StateError, match="before it was entered"):
        PodResources(socket).list()

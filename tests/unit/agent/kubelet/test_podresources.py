# SPDX-License-Identifier: Apache-2.0
"""The PodResources service, asked of a twin of the kubelet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from podresources import GET_POD, LIST_ALLOCATABLE, PodResources

from allotment.agent.kubelet import podresources
from allotment.agent.kubelet.podresources import LIST_PODS, Held, HeldClaim
from allotment.agent.kubelet.proto import podresources_pb2 as messages
from allotment.agent.kubelet.services import handlers
from allotment.model.errors import NotFoundError, StateError


def pod() -> messages.PodResources:
    made = messages.PodResources(name="train", namespace="team")
    container = made.containers.add(name="main")
    container.devices.add(resource_name="nvidia.com/gpu", device_ids=["GPU-0"])
    container.devices.add(resource_name="nvidia.com/gpu", device_ids=["GPU-1"])
    side = made.containers.add(name="side")
    claim = side.dynamic_resources.add(claim_name="big", claim_namespace="team")
    claim.claim_resources.add(
        driver_name="gpu.nvidia.com", pool_name="n1", device_name="gpu-0", share_id="7"
    )
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
SIDE = Held(
    namespace="team",
    pod="train",
    container="side",
    claims=(HeldClaim(namespace="team", claim="big", driver="gpu.nvidia.com", device="gpu-0"),),
)


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


def test_without_a_socket_it_says_what_to_mount_at_once(tmp_path: Path) -> None:
    with PodResources(tmp_path / "none.sock") as kubelet:
        began = time.monotonic()
        with pytest.raises(StateError, match="does not answer") as caught:
            kubelet.list()
        assert time.monotonic() - began < 4
    assert "pod-resources" in (caught.value.hint or "")


def test_an_older_kubelet_and_one_that_hangs_do_not_answer(tmp_path: Path) -> None:
    path, over = tmp_path / "kubelet.sock", threading.Event()
    server = grpc.server(futures.ThreadPoolExecutor(1))

    def hang(_request: object, _context: grpc.ServicerContext) -> messages.ListPodResourcesResponse:
        over.wait(60)
        return messages.ListPodResourcesResponse()

    server.add_generic_rpc_handlers(handlers({LIST_PODS: hang}))
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        hasty = podresources.PodResources(path, patience_s=0.1)
        with hasty as kubelet, pytest.raises(StateError, match="Deadline"):
            kubelet.list()
        with PodResources(path) as kubelet, pytest.raises(StateError, match="not found"):
            kubelet.allocatable()  # a call that it does not have
    finally:
        over.set()
        server.stop(None).wait()

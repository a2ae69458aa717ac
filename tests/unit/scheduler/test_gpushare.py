# SPDX-License-Identifier: Apache-2.0
"""gpushare's tables, byte for byte as its user guide shows them."""

from __future__ import annotations

import pytest
from needs import request
from small_nodes import REGULAR, device, node, pod

from allotment.kube.live import LiveCluster, LivePod
from allotment.model.clusters import PlacedContainer, PlacedDevice, PodBooking
from allotment.model.structs import replace
from allotment.scheduler.gpushare import details, fitting_unit, summary
from allotment.scheduler.holdings import NodeHoldings, cluster_holdings

GI = 1 << 30
NAMES = ("cn-shanghai.i-uf61h64dz1tmlob9hmtb", "cn-shanghai.i-uf61h64dz1tmlob9hmtc")
ADDRESSES = dict(zip(NAMES, ("192.168.0.71", "192.168.0.70"), strict=True))


def nodes(*, size: int = 3 * GI) -> tuple[NodeHoldings, ...]:
    """Two nodes with a GPU of 15 GiB, and three pods with 3 GiB."""
    gpus = {name: replace(device(0, 15 * GI), uuid=f"GPU-{name}") for name in NAMES}
    pods = []
    for number, name in enumerate((NAMES[0], NAMES[0], NAMES[1])):
        need = pod((REGULAR, request(size)), uid=f"binpack-1-{number}")
        parts = (PlacedDevice(gpus[name].uuid, size),)
        booking = PodBooking(
            uid=need.uid, node=name, containers=(PlacedContainer(name="c0", devices=parts),)
        )
        pods.append(LivePod(need=need, booking=booking))
    inventories = tuple(replace(node(gpus[name]), name=name) for name in NAMES)
    return cluster_holdings(LiveCluster(inventories, tuple(pods), addresses=ADDRESSES)).nodes


def test_the_table_is_that_of_its_user_guide() -> None:
    assert summary(nodes(), unit="GiB") == (
        "NAME                                IPADDRESS     GPU0(Allocated/Total)  GPU Memory(GiB)\n"
        "cn-shanghai.i-uf61h64dz1tmlob9hmtb  192.168.0.71  6/15                   6/15\n"
        "cn-shanghai.i-uf61h64dz1tmlob9hmtc  192.168.0.70  3/15                   3/15\n"
        "------------------------------------------------------------------------------\n"
        "Allocated/Total GPU Memory In Cluster:\n"
        "9/30 (30%)  \n"
    )


def test_details_align_as_gos_tabwriter_does() -> None:
    assert details(nodes()[:1], unit="GiB") == (
        "\n"
        "NAME:       cn-shanghai.i-uf61h64dz1tmlob9hmtb\n"
        "IPADDRESS:  192.168.0.71\n"
        "\n"
        "NAME         NAMESPACE  GPU0(Allocated)  \n"
        "binpack-1-0  lab        3                \n"
        "binpack-1-1  lab        3                \n"
        "Allocated :  6 (40%)    \n"
        "Total :      15         \n"
        "------------------------------------------------\n"
        "\n"
        "\n"
        "Allocated/Total GPU Memory In Cluster:  6/15 (40%)  \n"
    )


@pytest.mark.parametrize(("size", "unit"), [(3 * GI, "GiB"), (GI + 1, "MiB")])
def test_no_amount_is_a_fraction(size: int, unit: str) -> None:
    assert fitting_unit(nodes(size=size)) == unit


def test_an_empty_cluster_has_a_table_too() -> None:
    assert summary((), unit="GiB").endswith("0/0 (0%)  \n")
    assert details((), unit="GiB").endswith("0/0 (0%)  \n")

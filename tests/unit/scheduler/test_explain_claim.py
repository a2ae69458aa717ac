# SPDX-License-Identifier: Apache-2.0
"""`allot explain claim`: by the devices that an agent publishes, what fits and what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from gpus import gpu
from mig_profiles import profiles

from allotment.agent.dra.devices import GpuState, pool_of
from allotment.agent.mig.state import CutGpu
from allotment.kube.resource_claims import ClaimObject
from allotment.model.clusters import TakenPart
from allotment.model.structs import replace
from allotment.scheduler.explain_claim import (
    ClaimEvidence,
    ClaimExplanation,
    ClassObject,
    SliceObject,
    explained_claim,
    is_selected,
)

GIB = 1 << 30
DRIVER = "gpu.allotment.dev"
NAME = "gpu-4a0ae330"
MANIFEST = Path(__file__).parents[3] / "deploy" / "manifests" / "device-classes.yaml"
CLASSES = {
    each["metadata"]["name"]: msgspec.convert(each, ClassObject)
    for each in yaml.safe_load_all(MANIFEST.read_text("utf-8"))
}


def slices(node: str, **fields: Any) -> list[SliceObject]:  # noqa: ANN401
    device = replace(gpu(0), uuid="GPU-4a0ae330-00aa")
    cut = CutGpu(profiles=tuple(profiles("A100-80GB")), is_enabled=False)
    pool = pool_of([GpuState(device=device, cut=cut, **fields)], None)
    generation = {"name": node, "generation": 2, "resourceSliceCount": len(pool.slices)}
    return [
        msgspec.convert(
            {"metadata": {}, "spec": {"driver": DRIVER, "pool": generation, **content}}, SliceObject
        )
        for content in pool.slices
    ]


def claim(*requests: dict[str, Any], name: str = "mine", **status: Any) -> ClaimObject:  # noqa: ANN401
    metadata = {"namespace": "ml", "name": name, "uid": f"uid-{name}"}
    return msgspec.convert(
        {
            "metadata": metadata,
            "spec": {"devices": {"requests": list(requests)}},
            "status": status,
        },
        ClaimObject,
    )


def share(name: str = "gpu", **capacity: str) -> dict[str, Any]:
    return wanted("share.allotment.dev", name, capacity={"requests": capacity})


def wanted(kind: str, name: str = "gpu", **fields: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"name": name, "exactly": {"deviceClassName": kind, **fields}}


def held(node: str, device: str = NAME, **consumed: str) -> ClaimObject:
    """Another claim, which has a device."""
    result = {"request": "gpu", "driver": DRIVER, "pool": node, "device": device}
    results = [{**result, "consumedCapacity": consumed}]
    return claim(name="held", allocation={"devices": {"results": results}})


def explained(
    asked: ClaimObject, *others: ClaimObject, nodes: list[SliceObject] | None = None
) -> ClaimExplanation:
    return explained_claim(
        ClaimEvidence(
            claim=asked,
            claims=[asked, *others],
            slices=[*slices("a"), *slices("b")] if nodes is None else nodes,
            classes=CLASSES,
        )
    )


def refusals(found: ClaimExplanation) -> dict[str, tuple[str, ...]]:
    return {each.text: each.nodes for one in found.requests for each in one.refused}


def test_a_claim_fits_where_other_claims_leave_enough() -> None:
    found = explained(claim(share(memory="40Gi")), held("a", memory="60Gi", compute="5"))
    assert (found.state, found.fitting, found.nodes) == ("pending", ("b",), 2)
    text = "need 40Gi of memory on a device, have at most 20Gi"
    assert refusals(found) == {text: ("a",)}
    assert found.requests[0].not_evaluated == ()


def test_of_nodes_without_room_the_most_is_named() -> None:
    others = (held("a", memory="60Gi", compute="90"), held("b", memory="70Gi", compute="5"))
    found = explained(claim(share(memory="40Gi")), *others)
    assert found.fitting == ()
    text = "need 40Gi of memory on a device, have at most 20Gi"
    assert refusals(found) == {text: ("a", "b")}
    found = explained(claim(share(memory="1Gi", compute="20")), *others)
    assert found.fitting == ("b",)
    text = "need 20 % of compute on a device, have at most 10 %"
    assert refusals(found) == {text: ("a",)}


def test_each_claim_takes_a_seat_of_its_gpu() -> None:
    taken = TakenPart(GIB, 0, 61, "soft")
    others = [held("a", memory="1Mi", compute="0", seats="1")] * 2
    nodes = slices("a", taken=taken, mode="soft")
    assert explained(claim(share(memory="1Mi")), others[0], nodes=nodes).fitting == ("a",)
    found = explained(claim(share(memory="1Mi")), *others, nodes=nodes)
    assert refusals(found) == {"devices that serve no more shares at a time": ("a",)}


def test_amounts_are_rounded_as_kube_scheduler_does() -> None:
    found = explained(claim(share(memory="0")), held("a", memory="80Gi"))
    text = "need 1Mi of memory on a device, have at most 0B"
    assert (found.fitting, refusals(found)) == (("b",), {text: ("a",)})
    found = explained(claim(share(seats="2")))
    assert refusals(found) == {"devices that serve no more shares at a time": ("a", "b")}


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        ("gpu.allotment.dev", NAME),
        ("gpu.allotment.dev", f"{NAME}-mig-1g-10gb-0"),
        ("share.allotment.dev", f"{NAME}-whole"),
    ],
)
def test_a_gpu_is_given_in_one_way(kind: str, device: str) -> None:
    found = explained(claim(wanted(kind)), held("a", device))
    assert found.fitting == ("b",)
    assert refusals(found) == {"devices of GPUs that claims have in another way": ("a",)}


def test_a_slice_fits_beside_another_one() -> None:
    profile = {"cel": {"expression": f"device.attributes['{DRIVER}'].profile == '3g.40gb'"}}
    asked = claim(wanted("mig.allotment.dev", selectors=[profile]))
    assert explained(asked, held("a", f"{NAME}-mig-3g-40gb-0")).fitting == ("a", "b")
    seven = held("a", f"{NAME}-mig-7g-80gb-0")
    assert explained(asked, seven).fitting == ("b",)


def test_taints_are_named_and_tolerated() -> None:
    nodes = slices("a", problem="XID 79")
    found = explained(claim(share()), nodes=nodes)
    assert refusals(found) == {"devices with the taint allotment.dev/unusable=XID-79": ("a",)}
    tolerant = wanted("share.allotment.dev", tolerations=[{"operator": "Exists"}])
    assert explained(claim(tolerant), nodes=nodes).fitting == ("a",)
    taken = slices("a", taken=TakenPart(GIB, 0, 1, "soft"))
    found = explained(claim(wanted("gpu.allotment.dev")), nodes=taken)
    assert refusals(found) == {"devices with the taint allotment.dev/taken=soft": ("a",)}


def test_all_requests_have_to_fit_and_one_alternative_each() -> None:
    other = held("a", memory="70Gi", compute="5")
    small, large = share("small", memory="4Gi"), share("large", memory="60Gi")
    assert explained(claim(small, large), other).fitting == ("b",)
    kinds = [{"name": each["name"], **each["exactly"]} for each in (large, small)]
    either = claim({"name": "gpu", "firstAvailable": kinds})
    found = explained(either, other)
    assert found.fitting == ("a", "b")
    assert [each.name for each in found.requests] == ["gpu/large", "gpu/small"]


def test_what_cannot_be_told_is_said() -> None:
    size = f"device.capacity['{DRIVER}'].memory.isGreaterThan(quantity('70Gi'))"
    found = explained(claim(wanted("gpu.allotment.dev", selectors=[{"cel": {"expression": size}}])))
    assert found.requests[0].not_evaluated == (size,)
    assert found.fitting == ("a", "b")
    found = explained(claim(wanted("none")))
    assert found.requests[0].problem == "there is no device class none"
    assert found.fitting == ()


def test_slices_of_an_older_generation_do_not_count() -> None:
    older = [
        msgspec.structs.replace(
            each,
            spec=msgspec.structs.replace(
                each.spec, pool=msgspec.structs.replace(each.spec.pool, generation=1)
            ),
        )
        for each in slices("a")
    ]
    newer = slices("a", problem="XID 79")
    assert explained(claim(share()), nodes=[*older, *newer]).fitting == ()


def test_what_an_allocated_claim_has() -> None:
    data = {"share": "s", "mode": "soft", "enforced": True, "memory_limit_bytes": 4 * GIB}
    result = {"request": "gpu", "driver": DRIVER, "pool": "a", "device": NAME, "shareID": "x"}
    status: dict[str, Any] = {
        "allocation": {"devices": {"results": [{**result, "consumedCapacity": {"memory": "4Gi"}}]}},
        "reservedFor": [{"resource": "pods", "name": "train", "uid": "u"}],
    }
    found = explained(claim(share(memory="4Gi"), **status))
    assert (found.state, found.pods) == ("allocated", ("train",))
    (device,) = found.devices
    assert (device.node, device.uuid, device.data) == ("a", "GPU-4a0ae330-00aa", {})
    reported = {"driver": DRIVER, "pool": "a", "device": NAME, "shareID": "x", "data": data}
    found = explained(claim(share(memory="4Gi"), **status, devices=[reported]))
    assert found.state == "prepared"
    assert found.devices[0].data == data


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        (f"device.driver == '{DRIVER}'", True),
        ("device.driver == 'other'", False),
        (f'device.attributes["{DRIVER}"].type == "share"', True),
        (f"device.attributes['{DRIVER}'].type == 'gpu'", False),
        (f"device.attributes['{DRIVER}'].absent == 'x'", False),
        (f"device.attributes['{DRIVER}'].numaNode == 1", True),
        ("device.attributes['resource.kubernetes.io'].pciBusID == '0000:07:00.0'", True),
        ("device.driver == 'other' && f(device)", False),
        (f"device.driver == '{DRIVER}' && f(device)", None),
        (f"device.driver == '{DRIVER}' || true", None),
    ],
)
def test_comparisons_with_fixed_values_are_evaluated(expression: str, answer: object) -> None:
    attributes: dict[str, dict[str, Any]] = {
        "type": {"string": "share"},
        "numaNode": {"int": 1},
        "resource.kubernetes.io/pciBusID": {"string": "0000:07:00.0"},
    }
    assert is_selected(expression, attributes, DRIVER) is answer

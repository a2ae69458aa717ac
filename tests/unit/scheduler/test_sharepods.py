# SPDX-License-Identifier: Apache-2.0
"""SharePods get their pods, and show what becomes of them."""

from __future__ import annotations

import asyncio

import pytest
from served_sharepods import ASKS, PATIENT, SPEC, Served, placed

from allotment.dialects.own.placement import PLACEMENT
from allotment.kube.sharepods import MADE_FOR


def test_a_sharepod_gets_its_pod_and_shows_what_becomes_of_it(served: Served) -> None:
    labels = {"app": "x"}
    metadata = {"annotations": ASKS, "labels": labels}
    served.write(metadata=metadata)

    async def test() -> None:
        await served.until(lambda: served.status().get("PodStatus") == {"phase": "Pending"})
        (made,) = served.twin.created
        assert made["metadata"]["name"] == "sharepod1"
        assert made["metadata"]["annotations"] == ASKS
        assert made["metadata"]["labels"] == {**labels, MADE_FOR: "SharePod"}
        (owner,) = made["metadata"]["ownerReferences"]
        assert owner["uid"] == served.twin.sharepod()["metadata"]["uid"]
        assert owner["controller"] is True
        assert made["spec"] == SPEC
        pod = served.twin.pod()
        assert pod is not None
        uid = pod["metadata"]["uid"]
        annotations = {**ASKS, PLACEMENT: placed(uid, "GPU-b")}
        metadata = {**pod["metadata"], "annotations": annotations, "managedFields": [{"a": 1}]}
        status = {"phase": "Running", "hostIP": "198.18.0.2"}
        spec = {**SPEC, "nodeName": "n1"}
        served.twin.put("pods", "team", "sharepod1", metadata=metadata, spec=spec, status=status)
        await served.until(lambda: served.status().get("PodStatus") == status)
        assert served.status()["BoundDeviceID"] == "GPU-b"
        assert served.status()["PodObjectMeta"]["uid"] == uid
        assert "managedFields" not in served.status()["PodObjectMeta"]

    served.run(test)


def test_nothing_is_written_while_nothing_changes(served: Served) -> None:
    served.write()

    async def test() -> None:
        await served.until(served.status)
        written = len(served.twin.written)
        await served.settled()
        assert len(served.twin.written) == written
        assert len(served.twin.created) == 1

    served.run(test)


def test_a_placement_of_another_pod_is_neither_copied_nor_shown(served: Served) -> None:
    forged = {**ASKS, PLACEMENT: placed("another", "GPU-b")}
    served.write(metadata={"annotations": forged})

    async def test() -> None:
        await served.until(served.status)
        (made,) = served.twin.created
        assert PLACEMENT not in made["metadata"]["annotations"]
        pod = served.twin.pod()
        assert pod is not None
        metadata = {**pod["metadata"], "annotations": forged}
        served.twin.put("pods", "team", "sharepod1", metadata=metadata, status={"phase": "Running"})
        await served.until(lambda: served.status()["PodStatus"]["phase"] == "Running")
        assert served.status()["BoundDeviceID"] == ""

    served.run(test)


def test_two_that_believe_to_lead_make_one_pod(served: Served) -> None:
    for number in range(20):
        served.write(f"s{number}")

    async def test() -> None:
        await served.until(lambda: all(served.status(f"s{each}") for each in range(20)))
        await served.settled()
        assert len(served.twin.created) == 20
        pods = [key for key in served.twin.objects if key[0] == "pods"]
        assert len(pods) == 20
        assert served.told.events == []

    served.run(test, keepers=2)


def test_another_start_finds_the_pod_that_is_there(served: Served) -> None:
    served.write()

    async def first() -> None:
        await served.until(served.status)

    async def second() -> None:
        status = {"phase": "Succeeded"}
        served.twin.put("pods", "team", "sharepod1", status=status)
        await served.until(lambda: served.status()["PodStatus"] == status)

    served.run(first)
    served.run(second)
    assert len(served.twin.created) == 1


def test_a_pod_that_kubeshare_has_made_is_shown_and_not_made_again(served: Served) -> None:
    served.write(status={"BoundDeviceID": "GPU-k", "PodManagerPort": 50051})
    uid = served.twin.sharepod()["metadata"]["uid"]
    owners = [{"kind": "SharePod", "uid": uid, "controller": True}]
    made = served.twin.put(
        "pods",
        "team",
        "sharepod1",
        metadata={"ownerReferences": owners},
        status={"phase": "Pending"},
    )
    known = {"PodObjectMeta": {"uid": made["metadata"]["uid"]}}
    served.twin.put("sharepods", "team", "sharepod1", status={**served.status(), **known})

    async def test() -> None:
        await served.until(lambda: served.status().get("PodStatus") == {"phase": "Pending"})
        await served.settled()
        served.twin.put("pods", "team", "sharepod1", status={"phase": "Running"})
        await served.until(lambda: served.status()["PodStatus"] == {"phase": "Running"})
        assert served.status()["BoundDeviceID"] == "GPU-k"
        assert served.status()["PodManagerPort"] == 50051

    served.run(test)
    assert served.twin.created == []


@pytest.mark.parametrize(
    ("policy", "phase", "made"),
    [
        ("Never", "Succeeded", 1),
        ("Never", "Failed", 1),
        ("Never", "Running", 2),
        ("OnFailure", "Succeeded", 1),
        ("OnFailure", "Failed", 2),
        ("Always", "Succeeded", 2),
        (None, "Failed", 2),
    ],
)
def test_a_pod_that_went_is_made_anew_unless_it_had_ended(
    served: Served, policy: str | None, phase: str, made: int
) -> None:
    spec = {"containers": SPEC["containers"], **({"restartPolicy": policy} if policy else {})}
    served.write(spec=spec)

    async def test() -> None:
        await served.until(served.status)
        served.twin.put("pods", "team", "sharepod1", status={"phase": phase})
        await served.until(lambda: served.status()["PodStatus"]["phase"] == phase)
        served.twin.delete("pods", "team", "sharepod1")
        await served.until(lambda: len(served.twin.created) == made)
        await served.settled()
        assert len(served.twin.created) == made
        if made == 1:
            assert served.status()["PodStatus"]["phase"] == phase
            asked = len(served.twin.requests)
            await served.settled()
            pod = "/api/v1/namespaces/team/pods/sharepod1"
            assert pod not in [path for _, path in served.twin.requests[asked:]]

    served.run(test)


def test_what_has_ended_is_not_made_anew_before_its_end_has_been_heard(served: Served) -> None:
    served.write()

    async def test() -> None:
        await served.until(served.status)
        await served.settled(rounds=1)
        served.twin.unheard = {"sharepods"}
        served.twin.put("pods", "team", "sharepod1", status={"phase": "Succeeded"})
        await served.until(lambda: served.status()["PodStatus"]["phase"] == "Succeeded")
        served.twin.delete("pods", "team", "sharepod1")
        await served.settled()
        assert len(served.twin.created) == 1

    served.run(test)


def test_what_the_webhook_refuses_is_told_and_made_when_it_is_corrected(served: Served) -> None:
    served.twin.refusal = (422, "kubeshare/gpu_limit is '2.0'")
    served.write()

    async def test() -> None:
        await served.until(served.status)
        told = served.status()["PodStatus"]
        assert (told["phase"], told["reason"]) == ("Pending", "ErrValueError")
        assert "kubeshare/gpu_limit is '2.0'" in told["message"]
        await served.until(lambda: served.told.events)
        about, reason, message = served.told.events[0]
        assert (about.kind, about.name, about.namespace) == ("SharePod", "sharepod1", "team")
        assert about.uid == served.twin.sharepod()["metadata"]["uid"]
        assert about.api_version == "kubeshare.nthu/v1"
        assert (reason, message) == ("ErrValueError", told["message"])
        written = len(served.twin.written)
        # Tried again by itself, and refused again.
        await served.until(lambda: len(served.told.events) > 1)
        await served.settled()
        assert len(served.twin.written) == written
        served.twin.refusal = None
        await served.until(lambda: served.twin.created)
        await served.until(lambda: served.status()["PodStatus"] == {"phase": "Pending"})

    served.run(test)


def test_a_correction_is_tried_at_once(served: Served) -> None:
    served.times = PATIENT
    served.twin.refusal = (403, "quota")
    served.write()

    async def test() -> None:
        await served.until(served.status)
        served.twin.refusal = None
        served.write(metadata={"annotations": {**ASKS, "kubeshare/gpu_limit": "0.5"}})
        await served.until(lambda: served.twin.created)

    served.run(test)
    (made,) = served.twin.created
    assert made["metadata"]["annotations"]["kubeshare/gpu_limit"] == "0.5"


def test_a_refusal_in_ever_other_words_is_no_reason_to_hurry(served: Served) -> None:
    served.times = PATIENT
    served.write()

    async def test() -> None:
        for number in range(50):
            served.twin.refusal = (403, f"refused, request {number}")
            await asyncio.sleep(0.01)
        await served.until(lambda: served.told.events)
        await served.settled()

    served.run(test)
    assert len(served.told.events) == 1


def test_the_pod_of_one_of_before_is_waited_for_and_no_longer(served: Served) -> None:
    served.times = PATIENT
    served.write()

    async def test() -> None:
        await served.until(served.status)
        served.twin.delete("sharepods", "team", "sharepod1", cascades=False)
        served.write()
        await served.until(lambda: served.told.events)
        served.twin.delete("pods", "team", "sharepod1")
        await served.until(lambda: len(served.twin.created) == 2)

    served.run(test)


def test_an_owner_that_does_not_control_a_pod_has_not_made_it(served: Served) -> None:
    served.write()
    owners = [{"uid": served.twin.sharepod()["metadata"]["uid"]}]
    metadata = {"ownerReferences": owners}
    served.twin.put("pods", "team", "sharepod1", metadata=metadata, status={"phase": "Running"})

    async def test() -> None:
        await served.until(served.status)
        assert served.status()["PodStatus"]["reason"] == "ErrResourceExists"

    served.run(test)

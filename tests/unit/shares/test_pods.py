# SPDX-License-Identifier: Apache-2.0
"""Shares of pods: asked for by an id, any number of times, and gone with their CDI spec."""

import json
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from killing import kill_after
from pod_node import Node, order, owner

from allotment.model.errors import BusyError, DoesNotFitError, StateError
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request, replicas_of
from allotment.model.shares import Injection, Runner, ShareId
from allotment.model.structs import replace
from allotment.shares import lifecycle, recovery
from allotment.shares.placing import ShareOrder
from allotment.shares.pods import NodePolicy
from allotment.shares.process_tree import named
from allotment.shares.record import Traces, write_traces

Sleeper = Callable[..., "subprocess.Popen[bytes]"]


def test_a_share_is_its_containers_by_name_and_its_ids_by_device(node: Node) -> None:
    share = node.prepare(order(0xAB))
    assert (share.id, share.name) == ("0000000000ab", "lab/pod-171/train")
    assert share.owner == owner(pod="pod-171")
    (path,) = node.specs()
    spec = json.loads(path.read_text())
    assert (spec["kind"], spec["devices"][0]["name"]) == ("allotment.dev/share", share.id)
    mounts = {
        each["containerPath"]: each["hostPath"]
        for each in spec["devices"][0]["containerEdits"]["mounts"]
    }
    assert all(Path(path).exists() for path in mounts.values())
    assert mounts[f"/run/allotment/share/{share.id}/policy"].endswith(f"{share.id}/policy")
    assert mounts["/usr/lib/libcuda.so.1"]
    assert Path(mounts[f"/run/allotment/simulated/devices/{share.id}"]).read_text() == (
        f"{share.devices[0].uuid}\n"
    )
    assert node.folder.root.stat().st_mode & 0o777 == 0o700
    assert lifecycle.find(node.folder, "lab/pod-171/train").id == share.id
    assert node.shares.owned() == (share,)
    node.check()


def test_doing_it_again_changes_nothing(node: Node) -> None:
    first = node.prepare(order())
    before = {path: path.stat().st_mtime_ns for path in node.folder.shares.rglob("*")}
    (spec,) = node.specs()
    stamp = spec.stat().st_mtime_ns
    assert node.prepare(order()) == first
    assert node.restarted().prepare(order(memory="8Gi"), NodePolicy(devices=node.devices)) == first
    assert before == {path: path.stat().st_mtime_ns for path in node.folder.shares.rglob("*")}
    assert spec.stat().st_mtime_ns == stamp
    node.check()


def test_an_id_is_one_containers(node: Node) -> None:
    node.prepare(order())
    with pytest.raises(StateError, match="not to lab/other/train"):
        node.prepare(order(whose=owner(pod="other")))


def test_a_spec_that_was_lost_comes_back_as_it_was(node: Node) -> None:
    node.prepare(order())
    (spec,) = node.specs()
    content = spec.read_bytes()
    spec.unlink()
    node.prepare(order())
    assert spec.read_bytes() == content


def test_a_spec_of_another_content_is_never_rewritten(node: Node) -> None:
    node.cdi.mkdir()
    spec = node.cdi / "allotment.dev-share-000000000001.json"
    spec.write_text("{}")
    with pytest.raises(StateError, match="of another share"):
        node.prepare(order())
    assert not spec.exists()
    assert node.shares.owned() == ()
    node.prepare(order())
    node.check()


def test_a_cdi_folder_that_cannot_be_written_leaves_nothing(node: Node) -> None:
    node.cdi.write_text("")
    with pytest.raises(StateError, match="CDI spec") as caught:
        node.prepare(order())
    assert "another folder" in (caught.value.hint or "")
    assert node.shares.owned() == ()
    node.cdi.unlink()
    node.check()


def test_a_share_ends_with_its_spec(node: Node) -> None:
    share = node.prepare(order())
    node.shares.end(share.id)
    node.shares.end(share.id)
    assert node.shares.owned() == ()
    node.check()


@pytest.mark.parametrize("steps", range(6, 14))
def test_a_share_that_came_back_after_a_killed_removal_ends(node: Node, steps: int) -> None:
    share = node.prepare(order(memory="2Gi"))
    kill_after(steps, node.folder.root, lambda: node.shares.end(share.id))
    assert node.prepare(order(memory="2Gi")).id == share.id
    node.shares.end(share.id)
    node.check()


def test_a_share_in_use_does_not_end(node: Node, sleeper: Sleeper) -> None:
    share = node.prepare(order())
    process = sleeper()
    write_traces(node.folder.share(share.id), Traces(members=(named(process.pid),)))
    with pytest.raises(BusyError, match=str(process.pid)):
        node.shares.end(share.id)
    process.communicate()
    node.shares.end(share.id)
    assert node.shares.owned() == ()


def test_a_process_of_another_container_that_names_a_share_does_not_keep_it(
    node: Node, sleeper: Sleeper
) -> None:
    share = node.prepare(order())
    sleeper(ALLOTMENT_SHARE=str(node.folder.share(share.id)))
    node.shares.end(share.id)
    assert node.shares.owned() == ()


def test_a_process_of_another_pod_that_has_its_ledger_open_does_not_keep_it(
    node: Node, hold: Callable[[Path], AbstractContextManager["subprocess.Popen[bytes]"]]
) -> None:
    """A pod's program could pass the file's descriptor on, and its memory would stay booked."""
    share = node.prepare(order())
    with hold(node.folder.share(share.id)):
        node.shares.end(share.id)
        assert node.shares.owned() == ()


def test_a_damaged_share_is_told_and_can_be_ended(node: Node) -> None:
    share = node.prepare(order(memory="12Gi"))
    (node.folder.share(share.id) / "share.json").write_text("{}")
    assert node.shares.owned() == ()
    assert [each.id for each in node.shares.damaged()] == [share.id]
    with pytest.raises(StateError, match=r"share\.json"):
        node.prepare(order(memory="12Gi"))
    node.prepare(order(2, memory="12Gi"))
    with pytest.raises(DoesNotFitError):
        node.prepare(order(3, memory="12Gi"))
    node.shares.end(share.id)
    node.prepare(order(3, memory="12Gi"))
    node.check()


def test_others_on_the_node_are_seen_at_once(node: Node) -> None:
    node.prepare(order())
    for device in node.devices:
        made, _ = lifecycle.create(
            node.folder,
            ShareOrder(
                Request(parse_memory("10Gi"), selectors=(device.uuid,)), Injection.ENVIRONMENT
            ),
            node.devices,
        )
    with pytest.raises(DoesNotFitError, match="10Gi"):
        node.prepare(order(2, "5Gi"))
    lifecycle.destroy(node.folder, lifecycle.find(node.folder, made.id), force=False)
    node.prepare(order(2, "5Gi"))


def test_what_ended_without_care_makes_room(node: Node, dead_runner: Runner) -> None:
    node.folder.prepare()
    request = Request(parse_memory("14Gi"), count=2)
    gone = ShareOrder(request, Injection.ENVIRONMENT, runner=dead_runner)
    lifecycle.create(node.folder, gone, node.devices)
    share = node.prepare(order(memory="14Gi"))
    assert [each.id for each in recovery.list_shares(node.folder)] == [share.id]


def test_devices_that_were_chosen_are_followed(node: Node) -> None:
    first, second = (device.uuid for device in node.devices)
    share = node.prepare(order(devices=(second,)))
    assert [each.uuid for each in share.devices] == [second]
    with pytest.raises(DoesNotFitError, match="need 13Gi, have"):
        node.prepare(order(2, "13Gi", devices=(second,)))
    with pytest.raises(DoesNotFitError, match=f"need GPU GPU-gone.*have {min(first, second)}"):
        node.prepare(order(3, devices=("GPU-gone",)))
    node.check()


def test_a_start_opens_and_asks_about_no_file_of_another_gpus_shares(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (device.uuid for device in node.devices)
    asked: list[int] = []

    def asks(descriptor: int, fstat: Callable[[int], os.stat_result] = os.fstat) -> os.stat_result:
        asked.append(descriptor)
        return fstat(descriptor)

    def asked_for(number: int) -> int:
        asked.clear()
        node.prepare(order(number, "1Gi", devices=(first,)))
        count = len(asked)
        node.shares.end(ShareId(f"{number:012x}"))
        return count

    node.prepare(order(1, "1Gi", devices=(first,)))
    monkeypatch.setattr("allotment.files.os.fstat", asks)
    alone = asked_for(2)
    for number in range(3, 9):
        node.prepare(order(number, "1Gi", devices=(second,)))
    assert asked_for(9) == alone


def test_no_file_of_an_ended_share_stays_open(node: Node) -> None:
    share = node.prepare(order())
    node.shares.end(share.id)
    links = (str(each.resolve()) for each in Path("/proc/self/fd").iterdir())
    gone = [each for each in links if each.startswith(str(node.folder.root)) and "(del" in each]
    assert gone == []


def test_parts_of_one_device_add_up(node: Node) -> None:
    first, second = (device.uuid for device in node.devices)
    share = node.prepare(order(request=replicas_of(4, count=3), devices=(first, second, first)))
    whole = node.devices[0].allottable_bytes
    parts = {each.uuid: (each.memory_bytes, each.compute.guarantee) for each in share.devices}
    assert parts == {first: (whole // 2, 5000), second: (whole // 4, 2500)}
    assert {each.compute.ceiling for each in share.devices} == {10_000}
    node.check()


def test_only_candidates_serve(node: Node) -> None:
    first, second = (device.uuid for device in node.devices)
    share = node.prepare(order(candidates=frozenset({second})))
    assert share.devices[0].uuid == second
    with pytest.raises(DoesNotFitError, match=f"{first} .*not for mode soft, by the node's"):
        node.prepare(order(2, "13Gi", candidates=frozenset({second})))


def test_more_devices_than_there_are_is_said_so(node: Node) -> None:
    asked = order()
    with pytest.raises(DoesNotFitError) as refused:
        node.prepare(replace(asked, request=replace(asked.request, count=9)))
    number = len(node.devices)
    assert refused.value.message == f"asks for parts of 9 GPUs; this node has {number}"
    assert refused.value.hint == f"ask for at most {number}"
    uuid = node.devices[0].uuid
    with pytest.raises(DoesNotFitError, match="parts of 2 GPUs; this node has 1 of mode soft"):
        node.prepare(
            replace(
                asked,
                request=replace(asked.request, count=2),
                candidates=frozenset({uuid}),
            )
        )


def test_many_may_start_at_once(node: Node) -> None:
    with ThreadPoolExecutor(8) as threads:
        numbers = [*range(30), *range(30)]
        made = list(threads.map(lambda number: node.prepare(order(number, "512Mi")), numbers))
        assert made[:30] == made[30:]
        for ended in threads.map(node.shares.end, [share.id for share in made[:10]]):
            assert ended is None
    assert {share.id for share in node.shares.owned()} == {share.id for share in made[10:30]}
    node.check()


def test_specs_of_other_state_folders_are_not_ours_to_remove(node: Node) -> None:
    node.prepare(order())
    other = node.cdi / "allotment.dev-share-0000000000ff.json"
    other.write_text('{"hostPath": "/elsewhere/shares/0000000000ff/policy"}')
    stray = node.cdi / "allotment.dev-share-0000000000fe.json"
    stray.write_text(f'{{"hostPath": "{node.folder.shares}/0000000000fe/policy"}}')
    old, young, cut = (
        node.cdi / f".allotment.dev-share-{number:012x}.json.new" for number in (0xFD, 0xFC, 1)
    )
    for draft in (old, young, cut):
        draft.write_text("")
    os.utime(old, (1, 1))
    node.shares.tidy()
    assert other.exists()
    assert not old.exists()
    assert young.exists()
    assert not cut.exists()
    assert not stray.exists()
    assert len(node.specs()) == 3


def test_an_order_needs_an_owner(node: Node) -> None:
    with pytest.raises(ValueError, match="ShareOrder"):
        node.prepare(replace(order(), owner=None))

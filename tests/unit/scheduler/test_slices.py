# SPDX-License-Identifier: Apache-2.0
"""Pods in other modes than soft, through all of a scheduler's questions, and by the next one."""

from __future__ import annotations

import json

import pytest
from foreign_pods import load_settings
from mig_profiles import piece
from scheduler_twin import cluster_pod_of, node, pod_json
from sliced_office import MODEL, PROFILES, Office, asking, cut

from allotment.dialects.own.placement import PLACEMENT
from allotment.dialects.own.registry import NeedSettings, need_of, need_settings
from allotment.model.clusters import NamespaceQuota, PodNeed
from allotment.model.mig import MigGroup, MigHold, MigModelGroups, MigPlace, MigTemplate
from allotment.model.structs import replace
from allotment.placement.explain import Refusal
from allotment.scheduler.core.quota import QuotaBook


def limited(hard: str) -> QuotaBook:
    quotas = QuotaBook()
    hards = {"requests.allotment.dev/gpu-memory": hard}
    quotas.set_quotas([NamespaceQuota(namespace="ml", name="q", hard=hards)])
    return quotas


def test_a_profile_is_placed_as_a_slice_and_written_so() -> None:
    office = Office(cut("a"))
    assert not office.schedule("one", asking(), mig_profile="1g.10gb")
    placed = office.placement("one")
    assert placed["devices"] == ["GPU-a0"]
    assert placed["mode"] == "mig"
    ((profile, start),) = placed["slices"]
    assert profile == "1g.10gb"
    assert start in range(7)
    assert placed["memory"] == 9856 << 20 or placed["memory"] == PROFILES[0].memory_bytes


def test_memory_takes_the_smallest_profile_that_has_it() -> None:
    office = Office(cut("a"))
    assert not office.schedule("one", asking(memory="15Gi"), mode="mig")
    ((profile, _),) = office.placement("one")["slices"]
    assert profile == "1g.20gb"


def test_a_container_of_several_slices_has_them_all_written() -> None:
    office = Office(cut("a"))
    assert not office.schedule("one", asking(gpu=3), mig_profile="2g.20gb")
    placed = office.placement("one")
    assert placed["devices"] == ["GPU-a0"] * 3
    assert sorted(placed["slices"]) == [["2g.20gb", 0], ["2g.20gb", 2], ["2g.20gb", 4]]


def test_seven_of_eight_small_slices_have_room_and_the_eighth_is_told_why() -> None:
    office = Office(cut("a"))
    said = [office.schedule(f"p{place}", asking(), mig_profile="1g.10gb") for place in range(8)]
    assert said[:7] == [""] * 7
    assert "p7 False: " in said[7]
    assert "1g.10gb" in said[7]
    starts = [office.placement(f"p{place}")["slices"][0][1] for place in range(7)]
    assert sorted(starts) == list(range(7))
    office.end("p3")
    assert not office.schedule("p8", asking(), mig_profile="1g.10gb")
    assert office.placement("p8")["slices"] == [["1g.10gb", starts[3]]]


def test_the_next_scheduler_knows_whose_slices_are_whose() -> None:
    office = Office(cut("a", 2))
    for place in range(9):
        assert not office.schedule(f"p{place}", asking(), mig_profile="1g.10gb")
    after = office.next_one()
    after.book.cluster.check_invariants()
    left = [after.schedule(f"q{place}", asking(), mig_profile="1g.10gb") for place in range(6)]
    assert left[:5] == [""] * 5
    assert left[5]
    taken = [
        (device, start)
        for binding in after.bindery.asked
        for found in [json.loads(binding.annotations[PLACEMENT])["containers"]["main"]]
        for device, (_, start) in zip(found["devices"], found["slices"], strict=True)
    ]
    assert len(taken) == len(set(taken)) == 14


def test_slices_that_others_made_are_in_the_way_and_idle_ones_are_not() -> None:
    foreign = piece(MODEL, "4g.40gb", 0, hold=MigHold.FOREIGN)
    idle = piece(MODEL, "3g.40gb", 4, hold=MigHold.IDLE)
    office = Office(cut("a", slices=(foreign, idle)))
    said = office.schedule("big", asking(), mig_profile="4g.40gb")
    assert "4g.40gb" in said
    assert not office.schedule("half", asking(), mig_profile="2g.20gb")
    assert office.placement("half")["slices"] == [["2g.20gb", 4]]


@pytest.mark.parametrize(
    ("modes", "annotation", "became"),
    [
        (("soft",), "", "soft"),
        (("mig", "soft"), "", "mig"),
        (("soft", "mig"), "", "soft"),
        (("mps", "soft"), "", "mps"),
        (("soft",), "mig,soft", "mig"),
        (("soft",), "strongest", "mig"),
        (("mig",), "mps", "mps"),
    ],
)
def test_the_first_mode_that_fits_is_taken(
    modes: tuple[str, ...], annotation: str, became: str
) -> None:
    office = Office(cut("a", 1, "soft", "mig", "mps", is_enabled=False), needs=NeedSettings(modes))
    said = {"mode": annotation} if annotation else {}
    assert not office.schedule("one", asking(memory="5Gi"), **said)
    assert office.placement("one").get("mode", "soft") == became


def test_the_next_mode_is_taken_where_the_first_has_no_room() -> None:
    office = Office(cut("a"), node("b", 1), needs=NeedSettings(("mig", "soft")))
    for place in range(7):
        assert not office.schedule(f"p{place}", asking(memory="5Gi"))
        assert office.placement(f"p{place}")["mode"] == "mig"
    assert not office.schedule("last", asking(memory="5Gi"))
    placed = office.placement("last")
    assert "mode" not in placed
    assert placed["devices"] == ["GPU-b0"]


def test_a_gpu_with_soft_shares_is_not_cut() -> None:
    office = Office(cut("a", 1, "soft", "mig", is_enabled=False))
    assert not office.schedule("soft", asking(memory="5Gi"), mode="soft")
    said = office.schedule("mig", asking(), mig_profile="1g.10gb")
    assert said
    office.end("soft")
    assert not office.schedule("again", asking(), mig_profile="1g.10gb")


def test_pods_that_no_preferred_mode_can_serve_are_told_so() -> None:
    office = Office(cut("a"), needs=NeedSettings(("mig",)))
    said = office.schedule("one", asking())
    assert "one True: " in said
    assert "it names no mode, and its request does not suit mode mig" in said


def test_groups_go_with_pods_of_their_dialect_that_may_have_slices() -> None:
    groups = (MigModelGroups(("H100",), (MigGroup("g", (MigTemplate("1g.10gb", 10240, 7),)),)),)
    needs = NeedSettings(groups={"volcano": groups})
    for words, expected in (
        ({"mode": "mig", "dialect": "volcano"}, groups),
        ({"mode": "soft,mig", "dialect": "volcano"}, groups),
        ({"mode": "soft", "dialect": "volcano"}, ()),
        ({"mode": "mig", "dialect": "hami"}, ()),
        ({"mode": "mig"}, ()),
        ({"mode": "mig", "mig-profile": "1g.10gb", "dialect": "volcano"}, ()),
    ):
        written = {f"allotment.dev/{key}": text for key, text in words.items()}
        pod = cluster_pod_of(pod_json(annotations=written))
        (found,) = need_of(pod, needs).containers
        assert found.request.mig_groups == expected, words


@pytest.mark.parametrize(
    ("hard", "mode"),
    [("20Gi", "mig"), ("5Gi", "soft"), ("3Gi", "refused: quota of its namespace")],
)
def test_a_mode_that_is_more_than_the_quota_is_passed_over(hard: str, mode: str) -> None:
    office = Office(cut("a", 1, "soft", "mig", is_enabled=False), quotas=limited(hard))
    said = office.schedule("one", asking(memory="4Gi"), mode="mig,soft")
    assert (f"refused: {said}" if said else office.placement("one").get("mode", "soft")).startswith(
        mode
    )
    office.book.cluster.check_invariants()
    booked = office.book.booking(office.pods["uid-one"].uid)
    assert (booked is None) == bool(said)


def test_a_mode_that_is_more_than_the_quota_is_passed_over_for_another_node() -> None:
    office = Office(cut("a", 1, "mig"), node("b", 1), quotas=limited("5Gi"))
    assert not office.schedule("one", asking(memory="4Gi"), mode="mig,soft")
    placed = office.placement("one")
    assert placed.get("mode", "soft") == "soft"
    assert placed["devices"] == ["GPU-b0"]


def test_who_is_over_the_quota_in_every_mode_is_told_so_and_is_expected_nowhere() -> None:
    office = Office(cut("a", 1, "mig"), node("b", 1), quotas=limited("3Gi"))
    said = office.schedule("one", asking(memory="4Gi"), mode="mig,soft")
    assert said.startswith("quota of its namespace exceeded")
    cluster = office.book.cluster
    assert cluster.booking(office.pods["uid-one"].uid) is None
    cluster.check_invariants()


def test_a_mode_within_the_quota_is_kept_where_it_can_be_had() -> None:
    office = Office(cut("a", 1, "mig"), node("b", 1), quotas=limited("10Gi"))
    assert not office.schedule("one", asking(memory="4Gi"), mode="mig,soft")
    assert office.placement("one")["mode"] == "mig"


def test_who_is_over_the_quota_leaves_the_place_that_it_took_before_one_that_is_expected() -> None:
    office = Office(node("b", 1), quotas=limited("40Gi"))
    early, late = (
        need_of(cluster_pod_of(pod_json(name, limits=asking(memory="60Gi"))), office.needs)
        for name in ("early", "late")
    )
    assert office.book.filter(early, ["b"], now=10.0, version="1").best == ("b",)
    turned = office.book.begin_bind(late, "b", now=10.0, version="1")
    assert isinstance(turned, Refusal)
    assert "quota of its namespace exceeded" in turned.text
    assert office.book.cluster.booking(late.uid) is None
    office.book.cluster.check_invariants()


def test_the_quota_is_asked_also_where_pods_that_are_only_expected_have_all_places() -> None:
    office = Office(cut("a", 1, "mig"), node("b", 1), quotas=limited("5Gi"))

    def wanting(name: str, memory: str, mode: str) -> PodNeed:
        words = {"allotment.dev/mode": mode}
        pod = pod_json(name, limits=asking(memory=memory), annotations=words)
        return need_of(cluster_pod_of(pod), office.needs)

    for place, memory, mode in (("a", "75Gi", "mig"), ("b", "79Gi", "soft")):
        early = wanting(f"early-{place}", memory, mode)
        assert office.book.filter(early, [place], now=10.0, version="1").best == (place,)
        assert office.book.cluster.booking(early.uid) is not None
    one = wanting("one", "4Gi", "mig,soft")
    assert office.book.filter(one, ["a", "b"], now=10.0, version="1").best[0] == "b"


ALLOWED = """
hami:
  migProfileAllowlist:
  - {models: [H100], profiles: [1g.10gb, 3g.40gb]}
"""


@pytest.mark.parametrize(
    ("words", "memory", "had"),
    [
        ({"dialect": "hami"}, "15Gi", "3g.40gb"),
        ({"dialect": "hami"}, "5Gi", "1g.10gb"),
        ({"dialect": "hami", "mig-profile": "1g.10gb"}, "5Gi", "1g.10gb"),
        ({"dialect": "volcano"}, "15Gi", "1g.20gb"),
        ({}, "15Gi", "1g.20gb"),
    ],
)
def test_profiles_that_hamis_administrator_has_not_listed_are_not_cut(
    words: dict[str, str], memory: str, had: str
) -> None:
    office = Office(cut("a"), needs=need_settings(("soft",), load_settings(ALLOWED)))
    written = {key.replace("-", "_"): text for key, text in words.items()}
    assert not office.schedule("one", asking(memory=memory), mode="mig", **written)
    booked = office.book.booking(office.pods["uid-one"].uid)
    assert booked is not None
    place = booked.containers[0].devices[0].slice
    assert place is not None
    assert place.profile == had


@pytest.mark.parametrize(
    ("models", "profile", "said"),
    [
        ("[H100]", "2g.20gb", "may only be cut into 1g.10gb, 3g.40gb, by"),
        ("[A100]", "1g.10gb", "may only be cut into no profile, by"),
    ],
)
def test_who_names_a_profile_that_is_not_listed_is_told(
    models: str, profile: str, said: str
) -> None:
    settings = load_settings(ALLOWED.replace("[H100]", models))
    office = Office(cut("a"), needs=need_settings(("soft",), settings))
    assert office.schedule("one", asking(), mode="mig", mig_profile=profile, dialect="hami")
    need = need_of(office.pods["uid-one"], need_settings(("soft",), settings))
    refusal = office.book.cluster.place(need, "a")
    assert isinstance(refusal, Refusal)
    assert said in refusal.details


def test_a_slice_is_read_back_as_it_was_booked() -> None:
    office = Office(cut("a"))
    assert not office.schedule("one", asking(), mig_profile="3g.40gb")
    booked = office.book.booking(office.pods["uid-one"].uid)
    after = office.next_one()
    assert booked is not None
    assert after.book.booking(office.pods["uid-one"].uid) == booked
    assert booked.containers[0].devices[0].slice == MigPlace("3g.40gb", 4)


KNOWN = (
    MigModelGroups(
        ("H100 80GB",),
        (
            MigGroup("g1", (MigTemplate("1g.10gb", 10240, 4), MigTemplate("3g.40gb", 40960, 1))),
            MigGroup("g2", (MigTemplate("2g.20gb", 20480, 3),)),
        ),
    ),
)


@pytest.mark.parametrize(
    ("memory", "profiles_had"),
    [
        # 10240 MiB is more than the driver says that a 1g.10gb has.
        ("10240Mi", ["1g.10gb"] * 7 + [""]),
        ("20480Mi", ["3g.40gb", "3g.40gb", ""]),
        ("40961Mi", [""]),
    ],
)
def test_groups_say_which_profiles_serve(memory: str, profiles_had: list[str]) -> None:
    office = Office(cut("a"), needs=NeedSettings(groups={"volcano": KNOWN}))
    found = []
    for place in range(len(profiles_had)):
        said = office.schedule(f"p{place}", asking(memory=memory), mode="mig", dialect="volcano")
        found.append("" if said else office.placement(f"p{place}")["slices"][0][0])
    assert found == profiles_had


def test_the_next_group_is_taken_where_the_first_has_no_place() -> None:
    foreign = piece(MODEL, "3g.40gb", 4, hold=MigHold.FOREIGN)
    whole = piece(MODEL, "1g.10gb", 0, hold=MigHold.FOREIGN)
    office = Office(cut("a", slices=(foreign, whole)), needs=NeedSettings(groups={"hami": KNOWN}))
    assert not office.schedule("one", asking(memory="20480Mi"), mode="mig", dialect="hami")
    assert office.placement("one")["slices"] == [["2g.20gb", 2]]
    # Of a model of which nothing is written, what the driver says counts.
    other = replace(cut("b").devices[0], model="NVIDIA H200")
    office = Office(replace(cut("b"), devices=(other,)), needs=NeedSettings(groups={"hami": KNOWN}))
    assert not office.schedule("one", asking(memory="10240Mi"), mode="mig", dialect="hami")
    assert office.placement("one")["slices"][0][0] == "1g.20gb"

# SPDX-License-Identifier: Apache-2.0
"""What a viewer sees of a fleet, how it is searched, and its pictures."""

from xml.etree import ElementTree as ET

import pytest
from fleet_twin import GI, fleet, gpu, share

from allotment.model.structs import replace
from allotment.web.drawing import WIDTH, bar, overview, segments, shade
from allotment.web.fleet import EVERYTHING, FleetNode, Sight, matching, totals_of, visible


def test_a_viewer_with_all_rights_sees_all() -> None:
    whole = fleet()
    assert visible(whole, EVERYTHING) is whole


def test_a_viewer_without_nodes_sees_nothing_of_others() -> None:
    web = frozenset({"web"})
    sight = Sight(sees_nodes=False, namespaces=web, quotas=web, events=web)
    seen = visible(fleet(8), sight)
    shares = [share for _, _, share in seen.shares()]
    assert {each.namespace for each in shares} == {"web"}
    for _, each in seen.gpus():
        own = sum(share.memory_limit for share in each.shares)
        assert each.memory_allocated == own
        assert each.memory_used == sum(share.memory_used or 0 for share in each.shares)
        assert (each.utilization, each.temperature_c, each.power_mw) == (None, None, None)
        assert each.shares
    assert [pod.namespace for pod in seen.waiting] == ["web"]
    assert seen.events == ()
    assert "ml" not in repr(seen).replace("html", "")


def test_a_viewer_with_nodes_sees_sums_but_not_the_shares_of_others() -> None:
    whole = fleet(8)
    seen = visible(whole, Sight(namespaces=frozenset({"web"})))
    assert totals_of(seen).memory_allocated == totals_of(whole).memory_allocated
    assert {share.namespace for _, _, share in seen.shares()} == {"web"}
    assert "train-20'" not in repr(seen)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", 3),
        ("NODE-0001", 1),
        ("a100 node", 3),
        ("train-10", 1),
        ("nothing-like-it", 0),
    ],
)
def test_nodes_are_found_by_all_words(text: str, names: int) -> None:
    assert len(matching(fleet(), text)) == names


def test_the_parts_of_a_gpu_fill_its_bar_in_order() -> None:
    shared = gpu("n", 0, (share(1, "g", part=0.5), share(2, "g", part=1.0)))
    parts = segments(shared)
    assert [(each.x, each.width, each.used) for each in parts] == [
        (0.0, 25.0, 12.5),
        (25.0, 25.0, 25.0),
    ]
    drawn = ET.fromstring(bar(shared))  # noqa: S314 - our own text
    assert [(each.get("class"), each.get("x"), each.get("width")) for each in drawn] == [
        ("part h0", "0.0", "25.0"),
        ("use h0", "0.0", "12.5"),
        ("part h1", "25.0", "25.0"),
        ("use h1", "25.0", "25.0"),
    ]


def test_what_is_not_seen_is_one_part() -> None:
    parts = segments(replace(gpu("n", 0, (share(1, "g"),)), memory_allocated=60 * GI))
    assert [(each.hue, each.width) for each in parts] == [("h0", 25.0), ("others", 50.0)]


def test_more_than_the_gpu_is_drawn_within_its_bar() -> None:
    parts = segments(gpu("n", 0, tuple(share(number, "g") for number in range(8))))
    assert parts[-1].x + parts[-1].width <= WIDTH
    assert all(each.used <= each.width for each in parts)


def test_shares_without_a_promise_have_what_is_left() -> None:
    free = replace(share(1, "g"), memory_limit=0)
    parts = segments(gpu("n", 0, (share(2, "g"), free, free)))
    assert [each.width for each in parts] == [25.0, 37.5, 37.5]


def test_a_colour_for_each_tenth() -> None:
    assert [shade(part) for part in (None, -1, 0, 0.449, 0.96, 7)] == [
        "unknown", "u0", "u0", "u4", "u10", "u10",
    ]  # fmt: skip


def test_the_overview_has_a_square_for_each_gpu() -> None:
    picture = overview(fleet(250, 8).nodes, "memory")
    assert sum(shapes.count("M") for _, shapes in picture.paths) == 250 * 8
    assert len(picture.nodes) == 250
    assert picture.width == 1200


def test_the_overview_of_nothing_is_empty() -> None:
    assert overview([FleetNode(name="a")], "time").paths == ()

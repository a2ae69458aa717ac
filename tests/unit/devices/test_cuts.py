# SPDX-License-Identifier: Apache-2.0
"""What a machine's GPUs begin cut into: placed where all of it fits, or refused with a reason."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.devices.descriptions import parse_cuts, parse_short, parse_yaml
from allotment.devices.models import MODELS
from allotment.model.errors import UsageError

A100 = MODELS["a100-40gb"]


def cuts(text: str, key: str = "a100-40gb") -> list[tuple[str, int]]:
    """Profile and start of each, in order of starts."""
    model = MODELS[key]
    assert model.mig is not None
    found = parse_cuts(text, model.mig, model.memory_mib, "here")
    named = [(cut.shape.name_on(model.memory_mib), cut.start) for cut in found]
    return sorted(named, key=lambda each: each[1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("1g.5gb", [("1g.5gb", 6)], id="as the driver would"),
        pytest.param("1g.5gb@0", [("1g.5gb", 0)], id="where it is said"),
        pytest.param("3g.20gb*2", [("3g.20gb", 0), ("3g.20gb", 4)], id="several"),
        pytest.param(
            "1g.5gb+me@0+1g.5gb@1", [("1g.5gb+me", 0), ("1g.5gb", 1)], id="plus in a name"
        ),
        # The driver would put 1g at 6 first, and no 3g at 4 then; there is room all the same.
        pytest.param("1g.5gb@6+4g.20gb", [("4g.20gb", 0), ("1g.5gb", 6)], id="beside"),
    ],
)
def test_profiles_are_placed(text: str, expected: list[tuple[str, int]]) -> None:
    assert cuts(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("1g.10gbx", "is not a MIG profile", id="no name"),
        pytest.param("1g.6gb", "is not a MIG profile", id="of another model"),
        pytest.param("", "is not a MIG profile", id="nothing"),
        pytest.param("2g.10gb@1", "cannot start there", id="start"),
        pytest.param("1g.5gb*2@0", "cannot start there", id="count and start"),
        pytest.param("3g.20gb*2+1g.5gb", "does not fit", id="no slot left"),
        pytest.param("1g.5gb@0+1g.5gb@0", "does not fit", id="overlap"),
        pytest.param("1g.5gb+me*2", "does not fit", id="one set of media engines"),
    ],
)
def test_what_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        cuts(text)


@given(
    st.lists(
        st.sampled_from(["1g.5gb", "1g.5gb+me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb"]),
        min_size=1,
        max_size=8,
    )
)
def test_all_that_is_asked_for_is_there_and_nothing_overlaps(names: list[str]) -> None:
    try:
        found = cuts("+".join(names))
    except UsageError:
        return
    assert Counter(name for name, _ in found) == Counter(names)
    assert A100.mig is not None
    sizes = {s.name_on(A100.memory_mib): s.size for s in A100.mig.shapes}
    for (before, start), (_, following) in pairwise(found):
        assert start + sizes[before] <= following


def test_a_description_says_it_in_both_forms() -> None:
    (short,) = parse_short("h100-80gb[mig=1g.10gb*2+2g.20gb@0]").gpus
    (listed,) = parse_yaml(
        "gpus: [{model: h100-80gb, mig: [1g.10gb*2, 2g.20gb@0]}]", source="m.yaml"
    ).gpus
    assert short == listed
    assert short.cuts is not None
    assert len(short.cuts) == 3
    assert parse_short("h100-80gb[mig=on]").gpus[0].cuts == ()
    assert parse_short("h100-80gb[mig=off]").gpus[0].cuts is None
    with pytest.raises(UsageError, match="has no MIG"):
        parse_short("t4[mig=on]")
    with pytest.raises(UsageError, match="is not a list"):
        parse_yaml("gpus: [{model: h100-80gb, mig: {1g.10gb: 2}}]", source="m.yaml")

# SPDX-License-Identifier: Apache-2.0
"""Which slice a request gets: the smallest that serves, at the start that keeps most possible."""

from fractions import Fraction
from random import Random

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mig_profiles import MODELS, layout, piece, profiles

from allotment.model.errors import UsageError
from allotment.model.mig import MigHold, MigLayout, MigModelGroups, MigProfile, MigRequest, MigSlice
from allotment.placement.mig import MigChoice, MigRefusal, choose, room_of, serving

GIB = 2**30
A100 = "A100-40GB"


def chosen(layouts: list[MigLayout], request: MigRequest) -> tuple[MigChoice, ...]:
    answer = choose(layouts, request)
    assert not isinstance(answer, MigRefusal), str(answer)
    return answer


def starts(layouts: list[MigLayout], request: MigRequest) -> list[tuple[str, str, int]]:
    return [(each.gpu, each.profile.name, each.start) for each in chosen(layouts, request)]


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        pytest.param(MigRequest(profile="2g.10gb"), "2g.10gb", id="by name"),
        pytest.param(MigRequest(memory_bytes=4 * GIB), "1g.5gb", id="by memory"),
        pytest.param(MigRequest(memory_bytes=5 * GIB), "1g.10gb", id="more than its name says"),
        pytest.param(MigRequest(compute=2_000), "2g.10gb", id="by compute"),
        pytest.param(MigRequest(memory_bytes=GIB, compute=5_000), "4g.20gb", id="by both"),
        pytest.param(MigRequest(attributes="+me"), "1g.5gb+me", id="by attribute"),
        pytest.param(MigRequest(memory_bytes=30 * GIB), "7g.40gb", id="all of it"),
    ],
)
def test_the_smallest_profile_that_serves_is_taken(request_: MigRequest, name: str) -> None:
    assert chosen([layout(A100)], request_)[0].profile.name == name


def test_scarce_engines_are_given_only_where_they_are_asked_for() -> None:
    assert all(not each.attributes for each in serving(profiles("RTX PRO 6000"), MigRequest()))


def test_a_part_is_of_the_largest_profile_be_it_listed_or_not() -> None:
    listed = (MigModelGroups(("A100",), profiles=("1g.5gb", "2g.10gb", "3g.20gb")),)
    half = MigRequest(memory_part=Fraction(49, 100), groups=listed)
    assert [each.name for each in serving(profiles(A100), half, model=A100)] == ["3g.20gb"]


@pytest.mark.parametrize(
    ("name", "start"),
    [("1g.5gb", 6), ("1g.10gb", 6), ("2g.10gb", 4), ("3g.20gb", 4), ("4g.20gb", 0)],
)
def test_an_empty_gpu_is_filled_from_the_end_that_keeps_most(name: str, start: int) -> None:
    assert starts([layout(A100)], MigRequest(profile=name)) == [("GPU-0", name, start)]


def test_a_hole_is_filled_before_a_half_is_broken() -> None:
    there = layout(A100, piece(A100, "1g.5gb", 0))
    assert starts([there], MigRequest(profile="1g.5gb")) == [("GPU-0", "1g.5gb", 1)]


def test_a_gpu_that_is_begun_is_filled_before_an_empty_one() -> None:
    begun = layout(A100, piece(A100, "3g.20gb", 4), gpu="GPU-begun")
    empty = layout(A100, gpu="GPU-empty")
    assert starts([empty, begun], MigRequest(profile="1g.5gb"))[0][0] == "GPU-begun"


def test_an_idle_instance_of_the_profile_is_taken_as_it_is() -> None:
    idle = piece(A100, "1g.5gb", 2, hold=MigHold.IDLE)
    (choice,) = chosen([layout(A100, idle)], MigRequest(profile="1g.5gb"))
    assert (choice.start, choice.reused, choice.removes) == (2, idle, ())


def test_a_larger_idle_instance_is_not_given_away() -> None:
    idle = piece(A100, "3g.20gb", 4, hold=MigHold.IDLE)
    (choice,) = chosen([layout(A100, idle)], MigRequest(profile="1g.5gb"))
    assert choice.profile.name == "1g.5gb"
    assert choice.reused is None


def test_idle_instances_go_where_their_slots_are_wanted() -> None:
    idle = [piece(A100, "1g.5gb", at, hold=MigHold.IDLE) for at in (0, 6)]
    (choice,) = chosen([layout(A100, *idle)], MigRequest(profile="7g.40gb"))
    assert choice.removes == tuple(idle)


def test_of_equal_places_the_one_is_taken_where_nothing_idle_must_go() -> None:
    idle = layout(A100, piece(A100, "1g.5gb", 6, hold=MigHold.IDLE), gpu="GPU-idle")
    bare = layout(A100, gpu="GPU-bare")
    assert starts([idle, bare], MigRequest(profile="3g.20gb")) == [("GPU-bare", "3g.20gb", 4)]


def test_an_idle_holder_of_the_engines_goes_though_it_is_elsewhere() -> None:
    idle = piece("A30", "1g.6gb+me", 0, hold=MigHold.IDLE)
    there = layout("A30", idle, piece("A30", "1g.6gb", 1))
    (choice,) = chosen([there], MigRequest(profile="2g.12gb+me"))
    assert (choice.start, choice.removes) == (2, (idle,))


@pytest.mark.parametrize("hold", [MigHold.USED, MigHold.FOREIGN], ids=str)
def test_what_others_have_stays(hold: MigHold) -> None:
    answer = choose(
        [layout(A100, piece(A100, "1g.5gb", 0, hold=hold))], MigRequest(profile="7g.40gb")
    )
    assert isinstance(answer, MigRefusal)


def test_a_gpu_is_switched_to_mig_only_when_others_are_full() -> None:
    off = layout(A100, gpu="GPU-off", is_enabled=False)
    full = layout(A100, piece(A100, "7g.40gb", 0), gpu="GPU-full")
    room = layout(A100, piece(A100, "4g.20gb", 0), gpu="GPU-room")
    empty = layout(A100, gpu="GPU-empty")
    assert starts([off, room], MigRequest(profile="1g.5gb"))[0][0] == "GPU-room"
    assert starts([off, empty], MigRequest(profile="1g.5gb"))[0][0] == "GPU-empty"
    assert starts([off, full], MigRequest(profile="1g.5gb"))[0][0] == "GPU-off"


def test_several_slices_are_on_as_many_gpus_as_it_takes() -> None:
    one = layout(A100, piece(A100, "4g.20gb", 0), gpu="GPU-1")
    two = layout(A100, piece(A100, "3g.20gb", 4), gpu="GPU-2")
    assert starts([one, two], MigRequest(profile="3g.20gb", count=2)) == [
        ("GPU-1", "3g.20gb", 4),
        ("GPU-2", "3g.20gb", 0),
    ]


def odd(name: str, number: int, *starts: int) -> MigProfile:
    """A profile as no GPU has it: of two slots, or of one."""
    size = 2 if name == "2g.1gb" else 1
    return MigProfile(
        name=name,
        number=number,
        slices=size,
        memory_bytes=GIB,
        size=size,
        starts=starts,
        most=3,
        multiprocessors=size,
    )


def test_several_slices_leave_each_other_room_where_starts_overlap() -> None:
    """By itself the middle would be best: it keeps what has no other place than either end."""
    ends = [odd(f"1g.{each}gb", each, 3 * (each % 2)) for each in (2, 3, 4, 5)]
    there = MigLayout(gpu="GPU-0", profiles=(odd("2g.1gb", 1, 0, 1, 2), *ends))
    assert chosen([there], MigRequest(profile="2g.1gb"))[0].start == 1
    choices = chosen([there], MigRequest(profile="2g.1gb", count=2))
    assert sorted(each.start for each in choices) == [0, 2]


@pytest.mark.parametrize(
    ("there", "request_", "why"),
    [
        pytest.param(
            layout(A100),
            MigRequest(profile="1g.10gb+me"),
            "has no profile 1g.10gb+me, but 1g.5gb",
            id="name",
        ),
        pytest.param(
            layout(A100),
            MigRequest(memory_bytes=80 * GIB),
            "7g.40gb has 39.2Gi and 100 %",
            id="memory",
        ),
        pytest.param(
            layout(A100), MigRequest(attributes="+gfx"), "has no profile with +gfx", id="attribute"
        ),
        pytest.param(
            layout(A100, piece(A100, "1g.5gb", 3, holder="pod a/b")),
            MigRequest(profile="4g.20gb"),
            "4g.20gb can start at slot 0: slot 3 of pod a/b",
            id="slots",
        ),
        pytest.param(
            layout(A100, piece(A100, "1g.5gb+me", 3)),
            MigRequest(profile="1g.5gb+me"),
            "the most 1g.5gb+me",
            id="engines",
        ),
        pytest.param(
            layout(A100), MigRequest(profile="3g.20gb", count=3), "has room for 2 of 3", id="count"
        ),
        pytest.param(
            MigLayout(gpu="GPU-0", profiles=()),
            MigRequest(profile="1g.5gb"),
            "has no MIG",
            id="no MIG",
        ),
    ],
)
def test_a_refusal_says_why_of_each_gpu(there: MigLayout, request_: MigRequest, why: str) -> None:
    answer = choose([there], request_)
    assert isinstance(answer, MigRefusal)
    assert why in str(answer)
    assert str(request_) in str(answer)


def test_a_request_for_nothing_cannot_be_meant() -> None:
    with pytest.raises(UsageError, match="0 slices"):
        choose([layout(A100)], MigRequest(count=0))


def is_possible(there: tuple[MigProfile, ...], slices: list[MigSlice], wanted: MigProfile) -> bool:
    """Is there any legal place? Told from the profiles by counting slots, one by one."""
    free = set(range(8))
    for each in slices:
        free -= set(range(each.start, each.start + each.size))
    by_number = {each.number: each for each in there}
    media = sum(by_number[each.profile].has_media for each in slices)
    if wanted.has_media and media:
        return False
    if sum(each.profile == wanted.number for each in slices) >= wanted.most:
        return False
    return any(set(range(at, at + wanted.size)) <= free for at in wanted.starts)


SHAPES = ("A100-40GB", "A30", "RTX PRO 6000")
"""One model of each shape: the others of seven slices differ in their sizes alone."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "model",
    [
        *SHAPES,
        *(pytest.param(each, marks=pytest.mark.thorough) for each in MODELS if each not in SHAPES),
    ],
)
def test_nothing_is_refused_that_has_a_place_and_nothing_overlaps(model: str) -> None:
    """A random slice is asked for, or one of those there ends."""
    random, there = Random(7), profiles(model)  # noqa: S311 - the same steps each time
    requests = [(each, MigRequest(profile=each.name)) for each in there]
    slices: list[MigSlice] = []
    refused = 0
    for _ in range(examples(500)):
        if slices and random.random() < 0.45:
            slices.pop(random.randrange(len(slices)))
            continue
        wanted, request = random.choice(requests)
        answer = choose([MigLayout(gpu="", profiles=there, slices=tuple(slices))], request)
        if isinstance(answer, MigRefusal):
            refused += 1
            assert not is_possible(there, slices, wanted)
            continue
        (choice,) = answer
        covered = set(range(choice.start, choice.start + wanted.size))
        assert choice.start in wanted.starts
        assert is_possible(there, slices, wanted)
        assert all(not covered & set(range(each.start, each.start + each.size)) for each in slices)
        slices.append(MigSlice(profile=wanted.number, start=choice.start, size=wanted.size))
    assert refused > 500


@st.composite
def gpus(draw: st.DrawFn) -> MigLayout:
    """A GPU with slices that somebody made somehow, held in all ways."""
    model = draw(st.sampled_from(sorted(MODELS)))
    there = profiles(model)
    slices: list[MigSlice] = []
    for _ in range(draw(st.integers(0, 7))):
        wanted = draw(st.sampled_from(there))
        start = draw(st.sampled_from(wanted.starts))
        one = MigSlice(
            profile=wanted.number,
            start=start,
            size=wanted.size,
            hold=draw(st.sampled_from(MigHold)),
        )
        only_there = MigProfile(
            name=wanted.name,
            number=wanted.number,
            slices=wanted.slices,
            memory_bytes=wanted.memory_bytes,
            size=wanted.size,
            starts=(start,),
            most=wanted.most,
            multiprocessors=wanted.multiprocessors,
            has_media=wanted.has_media,
        )
        if is_possible(there, slices, only_there):
            slices.append(one)
    return MigLayout(gpu=f"GPU-{model}", profiles=there, slices=tuple(slices))


def most_at_once(
    there: tuple[MigProfile, ...], slices: list[MigSlice], wanted: MigProfile, *, after: int = -1
) -> int:
    """How many more of a profile fit beyond a start, by trying everything."""
    if not is_possible(there, slices, wanted):
        return 0
    best = 0
    for start in wanted.starts:
        one = MigSlice(profile=wanted.number, start=start, size=wanted.size)
        covered = set(range(start, start + wanted.size))
        is_free = all(not covered & set(range(s.start, s.start + s.size)) for s in slices)
        if start > after and is_free:
            best = max(best, 1 + most_at_once(there, [*slices, one], wanted, after=start))
    return best


@settings(max_examples=examples(2))
@given(layouts=st.lists(gpus(), min_size=1, max_size=3), data=st.data())
def test_choices_are_legal_together_and_all_that_fits_is_served(
    layouts: list[MigLayout], data: st.DataObject
) -> None:
    layouts = [
        MigLayout(gpu=f"GPU-{number}", profiles=each.profiles, slices=each.slices)
        for number, each in enumerate(layouts)
    ]
    names = sorted({each.name for layout in layouts for each in layout.profiles})
    request = MigRequest(
        profile=data.draw(st.sampled_from(names)), count=data.draw(st.integers(1, 4))
    )
    fit = 0
    for each in layouts:
        wanted = next((one for one in each.profiles if one.name == request.profile), None)
        stay = [one for one in each.slices if one.hold is not MigHold.IDLE]
        fit += most_at_once(each.profiles, stay, wanted) if wanted else 0
    answer = choose(layouts, request)
    assert isinstance(answer, MigRefusal) == (fit < request.count)
    if isinstance(answer, MigRefusal):
        return
    assert len(answer) == request.count
    there = {each.gpu: list(each.slices) for each in layouts}
    of = {each.gpu: each.profiles for each in layouts}
    for choice in answer:
        slices = there[choice.gpu]
        for gone in (*choice.removes, *([choice.reused] if choice.reused else [])):
            assert gone.hold is MigHold.IDLE
            slices.remove(gone)
        assert choice.start in choice.profile.starts
        covered = set(range(choice.start, choice.start + choice.profile.size))
        assert all(not covered & set(range(s.start, s.start + s.size)) for s in slices)
        assert is_possible(of[choice.gpu], slices, choice.profile)
        slices.append(
            MigSlice(profile=choice.profile.number, start=choice.start, size=choice.profile.size)
        )


def test_profiles_that_somebody_made_up_take_no_longer_than_real_ones() -> None:
    """Two dozen with limits of their own can fill a GPU in millions of ways."""
    made_up = tuple(
        MigProfile(
            name=f"{number}g",
            number=number,
            slices=1,
            memory_bytes=GIB,
            size=1 + number % 2,
            starts=tuple(range(number % 3, 7)),
            most=1 + number % 3,
            multiprocessors=1,
            has_media=number % 4 == 0,
        )
        for number in range(24)
    )
    there = MigLayout(gpu="GPU-0", profiles=made_up)
    assert 1 <= room_of(there, MigRequest()) <= 8
    assert chosen([there], MigRequest())[0].gpu == "GPU-0"

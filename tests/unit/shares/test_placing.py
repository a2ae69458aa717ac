# SPDX-License-Identifier: Apache-2.0
"""What is said where no GPU can serve, whatever is on it: why each cannot, and the next step."""

from __future__ import annotations

import pytest
from gpus import gpu

from allotment.model.compute import parse_compute
from allotment.model.devices import Device
from allotment.model.errors import DoesNotFitError
from allotment.model.modes import MPS, SOFT, TIMESLICE
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection
from allotment.model.structs import replace
from allotment.shares.booking import Booking, default_host_budget
from allotment.shares.mode_policy import ModePolicy
from allotment.shares.placing import ShareOrder, place

CUT = gpu(mig=True, memory_bytes=0)
OLD = gpu(compute_capability=(6, 0))


def test_default_host_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"SC_PHYS_PAGES": 16 << 20, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", figures.__getitem__)
    real = replace(gpu(memory_bytes=80 << 30), simulated=False)
    simulated = replace(gpu(1, memory_bytes=16 << 30), simulated=True)
    assert default_host_budget([real, simulated]) == 32 << 30
    other = replace(real, simulated=True)
    assert default_host_budget([other, simulated]) == 96 << 30


@pytest.mark.parametrize(
    ("device", "mode", "why", "next_step"),
    [
        (CUT, SOFT, "it is in MIG mode", "switch MIG off"),
        (CUT, MPS, "it is cut by MIG", "switch MIG off"),
        (OLD, MPS, "before Volta", "another mode"),
    ],
)
def test_a_gpu_that_cannot_serve_says_why(
    device: Device, mode: str, why: str, next_step: str
) -> None:
    order = ShareOrder(Request(parse_memory("4Gi"), mode=mode), Injection.ENVIRONMENT)
    with pytest.raises(DoesNotFitError) as caught:
        place(order, [device], {})
    assert f"{device.uuid} ({device.name}): " in caught.value.message
    assert why in caught.value.message
    assert next_step in (caught.value.hint or "")
    assert place(order, [device, gpu(1)], {}).devices[0].device.uuid == "GPU-1"


@pytest.mark.parametrize(
    ("mode", "there", "selectors", "ways"),
    [
        (SOFT, MPS, (), ["ask for --mode mps", "wait until"]),
        (MPS, SOFT, (), ["ask for --mode soft", "wait until"]),
        (SOFT, MPS, ("GPU-0",), ["ask for --mode mps", "another --gpu", "wait until"]),
        (SOFT, TIMESLICE, (), ["wait until"]),
    ],
    ids=["soft beside mps", "mps beside soft", "on a GPU by name", "beside what nobody asks for"],
)
def test_who_is_kept_out_by_another_mode_is_told_each_way_out(
    mode: str, there: str, selectors: tuple[str, ...], ways: list[str]
) -> None:
    request = Request(parse_memory("4Gi"), mode=mode, selectors=selectors)
    devices = [gpu(0), gpu(1)] if selectors else [gpu(0)]
    bookings = {"GPU-0": Booking(memory=1 << 30, shares=1, mode=there, sharers=["m1"])}
    with pytest.raises(DoesNotFitError) as caught:
        place(ShareOrder(request, Injection.ENVIRONMENT), devices, bookings)
    hint = caught.value.hint or ""
    assert len(hint.split(", or ")) == len(ways)
    assert all(way in hint for way in ways)


def test_a_gpu_that_is_full_is_not_explained_by_the_mode_of_another() -> None:
    request = Request(parse_memory("75Gi"))
    bookings = {
        "GPU-0": Booking(memory=1 << 30, shares=1, mode=MPS, sharers=["m1"]),
        "GPU-1": Booking(memory=10 << 30, shares=1, mode=SOFT, sharers=["s1"]),
    }
    with pytest.raises(DoesNotFitError) as caught:
        place(ShareOrder(request, Injection.ENVIRONMENT), [gpu(0), gpu(1)], bookings)
    assert "make room" in (caught.value.hint or "")


def test_a_gpu_with_a_problem_does_not_hide_the_way_out_at_another() -> None:
    bookings = {"GPU-0": Booking(memory=1 << 30, shares=1, mode=MPS, sharers=["m1"])}
    order = ShareOrder(Request(parse_memory("1Gi")), Injection.ENVIRONMENT)
    with pytest.raises(DoesNotFitError) as caught:
        place(order, [gpu(0), gpu(1, mig=True)], bookings)
    assert "ask for --mode mps" in (caught.value.hint or "")


def test_who_guarantees_too_much_on_a_gpu_by_name_is_told_to_guarantee_less() -> None:
    bookings = {"GPU-0": Booking(memory=1 << 30, guaranteed=5000, shares=1, mode=SOFT)}
    request = Request(parse_memory("1Gi"), compute=parse_compute("60"), selectors=("GPU-0",))
    with pytest.raises(DoesNotFitError) as caught:
        place(ShareOrder(request, Injection.ENVIRONMENT), [gpu(0), gpu(1)], bookings)
    assert "guarantee less" in (caught.value.hint or "")


def refused(
    order: ShareOrder, devices: list[Device], bookings: dict[str, Booking]
) -> DoesNotFitError:
    with pytest.raises(DoesNotFitError) as caught:
        place(order, devices, bookings)
    return caught.value


def test_who_names_a_gpu_in_mig_mode_is_told_how_to_switch_it_off_beside_others() -> None:
    request = Request(parse_memory("4Gi"), selectors=("GPU-0",))
    order = ShareOrder(request, Injection.ENVIRONMENT, spec="h100:2")
    old = replace(CUT, compute_capability=(8, 0))
    new = replace(CUT, compute_capability=(9, 0))
    for device, options in ((old, " --reset"), (new, "")):
        error = refused(order, [device, gpu(1)], {})
        hint = error.hint or ""
        assert f"`allot devices set-mode GPU-0 soft{options} --simulated h100:2`" in hint
        assert "kept warm" in hint
        assert "others made" in hint
        assert "another --gpu" in hint
        assert error.advises == "mig"


def test_who_asks_for_more_than_a_gpu_by_name_holds_is_told_that_it_is_not_of_all() -> None:
    request = Request(parse_memory("70Gi"), selectors=("GPU-0",))
    devices = [gpu(0, memory_bytes=8 << 30), gpu(1)]
    hint = refused(ShareOrder(request, Injection.ENVIRONMENT), devices, {}).hint or ""
    assert "none of those that are asked for is that large" in hint


def test_in_mode_mps_nobody_is_sent_to_resize_for_compute() -> None:
    bookings = {"GPU-0": Booking(memory=1 << 30, guaranteed=9000, shares=1, mode=MPS)}
    request = Request(parse_memory("1Gi"), compute=parse_compute("20"), mode=MPS)
    error = refused(ShareOrder(request, Injection.ENVIRONMENT), [gpu(0)], bookings)
    assert "guarantee less" in (error.hint or "")
    assert "resize" not in (error.hint or "")
    assert error.reason == "need 20 % of compute, have 10 % (90 % guaranteed)"


def test_the_reason_that_tells_most_is_of_a_gpu_that_could_serve() -> None:
    bookings = {"GPU-1": Booking(memory=79 << 30, shares=1, mode=SOFT, sharers=["s1"])}
    order = ShareOrder(Request(parse_memory("4Gi"), mode=MPS), Injection.ENVIRONMENT)
    assert refused(order, [OLD], {}).reason == "MPS shares no GPU before Volta safely"
    error = refused(order, [OLD, gpu(1)], bookings)
    assert error.reason == "GPU-1: need mode mps, have shares of mode soft on it (s1)"
    several = replace(order, request=replace(order.request, count=2))
    kept = {each: ModePolicy((SOFT,)) for each in ("GPU-0", "GPU-1")}
    with pytest.raises(DoesNotFitError) as caught:
        place(several, [gpu(0), gpu(1)], {}, allowed=kept)
    assert caught.value.reason.startswith("kept for mode soft")


def test_too_few_gpus_by_name_are_not_called_broken() -> None:
    request = Request(parse_memory("4Gi"), count=2, selectors=("GPU-0",))
    hint = refused(ShareOrder(request, Injection.ENVIRONMENT), [gpu(0), gpu(1)], {}).hint or ""
    assert "with a problem" not in hint

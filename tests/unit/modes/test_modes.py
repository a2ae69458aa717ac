# SPDX-License-Identifier: Apache-2.0
"""The mode `soft`: a ledger for each placement."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from allotment.ledger import read_contract
from allotment.ledger.layout import USAGE_SIZE
from allotment.ledger.lease_layout import LEASES_FILE_SIZE
from allotment.ledger.leases import DeviceFiles
from allotment.model.devices import Device
from allotment.model.errors import LedgerError, LimitBelowUseError, UsageError
from allotment.model.modes import MODES
from allotment.model.placements import Placed, Placement
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import ShareId
from allotment.modes import (
    ExclusiveMode,
    Mode,
    SoftMode,
    TimesliceMode,
    ledger_mode,
    mode_named,
    take_damages,
    traits_of,
    turns,
)

GI = 1 << 30
DEVICE = Device(
    uuid="GPU-0", name="Tesla T4", index=0, memory_bytes=16 * GI, sm_count=40,
    compute_capability=(7, 5), numa_node=None, pci_bus_id="0000:01:00.0", simulated=True, mig=False,
    context_bytes=300 << 20,
)  # fmt: skip
PLACEMENT = Placement(Request(parse_memory("4Gi")), (Placed(DEVICE, 4 * GI),))


@pytest.fixture
def directory(tmp_path: Path, native_dir: Path) -> Path:
    assert native_dir.is_dir()
    share, devices = tmp_path / "shares" / "ab12", tmp_path / "devices"
    share.mkdir(parents=True)
    devices.mkdir()
    SoftMode().create(share, PLACEMENT, share=ShareId("ab12"), name="train", devices=devices)
    return share


@pytest.fixture(autouse=True)
def told() -> Iterator[None]:
    """What other tests found."""
    take_damages()
    yield
    take_damages()


def test_the_mode_is_known_by_name() -> None:
    assert mode_named("soft").name == "soft"
    with pytest.raises(UsageError, match="no mode 'vgpu'"):
        mode_named("vgpu")


def test_create_writes_what_is_allowed(directory: Path) -> None:
    snapshot = SoftMode().reconcile(directory)
    assert snapshot.policy.share_name == "train"
    (device,) = snapshot.policy.devices
    assert (device.uuid, device.memory_limit, device.context_bytes) == ("GPU-0", 4 * GI, 300 << 20)
    assert snapshot.devices[0].used == 0
    assert snapshot.processes == ()


def test_resize_changes_the_limit(directory: Path) -> None:
    SoftMode().resize(directory, "GPU-0", 6 * GI, force=False)
    assert SoftMode().reconcile(directory).policy.devices[0].memory_limit == 6 * GI


def test_resize_knows_only_its_own_devices(directory: Path) -> None:
    with pytest.raises(LedgerError, match="does not name GPU-1"):
        SoftMode().resize(directory, "GPU-1", GI, force=False)


def test_a_ledger_is_not_made_over_another(directory: Path) -> None:
    devices = directory.parent.parent / "devices"
    with pytest.raises((LedgerError, FileExistsError)):
        SoftMode().create(
            directory, PLACEMENT, share=ShareId("ab13"), name="train", devices=devices
        )


def test_reconcile_names_a_damaged_file(directory: Path) -> None:
    (directory / "policy").write_bytes(b"")
    with pytest.raises(LedgerError, match="policy"):
        SoftMode().reconcile(directory)


def test_a_limit_below_the_use_says_both_numbers() -> None:
    error = LimitBelowUseError(need=3 * GI, have=2 * GI)
    assert "3Gi" in error.message
    assert "2Gi" in error.message
    assert "--force" in (error.hint or "")
    assert "--force" not in error.hint_for_pod()
    assert "memory:3073Mi or more" in LimitBelowUseError(need=3 * GI + 1, have=1).hint_for_pod()
    leaving = LimitBelowUseError(need=3 * GI, have=2 * GI, has_leaving=True)
    assert "wait" in leaving.hint_for_pod()
    assert "ended programs" in leaving.hint_for_pod()


@pytest.mark.parametrize("mode", [ExclusiveMode(), TimesliceMode()], ids=["exclusive", "timeslice"])
def test_a_mode_without_a_shim_makes_nothing(tmp_path: Path, mode: Mode) -> None:
    assert mode_named(mode.name).name == mode.name
    assert ledger_mode(mode.name) is None
    assert mode.fits(DEVICE) == ""
    mode.create(tmp_path, PLACEMENT, share=ShareId("ab12"), name="train", devices=tmp_path)
    assert mode.reconcile(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    assert mode.remark


def test_modes_with_a_ledger_are_modes() -> None:
    for name in ("soft", "mps", "exclusive", "timeslice", "mig"):
        assert mode_named(name).name == name
    assert [name for name in MODES if traits_of(name).takes_turns] == ["soft"]
    assert ledger_mode("soft") is mode_named("soft")


def test_a_seat_of_a_try_that_was_cut_off_is_freed(tmp_path: Path, directory: Path) -> None:
    devices = directory.parent.parent / "devices"
    again = tmp_path / "again"
    again.mkdir()
    SoftMode().create(again, PLACEMENT, share=ShareId("ab12"), name="train", devices=devices)
    seats = read_contract(devices / "GPU-0" / "contract").seats
    assert [seat.share_id for seat in seats] == ["ab12"]


def test_a_seat_on_a_device_that_the_share_has_not_is_swept(directory: Path) -> None:
    devices = directory.parent.parent / "devices"
    for there, left in ((["GPU-0"], 1), ([], 1), (["GPU-1"], 0)):
        turns.sweep(devices, {ShareId("ab12"): there})
        assert len(read_contract(devices / "GPU-0" / "contract").seats) == left


def test_leases_are_put_right_by_the_next_share(tmp_path: Path, directory: Path) -> None:
    devices = directory.parent.parent / "devices"
    os.truncate(directory / "seat-0", 0)
    another = tmp_path / "another"
    another.mkdir()
    SoftMode().create(another, PLACEMENT, share=ShareId("cd34"), name="next", devices=devices)
    assert (another / "seats-0").samefile(directory / "seats-0")
    assert not (another / "seat-0").samefile(directory / "seat-0")
    for share in (directory, another):
        assert (
            SoftMode()
            .turns(share, SoftMode().reconcile(share), DeviceFiles())["GPU-0"]
            .account.used_ns
            == 0
        )
    (damage,) = take_damages()
    assert (damage.shares, damage.device) == (("ab12",), "GPU-0")
    assert "truncated" in damage.message
    assert take_damages() == ()


@pytest.mark.parametrize("length", [0, LEASES_FILE_SIZE + (1 << 20)])
def test_leases_are_put_right_by_a_sweep(directory: Path, length: int) -> None:
    devices = directory.parent.parent / "devices"
    os.truncate(directory / "seat-0", length)
    for _ in range(2):
        turns.sweep(devices, {ShareId("ab12"): ["GPU-0"]})
    assert (directory / "seat-0").stat().st_size == LEASES_FILE_SIZE
    (damage,) = take_damages()
    assert (damage.shares, damage.device) == (("ab12",), "GPU-0")


def test_usage_that_was_made_longer_is_cut_and_told(directory: Path) -> None:
    os.truncate(directory / "usage", USAGE_SIZE + (3 << 30))
    for _ in range(2):
        SoftMode().reconcile(directory)
    assert (directory / "usage").stat().st_size == USAGE_SIZE
    (damage,) = take_damages()
    assert (damage.shares, damage.device) == (("ab12",), "")
    assert "3Gi" in damage.message


def test_what_nobody_asks_for_is_forgotten(directory: Path) -> None:
    for _ in range(300):
        os.truncate(directory / "usage", USAGE_SIZE + 1)
        SoftMode().reconcile(directory)
    assert 0 < len(take_damages()) < 300


def test_each_name_is_a_mode() -> None:
    assert [mode_named(name).name for name in MODES] == list(MODES)
    names = {traits_of(name): name for name in MODES}
    alike = [(name, same) for name in MODES if (same := names[traits_of(name)]) != name]
    assert not alike, "nothing but a name tells these modes apart"


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/concepts/modes.md", "docs/reference/config.md",
     "docs/reference/explain-pod.schema.json", "docs/reference/cli.md"],
)  # fmt: skip
def test_pages_that_list_modes_list_them_all(page: str) -> None:
    text = (Path(__file__).parents[3] / page).read_text("utf-8")
    assert [name for name in MODES if not re.search(rf"\b{name}\b", text)] == []


def test_limits_can_change_in_a_mode_with_a_ledger_of_its_own() -> None:
    changing = [name for name in MODES if not traits_of(name).fixed_because]
    assert [name for name in MODES if ledger_mode(name)] == changing

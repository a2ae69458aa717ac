# SPDX-License-Identifier: Apache-2.0
"""The ledger from the agent's side: make, read, resize, and refuse what is damaged."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rounds import undisturbed

from allotment import ledger
from allotment.ledger import layout
from allotment.model.errors import LedgerError, LimitBelowUseError

AT_ONCE_S = 0.4  # who waits for a lock looks again after half a second
GIB = 1 << 30
POLICY = ledger.LedgerPolicy(
    share_id="5f2a",
    share_name="train",
    devices=(
        ledger.DevicePolicy(uuid="GPU-a", memory_limit=4 * GIB, context_bytes=300 << 20),
        ledger.DevicePolicy(uuid="GPU-b", memory_limit=6 * GIB),
    ),
)


@pytest.fixture
def share(tmp_path: Path) -> Path:
    ledger.create(tmp_path, POLICY)
    return tmp_path


def test_reads_what_was_made(share: Path) -> None:
    read = ledger.read(share)

    assert read.policy == POLICY
    assert read.devices == (ledger.DeviceUse(used=0, peak=0, refusals=0),) * 2
    assert read.processes == ()


def test_takes_less_than_a_mebibyte(share: Path) -> None:
    assert sum(path.stat().st_blocks * 512 for path in share.iterdir()) < 1 << 20


def test_changes_a_limit(share: Path) -> None:
    assert ledger.set_limit(share, 1, 2 * GIB) == 0

    policy = ledger.read(share).policy
    assert policy.devices[1].memory_limit == 2 * GIB
    assert policy.devices[0].memory_limit == 4 * GIB
    assert policy.generation == 2


def _set_used(share: Path, used: int) -> None:
    path = share / "usage"
    data = bytearray(path.read_bytes())
    at = layout.USAGE_DEVICES_AT + layout.USAGE_DEVICE_TOTAL_VALUE_AT
    data[at : at + 8] = used.to_bytes(8, "little")
    path.write_bytes(data)


def test_keeps_the_limit_above_what_is_used(share: Path) -> None:
    _set_used(share, 3 * GIB)

    with pytest.raises(LimitBelowUseError, match=r"3Gi .* 2Gi") as caught:
        ledger.set_limit(share, 0, 2 * GIB)

    assert (caught.value.need, caught.value.have) == (3 * GIB, 2 * GIB)
    assert ledger.read(share).policy.devices[0].memory_limit == 4 * GIB
    assert ledger.set_limit(share, 0, 2 * GIB, force=True) == 3 * GIB
    assert ledger.read(share).policy.devices[0].memory_limit == 2 * GIB


ATTACH = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
own = ctypes.create_string_buffer(4096)
assert library.allot_ledger_open(own, sys.argv[2].encode()) == 0
assert library.allot_ledger_attach(own) == 0
library.allot_ledger_charge(own, 1, ctypes.c_uint64(12345))
library.allot_ledger_set_context(own, 1, ctypes.c_uint64(45))
print("ready", flush=True)
sys.stdin.read()
"""


def test_lists_live_processes_and_reclaims_dead_ones(share: Path, native_dir: Path) -> None:
    library = native_dir / "liballotment-ledger.so"
    with subprocess.Popen(
        [sys.executable, "-c", ATTACH, library, share],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        read = ledger.read(share)
        (process,) = read.processes
        assert process.pid == owner.pid
        assert process.used == (0, 12345)
        assert process.context == (0, 45)
        assert process.command.startswith(sys.executable)
        stat = Path(f"/proc/{owner.pid}/stat").read_text()
        assert process.start_time == int(stat.rpartition(")")[2].split()[19])
        assert read.devices[1].used == 12345
        assert not read.has_dead
        assert ledger.reap(share) == 0
        owner.kill()

    assert ledger.read(share).processes == ()
    assert ledger.read(share).has_dead
    assert ledger.reap(share) == 0, "the driver may not have freed its memory yet"
    assert ledger.read(share).devices[1].used == 12345
    with pytest.raises(LimitBelowUseError) as refused:
        ledger.set_limit(share, 1, 12000)
    assert (refused.value.hint or "").startswith("some of it is of programs that have ended")
    assert ledger.reap(share, asked_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME)) == 1
    assert not ledger.read(share).has_dead
    assert ledger.read(share).devices[1] == ledger.DeviceUse(used=0, peak=12345, refusals=0)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("policy", 0, "has 0 bytes"),
        ("policy", 100, "has 100 bytes"),
        ("usage", 4096, "has 4096 bytes"),
    ],
)
def test_refuses_a_truncated_file(share: Path, name: str, size: int, message: str) -> None:
    with (share / name).open("r+b") as file:
        file.truncate(size)

    with pytest.raises(LedgerError, match=message) as caught:
        ledger.read(share)
    assert str(share / name) in caught.value.message
    assert caught.value.hint is not None
    with pytest.raises(LedgerError, match=str(share)):
        ledger.reap(share)
    with pytest.raises(LedgerError, match=str(share)):
        ledger.set_limit(share, 0, GIB)


def test_refuses_a_newer_version(share: Path) -> None:
    with (share / "usage").open("r+b") as file:
        file.seek(layout.USAGE_VERSION_AT)
        file.write((layout.LEDGER_VERSION + 1).to_bytes(4, "little"))

    with pytest.raises(LedgerError, match="ledger version 3, this program reads 2"):
        ledger.read(share)


def test_a_second_creation_leaves_the_first_whole(share: Path) -> None:
    with pytest.raises(LedgerError, match="exists"):
        ledger.create(share, POLICY)

    assert ledger.read(share).policy == POLICY


def test_a_failed_creation_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "usage").mkdir()

    with pytest.raises(LedgerError):
        ledger.create(tmp_path, POLICY)

    assert [path.name for path in tmp_path.iterdir()] == ["usage"]


@pytest.mark.parametrize("name", ["x" * 64, "ä" * 32])
def test_refuses_names_that_do_not_fit(tmp_path: Path, name: str) -> None:
    policy = ledger.LedgerPolicy(share_id="1", share_name=name, devices=POLICY.devices)

    with pytest.raises(LedgerError, match="at most 63"):
        ledger.create(tmp_path, policy)


@pytest.mark.parametrize("count", [0, 17])
def test_refuses_a_number_of_devices_that_does_not_fit(tmp_path: Path, count: int) -> None:
    device = ledger.DevicePolicy(uuid="GPU-a", memory_limit=1)

    with pytest.raises(LedgerError, match="1 to 16"):
        ledger.create(
            tmp_path, ledger.LedgerPolicy(share_id="1", share_name="n", devices=(device,) * count)
        )


@given(data=st.data())
def test_foreign_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    try:
        ledger.create(folder, POLICY)
        name = data.draw(st.sampled_from(["policy", "usage"]))
        content = bytearray((folder / name).read_bytes())
        for _ in range(data.draw(st.integers(1, 8))):
            at = data.draw(st.integers(0, min(len(content), 4096) - 8))
            content[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
        (folder / name).write_bytes(content)
        with contextlib.suppress(LedgerError):
            assert 0 < len(ledger.read(folder).devices) <= layout.MAX_DEVICES
    finally:
        shutil.rmtree(folder)


def test_the_layout_is_the_headers(root: Path, cc: list[str]) -> None:
    script = root / "tools" / "generate_ledger_layout.py"

    subprocess.run([sys.executable, script, "--check", "--cc", shlex.join(cc)], check=True)


def test_a_tenant_that_holds_the_policys_lock_holds_up_nobody(share: Path) -> None:
    with (share / "policy").open("rb") as tenant:  # as a container has it: read-only
        fcntl.flock(tenant, fcntl.LOCK_EX)

        def took() -> float:
            begun = time.monotonic()
            assert ledger.set_limit(share, 0, 2 * GIB) == 0
            return time.monotonic() - begun

        assert undisturbed(took, lambda seconds: seconds < AT_ONCE_S) < AT_ONCE_S
    assert ledger.read(share).policy.devices[0].memory_limit == 2 * GIB


def test_what_a_program_appended_is_taken_away(share: Path) -> None:
    path = share / "usage"
    before = path.read_bytes()
    assert ledger.cut_usage(share) == 0
    with path.open("ab") as file:
        file.write(b"x" * (1 << 20))
    assert ledger.cut_usage(share) == 1 << 20
    assert path.read_bytes() == before
    os.truncate(path, 1 << 40)
    assert ledger.cut_usage(share) == (1 << 40) - len(before)
    assert path.read_bytes() == before


def test_what_was_taken_behind_the_end_is_given_back(share: Path) -> None:
    path = share / "usage"
    size = path.stat().st_size
    with path.open("r+b") as file:
        # FALLOC_FL_KEEP_SIZE, which Python has no name for.
        libc = ctypes.CDLL(None, use_errno=True)
        where = (ctypes.c_long(size), ctypes.c_long(32 << 20))
        if libc.fallocate(file.fileno(), 1, *where) != 0:
            pytest.skip(f"this file system cannot: {os.strerror(ctypes.get_errno())}")
    assert path.stat().st_size == size
    assert ledger.cut_usage(share) > 30 << 20
    assert (path.stat().st_size, path.stat().st_blocks * 512 < 4 << 20) == (size, True)


def test_a_file_that_is_too_short_is_not_made_longer(share: Path) -> None:
    os.truncate(share / "usage", 4096)
    assert ledger.cut_usage(share) == 0
    assert (share / "usage").stat().st_size == 4096


def test_only_a_file_is_cut(share: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x" * (2 << 20))
    (share / "usage").unlink()
    (share / "usage").symlink_to(other)
    assert ledger.cut_usage(share) == 0
    assert other.stat().st_size == 2 << 20


@pytest.mark.parametrize("count", [0, layout.MAX_DEVICES + 1])
def test_refuses_a_policy_with_an_impossible_number_of_devices(share: Path, count: int) -> None:
    path = share / "policy"
    data = bytearray(path.read_bytes())
    at = layout.POLICY_DEVICE_COUNT_AT
    data[at : at + 4] = count.to_bytes(4, "little")
    path.write_bytes(data)

    with pytest.raises(LedgerError, match=f"it names {count} devices"):
        ledger.read(share)


NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


@pytest.fixture
def foreign_share(common_folder: Path) -> Iterator[Path]:
    """A share of root's, seen by another user."""
    ledger.create(common_folder, POLICY)
    os.seteuid(NOBODY)
    try:
        yield common_folder
    finally:
        os.seteuid(0)


@needs_root
def test_another_users_share_is_read_and_its_dead_are_left_to_it(foreign_share: Path) -> None:
    assert ledger.read(foreign_share).policy == POLICY
    assert ledger.reap(foreign_share) == 0


@needs_root
def test_another_users_limit_is_not_changed(foreign_share: Path) -> None:
    with pytest.raises(LedgerError, match="Permission denied"):
        ledger.set_limit(foreign_share, 0, GIB)

    assert ledger.read(foreign_share).policy == POLICY

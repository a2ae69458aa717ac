# SPDX-License-Identifier: Apache-2.0
"""Which devices a program of a share sees, what it is told when its ledger is unusable, and what
happens to programs that are in no share, or stand before the driver themselves."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shim_hosts import Share, ShimHosts

ShareMaker = Callable[..., Share]
GIB = 1 << 30
NO_DEVICE = "100"
SYSTEM_NOT_READY = "802"
LIMITS = (4 * GIB, 2 * GIB)

# native/ledger.h
SLOTS = 768
SLOT_LOCK_BASE = 0x40000000
POLICY_VERSION_AT = 8


def seen(hosts: ShimHosts, share: Share, **variables: str) -> list[str]:
    """What cuInit gives, then UUID and bytes of each device."""
    done = hosts.run([hosts.program("host_devices")], hosts.environment(share, **variables))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        pytest.param(None, (0, 1), id="all-of-the-share"),
        pytest.param("0", (0,), id="index-counts-in-the-share"),
        pytest.param("1", (1,), id="second"),
        pytest.param("1,0", (1, 0), id="reordered"),
        pytest.param(" 1 , 0 ", (1, 0), id="blanks"),
        pytest.param("0,5,1", (0,), id="ends-at-the-first-invalid"),
        pytest.param("0,1,", (0, 1), id="ends-with-a-comma"),
        pytest.param("{1}", (1,), id="uuid"),
        pytest.param("{1},{0}", (1, 0), id="uuids-reordered"),
        pytest.param("{1:.12},0", (1, 0), id="shortened-uuid-and-index"),
        pytest.param("GPU-", (), id="fits-both"),
        pytest.param("", (), id="empty"),
        pytest.param("-1", (), id="minus-one"),
        pytest.param("2", (), id="beyond-the-share"),
        pytest.param("NoDevFiles", (), id="a-word"),
        pytest.param("{other}", (), id="uuid-of-another-tenant"),
        pytest.param("MIG-01234567-89ab-cdef-0123-456789abcdef", (), id="mig-of-another-tenant"),
    ],
)
def test_visible_devices(
    choice: str | None, wanted: tuple[int, ...], *, shim_hosts: ShimHosts, share_of: ShareMaker
) -> None:
    share = share_of("a100-80gb:4", order=(2, 0), limits=LIMITS)
    variables = {}
    if choice is not None:
        # Of the machine's four devices, one that the share does not have.
        whole = share_of("a100-80gb:4", order=(1, 3), limits=LIMITS)
        variables["CUDA_VISIBLE_DEVICES"] = choice.format(*share.uuids, other=whole.uuids[0])
    expected = [f"{share.uuids[i]} {LIMITS[i]}" for i in wanted]
    assert seen(shim_hosts, share, **variables) == (["0", *expected] if wanted else [NO_DEVICE])


@pytest.mark.parametrize("choice", [None, "1,0", "{1},{0}"])
def test_charges_follow_the_device_not_the_index(
    choice: str | None, *, shim_hosts: ShimHosts, share_of: ShareMaker
) -> None:
    share = share_of("a100-80gb:4", order=(2, 0), limits=LIMITS)
    chosen = {} if choice is None else {"CUDA_VISIBLE_DEVICES": choice.format(*share.uuids)}
    done = shim_hosts.run(
        [shim_hosts.program("host_devices"), "1"], shim_hosts.environment(share, **chosen)
    )
    assert (done.returncode, done.stderr) == (0, "")
    used = [int(line) > 0 for line in done.stdout.splitlines()[-2:]]
    assert used == ([False, True] if choice is None else [True, False])


def test_a_program_in_no_share_sees_the_machine(
    shim_hosts: ShimHosts, share_of: ShareMaker
) -> None:
    share = share_of("a100-80gb:4", order=(2, 0), limits=LIMITS)
    environment = shim_hosts.environment(share)
    del environment["ALLOTMENT_SHARE"]
    done = shim_hosts.run([shim_hosts.program("host_devices")], environment)
    lines = done.stdout.splitlines()
    assert lines[0] == "0"
    assert len(lines) == 5
    assert all(int(line.split()[1]) > 70 * GIB for line in lines[1:])


def test_a_library_that_starts_the_gpu_before_the_shim_s_constructor(
    shim_hosts: ShimHosts, share_of: ShareMaker
) -> None:
    """The libraries that the loader searches first are those whose constructors run last."""
    share = share_of("a100-80gb:4", order=(2, 0), limits=LIMITS)
    plugin = shim_hosts.library("plugin", "-l:libcuda.so.1", "-ldl", output="plugin.so")
    preloaded = f"{shim_hosts.shim}:{plugin}"
    lines = seen(shim_hosts, share, LD_PRELOAD=preloaded, PLUGIN_STARTS_EARLY="1")
    assert lines == ["0", *(f"{share.uuids[i]} {LIMITS[i]}" for i in (0, 1))]


def test_a_program_with_its_own_entry_point(
    shim_hosts: ShimHosts, share_of: ShareMaker, tmp_path: Path
) -> None:
    # Exported, so that the driver's name leads to the program for everyone.
    done = shim_hosts.run(
        [shim_hosts.program("host_next")], shim_hosts.environment(share_of()), cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("knows_contexts", [True, False], ids=["known-cost", "measured-cost"])
def test_context_cost(
    *, knows_contexts: bool, shim_hosts: ShimHosts, share_of: ShareMaker, tmp_path: Path
) -> None:
    for case in (
        "starts_with_a_context",
        "explicit_contexts",
        "contexts_cost_the_same_beside_threads_that_allocate",
    ):
        share = share_of(knows_contexts=knows_contexts)
        shim_hosts.expect("host_memory", case, share, cwd=tmp_path)


# ---- unusable ledgers ----


def truncate(share: Path, name: str) -> None:
    os.truncate(share / name, 100)


def overwrite(share: Path, name: str, at: int, data: bytes) -> None:
    with (share / name).open("r+b") as file:
        file.seek(at)
        file.write(data)


def assert_refused(hosts: ShimHosts, share: Share, next_step: str) -> None:
    done = hosts.run([hosts.program("host_devices")], hosts.environment(share))
    assert (done.returncode, done.stdout) == (0, f"{SYSTEM_NOT_READY}\n")
    (told,) = done.stderr.splitlines()
    assert told.startswith("allotment: no CUDA in this program: the ledger of its share (")
    assert told.endswith(next_step)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda share: (share / "policy").unlink(), id="no-policy"),
        pytest.param(lambda share: (share / "usage").unlink(), id="no-usage"),
        pytest.param(lambda share: truncate(share, "policy"), id="truncated-policy"),
        pytest.param(lambda share: truncate(share, "usage"), id="truncated-usage"),
        pytest.param(lambda share: overwrite(share, "policy", 0, b"nonsense"), id="magic"),
        pytest.param(lambda share: overwrite(share, "usage", 0, b"nonsense"), id="usage-magic"),
        pytest.param(
            lambda share: overwrite(share, "policy", POLICY_VERSION_AT, b"\x09\0\0\0"),
            id="version",
        ),
        pytest.param(
            lambda share: overwrite(share, "policy", POLICY_VERSION_AT + 4, b"\xff\0\0\0"),
            id="device-count",
        ),
    ],
)
def test_an_unusable_ledger_means_no_gpu(
    damage: Callable[[Path], object], *, shim_hosts: ShimHosts, share_of: ShareMaker
) -> None:
    share = share_of()
    damage(share.directory)
    assert_refused(shim_hosts, share, "start it again with `allot run`")


@pytest.fixture
def lock_slots() -> Iterator[Callable[[Path], None]]:
    """Takes every slot's lock of a share, as so many processes would."""
    descriptors = []

    def lock(usage: Path) -> None:
        descriptor = os.open(usage, os.O_RDWR)
        descriptors.append(descriptor)
        # F_OFD_SETLK with struct flock {type, whence, start, length, pid}.
        wanted = struct.pack("hhxxxxqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, SLOT_LOCK_BASE, SLOTS, 0)
        fcntl.fcntl(descriptor, 37, wanted)

    yield lock
    for descriptor in descriptors:
        os.close(descriptor)


def test_no_slot_left_means_no_gpu(
    lock_slots: Callable[[Path], None], *, shim_hosts: ShimHosts, share_of: ShareMaker
) -> None:
    share = share_of()
    lock_slots(share.directory / "usage")
    assert_refused(shim_hosts, share, "has no room for another process; end some")


def test_nobody_to_tell_the_reason_ends_no_program(
    shim_hosts: ShimHosts, share_of: ShareMaker
) -> None:
    share = share_of()
    (share.directory / "usage").unlink()
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [shim_hosts.program("host_devices")],
        env=shim_hosts.environment(share),
        stdout=subprocess.PIPE,
        stderr=writer,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, f"{SYSTEM_NOT_READY}\n")


WITHOUT_DESCRIPTORS = """
import ctypes, resource
libraries = ctypes.CDLL(None)
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
first = libraries.cuInit(0)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
print(first, libraries.cuInit(0))
"""


def test_shares_that_cannot_be_listed_mean_no_gpu(
    shim_hosts: ShimHosts, share_of: ShareMaker
) -> None:
    """Whether there is a share is not known then, and the driver would be unlimited."""
    # Loaded with the program: no call has looked for a share before the first of CUDA.
    libraries = f"{shim_hosts.shim}:libcuda.so.1"
    environment = shim_hosts.environment(share_of(), LD_PRELOAD=libraries)
    del environment["ALLOTMENT_SHARE"]
    done = shim_hosts.run([sys.executable, "-c", WITHOUT_DESCRIPTORS], environment)
    assert (done.returncode, done.stdout) == (0, f"{SYSTEM_NOT_READY} {SYSTEM_NOT_READY}\n")
    assert done.stderr == (
        "allotment: no CUDA in this program: the folder of its share (/run/allotment/share):"
        " Too many open files; see `allot doctor`\n"
    )


# ---- the library itself ----


def test_wrapper_names_are_sorted(root: Path) -> None:
    text = (root / "native" / "shim" / "entries.h").read_text()
    names = [line.split("(")[1].split(")")[0] for line in text.splitlines() if "  X(" in line]
    assert len(names) > 90
    assert names == sorted(names)


def test_everything_owned_is_exported(shim_hosts: ShimHosts, root: Path) -> None:
    text = (root / "native" / "shim" / "entries.h").read_text()
    names = [line.split("(")[1].split(")")[0] for line in text.splitlines() if "  X(" in line]
    library = ctypes.CDLL(str(shim_hosts.shim))
    for name in [*names, "dlsym", "dlvsym", "dlopen", "dlmopen", "__asan_default_options"]:
        assert getattr(library, name)

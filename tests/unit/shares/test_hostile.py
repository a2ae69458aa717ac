# SPDX-License-Identifier: Apache-2.0
"""A tenant may do anything to the files that it can write; that ends no agent, and none is held up.

It may end its own programs (docs/designs/compute.md), and what it damaged is put right.

Each test runs in a process of its own, because a failure is the end of a process, by SIGBUS.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pod_node
import pytest
import yaml
from rounds import undisturbed

from allotment.ledger import leases, operations, read, reap, set_limit
from allotment.ledger.layout import USAGE_SIZE
from allotment.ledger.lease_layout import LEASES_FILE_SIZE
from allotment.model.errors import BusyError, LedgerError
from allotment.model.shares import Share
from allotment.modes import take_damages
from allotment.shares import lifecycle, recovery
from allotment.shares.folders import StateFolder
from allotment.shares.suspend import suspend

Make = Callable[..., tuple[Share, Path]]

# Truncates a file again and again, and makes it long again, while its parent works on it.
HOSTILE = """
import os, sys
size = os.path.getsize(sys.argv[1])
print("ready", flush=True)
while True:
    os.truncate(sys.argv[1], 0)
    os.truncate(sys.argv[1], size)
"""

WORK = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import pod_node
node = pod_node.Node(Path(sys.argv[2]))
from allotment.ledger import reap, set_limit
from allotment.model.errors import AllotError
first = node.prepare(pod_node.order(1))
directory = node.folder.share(first.id)
print("ready", flush=True)
sys.stdin.readline()
for number in range(2, 62):
    for work in (
        lambda: reap(directory),
        lambda: set_limit(directory, 0, 4 << 30),
        lambda: node.prepare(pod_node.order(number, "1Mi", guarantee=1)),
        lambda: node.shares.end(pod_node.order(number).id),
    ):
        try:
            work()
        except AllotError:
            pass  # which is what it should come to
print("survived", flush=True)
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("file", ["usage", "seat-0"])
def test_who_cuts_a_file_short_ends_no_agent(tmp_path: Path, native_dir: Path, file: str) -> None:
    assert native_dir.is_dir()
    with subprocess.Popen(
        [sys.executable, "-c", WORK, str(Path(pod_node.__file__).parent), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        share = StateFolder(tmp_path / "state").shares / f"{1:012x}"
        with subprocess.Popen(
            [sys.executable, "-c", HOSTILE, str(share / file)], stdout=subprocess.PIPE, text=True
        ) as hostile:
            assert hostile.stdout is not None
            assert hostile.stdout.readline() == "ready\n"
            told, _ = worker.communicate("go\n")
            hostile.kill()
    assert worker.returncode != -signal.SIGBUS
    assert worker.returncode == 0
    assert told == "survived\n"


# As a user of a folder for all can with the contract: what it cuts short it writes again. It leaves
# it whole for a while, so that some seats can be taken.
CUTS = """
import os, sys, time
data = open(sys.argv[1], "rb").read()
print("ready", flush=True)
while True:
    os.truncate(sys.argv[1], 0)
    with open(sys.argv[1], "r+b") as file:
        file.write(data)
    time.sleep(0.001)
"""

SEATS = """
import sys
from pathlib import Path
from allotment.ledger import leases
from allotment.model.compute import Compute
from allotment.model.errors import AllotError
device, taken = Path(sys.argv[1]), 0
for _ in range(5000):
    try:
        seat = leases.take(device, "x", leases.Terms(Compute()))
        leases.free(device, seat)
        taken += 1
    except AllotError:
        pass  # which is what it should come to
print("survived", taken > 0)
"""


def test_who_cuts_a_contract_short_ends_no_command(tmp_path: Path, native_dir: Path) -> None:
    assert native_dir.is_dir()
    device = tmp_path / "GPU-0"
    device.mkdir()
    leases.create_device(device, "GPU-0")
    with subprocess.Popen(
        [sys.executable, "-c", CUTS, device / "contract"], stdout=subprocess.PIPE, text=True
    ) as hostile:
        assert hostile.stdout is not None
        assert hostile.stdout.readline() == "ready\n"
        done = subprocess.run(
            [sys.executable, "-c", SEATS, device], capture_output=True, text=True, check=False
        )
        hostile.kill()
    assert (done.returncode, done.stdout) == (0, "survived True\n")


# As root of a container can with its read-only mount: a new lease as soon as one is to end.
LEASE = """
import fcntl, os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
descriptor = os.open(sys.argv[1], os.O_RDONLY)
while True:
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, int(sys.argv[2]))
    except BlockingIOError:
        print("refused", flush=True)
        break
    print("held", flush=True)
    signal.sigwait({signal.SIGIO})
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
"""


@contextlib.contextmanager
def hold_lease(path: Path, kind: int = fcntl.F_RDLCK) -> Iterator[Callable[[], str]]:
    """Begin to hold a lease on a file; the result returns what became of it next."""
    with subprocess.Popen(
        [sys.executable, "-c", LEASE, path, str(kind)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        try:
            yield holder.stdout.readline
        finally:
            holder.kill()


def test_a_lease_on_a_contract_keeps_nobody_from_its_device(
    folder: StateFolder, make: Make
) -> None:
    first, directory = make("1Gi")
    with hold_lease(directory / "contract-0") as became:
        assert became() == "held\n"
        second, _ = make("1Gi")
    assert {each.id for each in recovery.list_shares(folder)} == {first.id, second.id}


@pytest.mark.parametrize("file", ["policy", "usage"])
def test_a_lease_on_the_ledger_does_not_refuse_its_resize(node_share: Path, file: str) -> None:
    with hold_lease(node_share / file) as became:
        assert became() == "held\n"
        set_limit(node_share, 0, 8 << 30)
    with hold_lease(node_share / file) as became:
        assert became() == "held\n"
        assert reap(node_share) == 0
    assert read(node_share).policy.devices[0].memory_limit == 8 << 30


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        *((file, fcntl.F_RDLCK) for file in ("contract-0", "policy", "usage", "seat-0")),
        ("../../shim/*/*", fcntl.F_WRLCK),
    ],
)
def test_on_a_node_nobody_gets_a_lease(
    tmp_path: Path, native_dir: Path, file: str, kind: int
) -> None:
    assert native_dir.is_dir()
    node = pod_node.Node(tmp_path)
    share = node.prepare(pod_node.order(1))
    (path,) = (node.folder.shares / share.id).glob(file)
    with hold_lease(path, kind) as became:
        assert became() == "refused\n"
    node.shares = shares = node.restarted()
    with hold_lease(path, kind) as became:
        assert became() == "held\n"
        shares.tidy()
        assert became() == "refused\n"


@pytest.mark.parametrize("length", [0, 20_000, LEASES_FILE_SIZE + (8 << 20)])
def test_what_a_tenant_damaged_is_put_right_and_told(
    folder: StateFolder, make: Make, length: int
) -> None:
    share, directory = make("1Gi")
    take_damages()
    os.truncate(directory / "seat-0", length)
    os.truncate(directory / "usage", USAGE_SIZE + (8 << 20))
    with folder.locked():
        recovery.recover(folder)
    assert (directory / "seat-0").stat().st_size == LEASES_FILE_SIZE
    assert (directory / "usage").stat().st_size == USAGE_SIZE
    (found,) = recovery.list_shares(folder)
    assert found.problem is None
    told = take_damages()
    assert [(each.shares, each.device) for each in told] == [
        ((share.id,), ""),
        ((share.id,), share.devices[0].uuid),
    ]


AGENT = """
import sys
from pathlib import Path
from allotment.ledger import cut_usage, read
directory = Path(sys.argv[1])
print(cut_usage(directory), read(directory).policy.share_id)
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv"
)
def test_no_mode_and_owner_keep_the_agent_from_a_tenants_file(node_share: Path) -> None:
    """Root in a container can change both, and then write on until the node's /run is full."""
    root = Path(__file__).parents[3]
    manifest = yaml.safe_load_all((root / "deploy/manifests/agent.yaml").read_text("utf-8"))
    (pod,) = (each["spec"]["template"]["spec"] for each in manifest if each["kind"] == "DaemonSet")
    (rights,) = (
        each["securityContext"]["capabilities"]["add"]
        for each in pod["containers"]
        if "add" in each["securityContext"]["capabilities"]
    )
    usage = node_share / "usage"
    os.truncate(usage, USAGE_SIZE + (8 << 20))
    os.chown(usage, 12345, 12345)
    usage.chmod(0)
    few = ",".join(("-all", *(f"+{each.lower()}" for each in rights)))
    done = subprocess.run(
        ["setpriv", "--inh-caps", "-all", "--bounding-set", few, sys.executable, "-c", AGENT,
         node_share],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (f"{8 << 20} ab\n", "")
    assert usage.stat().st_size == USAGE_SIZE


@pytest.mark.measured
def test_a_share_starts_beside_a_tenant_that_holds_every_lock(
    folder: StateFolder, make: Make
) -> None:
    _, directory = make("1Gi")
    with contextlib.ExitStack() as tenant:
        for path in directory.iterdir():
            if path.is_file() and path.name not in {"share.json", "traces.json"}:  # those it has
                file = tenant.enter_context(path.open("rb"))
                fcntl.flock(file, fcntl.LOCK_EX)

        def took() -> float:
            begun = time.monotonic()
            share, _ = make("1Gi")
            lifecycle.destroy(folder, lifecycle.find(folder, share.id), force=True)
            return time.monotonic() - begun

        # Half a second for each of the two changes of the contract, where such a lock was waited
        # for.
        assert undisturbed(took, lambda seconds: seconds < 0.8) < 0.8


def test_who_holds_the_lock_of_a_share_is_named(folder: StateFolder, make: Make) -> None:
    _, directory = make("1Gi", name="train")
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        holder = f"train is being suspended or resumed: process {os.getpid()} of "
        with pytest.raises(BusyError, match=holder):
            suspend(folder, "train", lambda _: {}, patience_s=1)
    finally:
        os.close(descriptor)


def test_a_folder_of_a_runtimes_making_is_removed(folder: StateFolder, make: Make) -> None:
    share, directory = make("1Gi")
    made = folder.shares / f"{9:012x}"
    for name in ("policy", "usage", "seat-0"):
        (made / name).mkdir(parents=True)
    empty = folder.shares / f"{10:012x}"
    empty.mkdir()
    recorded = folder.shares / f"{11:012x}"
    recorded.mkdir()
    (recorded / "policy").write_bytes(b"x")
    with folder.locked():
        there = {each.id for each in recovery.recover(folder)}
    assert there == {share.id, recorded.name}
    assert sorted(folder.shares.iterdir()) == sorted([directory, recorded])


def test_a_file_that_is_short_is_an_error(node_share: Path) -> None:
    os.truncate(node_share / "usage", 4096)
    with pytest.raises(LedgerError):
        reap(node_share)
    with pytest.raises(LedgerError):
        set_limit(node_share, 0, 1 << 30)


def test_a_file_of_any_length_costs_no_more_to_read(node_share: Path) -> None:
    os.truncate(node_share / "usage", 1 << 40)
    assert read(node_share).devices[0].used == 0
    assert (node_share / "usage").stat().st_size > USAGE_SIZE


def test_a_signal_of_ones_own_is_as_before(node_share: Path) -> None:
    before = signal.getsignal(signal.SIGBUS)
    met = []
    signal.signal(signal.SIGBUS, lambda *_: met.append(1))
    try:
        reap(node_share)
        os.kill(os.getpid(), signal.SIGBUS)
    finally:
        signal.signal(signal.SIGBUS, before)
    assert met == [1]
    assert operations.reap(node_share) == 0


@pytest.fixture
def node_share(tmp_path: Path, native_dir: Path) -> Path:
    from allotment.ledger import DevicePolicy, LedgerPolicy, create

    assert native_dir.is_dir()
    create(tmp_path, LedgerPolicy("ab", "ab", (DevicePolicy("GPU-0", 4 << 30),)))
    return tmp_path


SHORT = """
import ctypes, os, sys
from allotment.ledger import leases, operations
library, ledger = leases.library(), operations._Ledger()
assert library.allot_ledger_open(ctypes.byref(ledger), os.fsencode(sys.argv[1])) == 0
os.truncate(sys.argv[1] + "/usage", 0)
print(library.allot_ledger_reap(ctypes.byref(ledger)))
library.allot_ledger_close(ctypes.byref(ledger))
"""


def test_a_page_that_went_away_is_an_error(node_share: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHORT, str(node_share)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "-22\n")

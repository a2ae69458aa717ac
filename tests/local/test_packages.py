# SPDX-License-Identifier: Apache-2.0
"""The .deb in a bare Debian: built twice, installed, used by two users, removed without a trace.

BARE_DEBIAN names a folder that `debootstrap --variant=minbase --include=python3` has made before:
it is copied, and saves three minutes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import build_packages
from allotment.shares.run.namespace import can_unshare
from build_image import commit_of, project_version
from image import ARCHITECTURES, ImageError, run, wheels

SUITE = "bookworm"  # its Python, 3.11, is the oldest that a package serves
CONFIG = """\
version: v1
everyone:
  share: {memory: 20Gi, compute: 10:50}
  ceilings: {memory: 40Gi, compute: 30:60, shares: 1}
users:
  bob:
    share: {memory: 5Gi}
    ceilings: {memory: 10Gi}
"""
RUN = "allot run --simulated a100-80gb"
# What is not the package's: records of dpkg and of useradd, and what programs write by themselves.
NOT_COMPARED = re.compile(
    r"(proc|sys|dev|tmp|var/lib/dpkg|var/log|var/cache|home)(/.*)?|etc/(group|gshadow|passwd)-"
)

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0 or not can_unshare(), reason="needs root"),
    pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg is not here"),
    pytest.mark.skipif(shutil.which("go") is None, reason="go, which builds nfpm, is not here"),
]


@pytest.fixture(scope="module")
def architecture() -> str:
    return next(name for name, each in ARCHITECTURES.items() if each.machine == platform.machine())


@pytest.fixture(scope="module")
def packages(
    architecture: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[dict[Path, str]]]:
    """The packages of this machine's architecture, built twice."""
    folder = tmp_path_factory.mktemp("packages")
    epoch, _ = commit_of(project_version())
    wheel = wheels.build_allotment(folder / "wheel", epoch)
    cache = build_packages.OUTPUT / "cache"
    yield [
        build_packages.build([architecture], folder / name, cache=cache, wheel=wheel)
        for name in ("once", "twice")
    ]
    shutil.rmtree(folder)


class Machine:
    """A root folder that programs run in, with its own processes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, script: str, *, user: str = "root") -> subprocess.CompletedProcess[str]:
        enter = 'mount --bind "$0" "$0" && mount -t proc proc "$0/proc" && exec chroot "$0" "$@"'
        words = ["sh", "-c", script] if user == "root" else ["su", user, "-c", script]
        return subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", enter, self.root,
             *words],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"},
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip

    def must(self, script: str, *, user: str = "root") -> str:
        done = self(script, user=user)
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout

    def files(self) -> Mapping[str, tuple[object, ...]]:
        """Kind, mode, owner and content of all files."""
        found: dict[str, tuple[object, ...]] = {}
        for path in sorted(self.root.rglob("*")):
            name = str(path.relative_to(self.root))
            if NOT_COMPARED.fullmatch(name):
                continue
            status = path.lstat()
            content = ""
            if path.is_symlink():
                content = str(path.readlink())
            elif stat.S_ISREG(status.st_mode):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            found[name] = (status.st_mode, status.st_uid, status.st_gid, content)
        return found


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A bare Debian with the users alice, bob and carol."""
    root = tmp_path_factory.mktemp("debian") / "root"
    if made := os.environ.get("BARE_DEBIAN"):
        subprocess.run(["cp", "-a", made, root], check=True)
    else:
        _debootstrap(root)
    (root.parent).chmod(0o755)
    found = Machine(root)
    for user in ("alice", "bob", "carol"):
        found.must(f"useradd --create-home {user}")
    yield found
    shutil.rmtree(root)


def _debootstrap(root: Path) -> None:
    if shutil.which("debootstrap") is None:
        pytest.skip("debootstrap is not here")
    try:
        fields = run(["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)"])
    except ImageError as error:
        pytest.skip(f"apt has no mirror here: {error}")
    address = next(line.split()[1] for line in fields.splitlines() if line.startswith(SUITE))
    words = ["--variant=minbase", "--include=python3", SUITE, str(root), address]
    subprocess.run(["debootstrap", *words], check=True, stdout=subprocess.DEVNULL)


def test_a_build_has_the_same_bytes_twice(packages: list[dict[Path, str]]) -> None:
    once, twice = ({path.name: each for path, each in built.items()} for built in packages)
    assert once == twice
    assert {Path(name).suffix for name in once} == {".deb", ".rpm"}
    for path in packages[0]:
        if path.suffix == ".rpm":
            assert path.read_bytes()[:4] == bytes([0xED, 0xAB, 0xEE, 0xDB])  # the format's mark


def test_two_users_share_a_gpu_and_a_purge_leaves_nothing(
    machine: Machine, packages: list[dict[Path, str]]
) -> None:
    before = machine.files()
    (deb,) = (path for path in packages[0] if path.suffix == ".deb")
    shutil.copyfile(deb, machine.root / "tmp" / "allotment.deb")
    machine.must("dpkg --install /tmp/allotment.deb")
    for name in ("usr/bin/allot", "usr/share/man/man1/allot-run.1.gz",
                 "usr/share/bash-completion/completions/allot",
                 "usr/lib/systemd/system/allotment-web.service"):  # fmt: skip
        assert (machine.root / name).exists(), name
    assert machine.must("allot --version").startswith("allot")
    assert machine.must("dpkg-query --show --showformat='${Conffiles}' allotment").startswith(
        " /etc/allotment/config.yaml "
    )
    machine.must("usermod --append --groups allotment alice")
    machine.must("usermod --append --groups allotment bob")
    (machine.root / "etc/allotment/config.yaml").write_text(CONFIG, "utf-8")
    _both_have_their_parts(machine)
    _ceilings_hold(machine)
    # Root's, whose programs load the shim by /etc/ld.so.preload in a namespace of their own.
    out = machine.must(f"{RUN} --memory 4Gi -- allot burn --memory 1Gi --seconds 1 -o json")
    assert json.loads(out)
    page = machine("timeout 8 allot web --listen 127.0.0.1:0", user="alice")
    assert "http://127.0.0.1:" in page.stdout, page.stderr

    machine.must("dpkg --remove allotment")
    assert not (machine.root / "usr/lib/allotment").exists()
    assert (machine.root / "etc/allotment/config.yaml").read_text("utf-8") == CONFIG
    assert (machine.root / "run/allotment").is_dir()
    machine.must("dpkg --install /tmp/allotment.deb")
    assert (machine.root / "etc/allotment/config.yaml").read_text("utf-8") == CONFIG
    machine.must("dpkg --purge allotment")
    assert machine("dpkg-query --show allotment").returncode != 0
    after = machine.files()
    assert {name: (before.get(name), after.get(name)) for name in before.keys() | after.keys()
            if before.get(name) != after.get(name)} == {}  # fmt: skip


def _both_have_their_parts(machine: Machine) -> None:
    """Both without options: each has what the file gives it, on one GPU, and sees that alone."""
    seen = "nvidia-smi --query-gpu=uuid,memory.total --format=csv,noheader,nounits"
    script = f"""
    for user in alice bob; do
      su $user -c "{RUN} -- sh -c '{seen} > /tmp/$user; sleep 30'" &
    done
    for attempt in $(seq 100); do
      [ -s /tmp/alice ] && [ -s /tmp/bob ] && break
      sleep 0.2
    done
    su alice -c "allot ps -o json"
    """
    shares = json.loads(machine.must(script))["shares"]
    limits = sorted(each["devices"][0]["memory_limit_bytes"] >> 30 for each in shares)
    assert limits == [5, 20]
    assert len({each["devices"][0]["uuid"] for each in shares}) == 1
    sizes = [
        int((machine.root / "tmp" / user).read_text().split(",")[1]) for user in ("alice", "bob")
    ]
    assert sizes == [20 << 10, 5 << 10]


def _ceilings_hold(machine: Machine) -> None:
    for user, words, status, said in (
        ("alice", "--memory 41Gi", 2, "need 41Gi, have 40Gi"),
        ("alice", "--compute 20:80", 2, "may have 60 %"),
        ("alice", "--memory 40Gi", 0, ""),
        ("bob", "--memory 11Gi", 2, "need 11Gi, have 10Gi"),
        ("bob", f"-- {RUN} --memory 1Gi", 2, "shares do not nest"),
    ):
        end = "true" if words.startswith("--") and "allot" in words else "-- true"
        done = machine(f"{RUN} {words} {end}", user=user)
        assert (done.returncode, said in done.stderr) == (status, True), done.stderr
        if status and "nest" not in said:
            assert "/etc/allotment/config.yaml, line " in done.stderr
    two = f"{RUN} --memory 1Gi -- sleep 20 & sleep 3; {RUN} --memory 1Gi -- true"
    done = machine(two, user="alice")
    assert done.returncode == 3
    assert "alice (uid 1000) has 1 share" in done.stderr
    assert (
        "ceilings of bob (uid 1001): memory 10Gi of each GPU"
        in machine("allot doctor", user="bob").stdout
    )
    # Who is not in the group does not come in.
    done = machine("allot ps --state /run/allotment", user="carol")
    assert (done.returncode, "is not readable" in done.stderr) == (2, True), done.stderr

# SPDX-License-Identifier: Apache-2.0
"""What the .deb and the .rpm consist of. tests/local/test_packages.py installs one."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

import build_packages
from allotment.shares.allowances import parse_config
from allotment.shares.folders import StateFolder
from image import ImageError, wheels

STATIC = build_packages.STATIC
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not here")


def test_the_wheels_are_those_of_the_constraints(root: Path) -> None:
    lines = (root / "constraints.txt").read_text().splitlines()
    versions = {
        wheels.normalised(name): version
        for name, _, version in (line.partition("==") for line in lines)
        if version
    }
    pins = wheels.read_pins(build_packages.PINS)
    assert {name: version for name, (version, _) in pins.items()} == {
        name: versions[name] for name in pins
    }
    required = wheels.required(build_packages.EXTRAS)
    names = {wheels.normalised(re.split(r"[<>=!~;\s]", each)[0]) for each in required}
    assert names <= set(pins), "python tools/build_packages.py --renew-pins"


def test_the_example_sets_nothing_and_is_right_without_its_marks() -> None:
    text = (STATIC / "config.yaml").read_text("utf-8")
    assert str(parse_config(text, source="config.yaml").allowance(1)) == "none"
    head, keys, rest = text.partition("# everyone:")
    whole = head + re.sub(r"^# ?", "", keys + rest, flags=re.MULTILINE)
    config = parse_config(whole, source="config.yaml")
    assert set(config.groups) == {"research"}
    assert set(config.users) == {"alice"}
    assert str(config.allowance(1)) == (
        "memory 50% of each GPU, compute 30:100, class normal, GPUs of a share 2, shares 4,"
        " no oversubscription"
    )


@needs("systemd-analyze")
def test_systemd_finds_no_mistake_in_the_units(tmp_path: Path) -> None:
    for unit in STATIC.glob("*.service"):
        text = unit.read_text("utf-8")
        # The program is not installed here.
        (tmp_path / unit.name).write_text(text.replace("/usr/bin/allot", "/usr/bin/true"), "utf-8")
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", tmp_path / unit.name],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), unit


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(root)): (
            stat.S_IMODE(path.stat().st_mode),
            path.read_bytes().strip() if path.is_file() else b"",
        )
        for path in root.rglob("*")
    }


@needs_root
@needs("systemd-tmpfiles")
@needs("systemd-sysusers")
def test_at_boot_the_state_folder_is_as_allot_makes_it(tmp_path: Path) -> None:
    machine = tmp_path / "machine"
    for name in ("sysusers", "tmpfiles"):
        target = machine / "usr" / "lib" / f"{name}.d" / "allotment.conf"
        target.parent.mkdir(parents=True)
        shutil.copyfile(STATIC / f"{name}.conf", target)
    (machine / "etc").mkdir()
    (machine / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (machine / "etc" / "group").write_text("root:x:0:\n")
    for words in (["systemd-sysusers"], ["systemd-tmpfiles", "--create"]):
        subprocess.run([*words, f"--root={machine}", "allotment.conf"], check=True)
    assert re.search(r"^allotment:x:\d+:$", (machine / "etc/group").read_text(), re.MULTILINE)
    booted = machine / "run" / "allotment"
    group = int((machine / "etc/group").read_text().split("allotment:x:")[1].split(":")[0])
    assert (booted.stat().st_uid, booted.stat().st_gid) == (0, group)
    assert booted.stat().st_mode & 0o7777 == 0o1770
    own = tmp_path / "own"
    own.mkdir()
    own.chmod(0o1770)
    StateFolder(own).prepare()
    made = tree(own)
    # Programs look for their share there, in the machine's folder alone.
    assert tree(booted) == {**made, "share": (0o755, b"")}
    StateFolder(booted).prepare()
    assert tree(booted) == {**made, "share": (0o755, b"")}


@needs("sh")
@pytest.mark.parametrize("name", ["postinst", "prerm", "postrm"])
def test_the_scripts_are_shell(name: str) -> None:
    subprocess.run(["sh", "-n", STATIC / name], check=True)


def test_packages_of_several_pythons_lie_side_by_side(tmp_path: Path) -> None:
    for python in ("311", "312"):
        folder = tmp_path / python
        (folder / "a-1.dist-info").mkdir(parents=True)
        (folder / "a-1.dist-info" / "WHEEL").write_text(python)
        (folder / "a.py").write_text("same")
        (folder / f"a.cpython-{python}.so").write_text(python)
        build_packages.merge(folder, tmp_path / "all")
    names = {path.name for path in (tmp_path / "all").rglob("*") if path.is_file()}
    assert names == {"a.py", "a.cpython-311.so", "a.cpython-312.so"}
    (tmp_path / "313").mkdir()
    (tmp_path / "313" / "a.py").write_text("other")
    with pytest.raises(ImageError, match=r"a\.py differs"):
        build_packages.merge(tmp_path / "313", tmp_path / "all")

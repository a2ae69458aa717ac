# SPDX-License-Identifier: Apache-2.0
"""The image: layers with the same bytes, a layout as OCI has it, pins, and what is in it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from image import ARCHITECTURES, debian, sbom, wheels
from image.layers import Layer, write_layer
from image.layout import CONFIG, INDEX, LAYER, MANIFEST, Image, write_archive, write_layout

EPOCH = 1_700_000_000
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def fill(root: Path, *, order: int, umask: int, time: int) -> Path:
    """The same tree, made in another order, by another user's habits, at another time."""
    files = {"b/run": "#!", "a/text": "text", "a/long" + "g" * 150: "name", "z": "last"}
    before = os.umask(umask)
    try:
        root.mkdir()
        for name in list(files)[::order]:
            path = root / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(files[name])
            if name == "b/run":
                path.chmod(path.stat().st_mode | 0o100)
            os.utime(path, (time, time))
        (root / "tmp").mkdir()
        (root / "link").symlink_to("a/text")
        (root / "nowhere").symlink_to("../gone/")
        if order > 0:
            (root / "twin").write_text("last")
        else:
            os.link(root / "z", root / "twin")
    finally:
        os.umask(before)
    return root


def pack(root: Path) -> Layer:
    path = root.with_suffix(".tar.gz")
    return write_layer(root, path, epoch=EPOCH, modes={"tmp": 0o1777})


@pytest.fixture
def layer(tmp_path: Path) -> Layer:
    return pack(fill(tmp_path / "tree", order=1, umask=0o022, time=1))


def test_the_same_tree_is_the_same_layer(layer: Layer, tmp_path: Path) -> None:
    other = pack(fill(tmp_path / "other", order=-1, umask=0o077, time=2_000_000_000))
    assert (other.digest, other.diff_id) == (layer.digest, layer.diff_id)
    assert other.path.read_bytes() == layer.path.read_bytes()


def test_another_content_is_another_layer(layer: Layer, tmp_path: Path) -> None:
    tree = fill(tmp_path / "other", order=1, umask=0o022, time=1)
    (tree / "a" / "text").write_text("tExt")
    assert pack(tree).diff_id != layer.diff_id


def test_a_layer_has_modes_links_and_one_time(layer: Layer) -> None:
    with tarfile.open(layer.path) as tar:
        entries = {each.name: each for each in tar}
    assert list(entries) == sorted(entries)
    assert {each.mtime for each in entries.values()} == {EPOCH}
    assert {(each.uid, each.gid, each.uname) for each in entries.values()} == {(0, 0, "")}
    modes = {name: entries[name].mode for name in ("a", "a/text", "b/run", "tmp")}
    assert modes == {"a": 0o755, "a/text": 0o644, "b/run": 0o755, "tmp": 0o1777}
    assert (entries["link"].issym(), entries["link"].linkname) == (True, "a/text")
    assert entries["nowhere"].linkname == "../gone/"
    assert entries["twin"].isreg()


def test_a_layer_knows_its_digests_and_sizes(layer: Layer) -> None:
    packed = layer.path.read_bytes()
    assert layer.digest == f"sha256:{hashlib.sha256(packed).hexdigest()}"
    assert layer.diff_id == f"sha256:{hashlib.sha256(gzip.decompress(packed)).hexdigest()}"
    assert layer.size == len(packed)
    assert layer.unpacked == len("#!textnamelastlast")
    # Flags, time, and no name behind the header.
    assert packed[3:8] == bytes(5)


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    os.mkfifo(root / "pipe")
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        pack(root)


# ---- the layout ----------------------------------------------------------------------------------


def read(layout: Path, descriptor: dict[str, Any]) -> dict[str, Any]:
    """A document of the layout, checked against its descriptor."""
    kind, _, name = descriptor["digest"].partition(":")
    content = (layout / "blobs" / kind / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == name
    assert len(content) == descriptor["size"]
    document: dict[str, Any] = json.loads(content)
    return document


@pytest.fixture
def layout(layer: Layer, tmp_path: Path) -> Path:
    images = [
        Image(architecture=name, layers=[("part", layer)], config={"Entrypoint": ["allot"]})
        for name in ARCHITECTURES
    ]
    folder = tmp_path / "layout"
    labels = {"org.opencontainers.image.version": "1"}
    name = "docker.io/library/allotment:1"
    write_layout(folder, images, name=name, epoch=EPOCH, labels=labels)
    return folder


def test_a_layout_is_as_the_specification_has_it(layout: Path, layer: Layer) -> None:
    assert json.loads((layout / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    top = json.loads((layout / "index.json").read_text())
    (described,) = top["manifests"]
    assert (top["schemaVersion"], described["mediaType"]) == (2, INDEX)
    assert described["annotations"] == {
        "io.containerd.image.name": "docker.io/library/allotment:1",
        "org.opencontainers.image.ref.name": "1",
    }
    index = read(layout, described)
    assert (index["schemaVersion"], index["mediaType"]) == (2, INDEX)
    platforms = [each["platform"] for each in index["manifests"]]
    assert platforms == [{"architecture": name, "os": "linux"} for name in ARCHITECTURES]
    for each in index["manifests"]:
        manifest = read(layout, each)
        assert each["mediaType"] == manifest["mediaType"] == MANIFEST
        assert manifest["schemaVersion"] == 2
        (packed,) = manifest["layers"]
        assert packed == {"mediaType": LAYER, "digest": layer.digest, "size": layer.size}
        assert manifest["config"]["mediaType"] == CONFIG
        config = read(layout, manifest["config"])
        assert (config["architecture"], config["os"]) == tuple(each["platform"].values())
        assert config["rootfs"] == {"type": "layers", "diff_ids": [layer.diff_id]}
        assert len(config["history"]) == 1
        assert config["created"] == "2023-11-14T22:13:20Z"
        assert config["config"]["Labels"] == {"org.opencontainers.image.version": "1"}
    blobs = [path.name for path in (layout / "blobs" / "sha256").iterdir()]
    assert len(blobs) == 1 + 2 + 2 + 1  # index, manifests, configs, the layer that both have
    assert all(DIGEST.fullmatch(f"sha256:{name}") for name in blobs)


def test_an_archive_is_the_layout(layout: Path, tmp_path: Path) -> None:
    path, again = tmp_path / "a.tar", tmp_path / "b.tar"
    write_archive(layout, path)
    os.utime(layout / "index.json", (1, 1))
    write_archive(layout, again)
    assert path.read_bytes() == again.read_bytes()
    with tarfile.open(path) as tar:
        assert {"oci-layout", "index.json"} < set(tar.getnames())


# ---- what is in it -------------------------------------------------------------------------------


def test_every_package_is_pinned_for_both_architectures() -> None:
    pins = debian.read_pins()
    by_name: dict[str, set[str]] = {}
    for pin in pins:
        by_name.setdefault(pin.name, set()).add(pin.architecture)
        assert DIGEST.fullmatch(f"sha256:{pin.sha256}")
    assert by_name
    assert {name for name, found in by_name.items() if found != set(ARCHITECTURES)} == set()


def test_the_wheels_are_those_of_the_constraints(root: Path) -> None:
    lines = (root / "constraints.txt").read_text().splitlines()
    constraints = {
        wheels.normalised(name): version
        for name, _, version in (line.partition("==") for line in lines)
        if version
    }
    pins = wheels.read_pins()
    assert {name: version for name, (version, _) in pins.items()} == {
        name: constraints[name] for name in pins
    }
    required = {wheels.normalised(re.split(r"[<>=!~;\s]", each)[0]) for each in wheels.required()}
    assert required <= set(pins), "python tools/build_image.py --renew-pins"


@pytest.mark.parametrize(
    "name",
    [
        *("./bin", "./usr/bin/python3.13", "./usr/bin/test", "./usr/lib64/ld-linux-x86-64.so.2"),
        *("./usr/lib/python3.13/ssl.py", "./usr/lib/x86_64-linux-gnu/libssl.so.3"),
        *("./usr/share/doc/libc6/copyright", "./usr/sbin/ldconfig"),
    ],
)
def test_the_image_takes(name: str) -> None:
    assert debian.is_taken(name)


@pytest.mark.parametrize(
    "name",
    [
        *("./usr/bin/sh", "./usr/bin/su", "./usr/bin/env", "./usr/share/man/man1/test.1.gz"),
        *("./usr/share/locale/de/LC_MESSAGES/coreutils.mo", "./usr/lib/python3.13/test"),
        *("./usr/lib/python3.13/tkinter/font.py", "./usr/share/doc/libc6/NEWS.gz"),
        "./usr/lib/python3.13/lib-dynload/_sqlite3.cpython-313-x86_64-linux-gnu.so",
    ],
)
def test_the_image_leaves_out(name: str) -> None:
    assert not debian.is_taken(name)


def test_the_bill_names_each_part_once() -> None:
    pins = [each for each in debian.read_pins() if each.architecture == "arm64"]
    files = {Path("PyYAML-6.0.3-cp313-cp313-any.whl"): "a" * 64}
    bill = sbom.describe(
        version="1", architecture=ARCHITECTURES["arm64"], debs=pins, wheels=files, epoch=EPOCH
    )
    assert bill["spdxVersion"] == "SPDX-2.3"
    ids = [each["SPDXID"] for each in bill["packages"]]
    assert len(ids) == len(set(ids)) == len(pins) + 2
    assert [each for each in ids if not re.fullmatch(r"SPDXRef-[A-Za-z0-9.-]+", each)] == []
    related = {each["relatedSpdxElement"] for each in bill["relationships"]}
    assert related == set(ids)
    refs = {
        each["externalRefs"][0]["referenceLocator"]: each["checksums"][0]["checksumValue"]
        for each in bill["packages"][1:]
    }
    assert refs["pkg:pypi/pyyaml@6.0.3"] == "a" * 64
    assert any(ref.startswith("pkg:deb/debian/zlib1g@1%3A1.3") for ref in refs)


def test_a_library_without_symbols_is_loaded(tmp_path: Path) -> None:
    (path,) = Path(msgspec.__file__).parent.glob("_core.*.so")
    whole = path.read_bytes()
    # As some compilers leave it: with debug sections behind what is loaded.
    cut = wheels.without_symbols(whole + bytes(1000))
    assert len(cut) < len(whole)
    assert cut[:40] == whole[:40]
    library = tmp_path / "library.so"
    library.write_bytes(cut)
    code = f"import ctypes; ctypes.CDLL({str(library)!r}).PyInit__core"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert wheels.without_symbols(b"no library") == b"no library"


# ---- the whole -----------------------------------------------------------------------------------


def unpack_image(layout: Path, root: Path) -> dict[str, Any]:
    """Unpacks the image of this machine's architecture and returns its config."""
    index = read(layout, json.loads((layout / "index.json").read_text())["manifests"][0])
    manifest = read(layout, index["manifests"][0])
    for each in manifest["layers"]:
        blob = layout / "blobs" / "sha256" / each["digest"].removeprefix("sha256:")
        with tarfile.open(fileobj=io.BytesIO(blob.read_bytes())) as tar:
            tar.extractall(root, filter="tar")
    return read(layout, manifest["config"])


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_the_image_is_the_same_when_built_again_and_runs(root: Path, tmp_path: Path) -> None:
    if not shutil.which("apt-get"):
        pytest.skip("no apt-get")
    machine = platform.machine()
    name = next(each.name for each in ARCHITECTURES.values() if each.machine == machine)
    printed = set()
    for output in ("one", "two"):
        command = [sys.executable, str(root / "tools" / "build_image.py"), "--arch", name]
        where = ["--output", str(tmp_path / output), "--cache", str(root / "build/image/cache")]
        done = subprocess.run([*command, *where], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        printed.add(done.stdout.split()[-1])
    assert len(printed) == 1
    image = tmp_path / "root"
    config = unpack_image(tmp_path / "one" / "layout", image)
    assert config["config"]["Entrypoint"] == ["allot"]
    assert not (image / "usr" / "bin" / "sh").exists()
    if os.geteuid():
        return  # to run it takes a root of its own
    enter = ["/usr/sbin/chroot", "--userspec=65532:65532", str(image), "/usr/local/bin/allot"]
    for arguments in (["--version"], ["agent", "--help"], ["scheduler", "--help"]):
        subprocess.run([*enter, *arguments], env={"LANG": "C.UTF-8"}, check=True)

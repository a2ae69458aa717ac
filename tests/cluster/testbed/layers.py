# SPDX-License-Identifier: Apache-2.0
"""OCI images without a registry or an image builder: folders become layers, layers become a tar.

Both are cached by what goes in, and come out the same from the same content.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())

_OCI = "application/vnd.oci.image"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: a tar, uncompressed, since it travels nowhere."""

    path: Path

    @property
    def digest(self) -> str:
        """Also its diff id, since it is uncompressed."""
        return f"sha256:{self.path.stem}"


def make_layer(cache: Path, key: str, fill: Callable[[Path], None]) -> Layer:
    """The layer of this key; where it is not cached, of what `fill` puts into a folder."""
    remembered = cache / f"{key}.digest"
    if remembered.exists():
        layer = Layer(cache / f"{remembered.read_text(encoding='ascii')}.tar")
        if layer.path.exists():
            layer.path.touch()  # in use: see forget_unused
            return layer
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        root = Path(scratch) / "root"
        root.mkdir()
        fill(root)
        packed = Path(scratch) / "layer.tar"
        with tarfile.open(packed, "w", format=tarfile.PAX_FORMAT) as tar:
            for entry in sorted(root.iterdir()):
                tar.add(entry, entry.name, filter=_anonymous)
        with packed.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        layer = Layer(cache / f"{digest}.tar")
        packed.rename(layer.path)
    remembered.write_text(digest, encoding="ascii")
    return layer


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """The same whoever makes it, and when; readable for every user of a container."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    if entry.isdir() and not entry.mode & 0o1000:
        entry.mode = 0o755
    return entry


def make_image(
    cache: Path,
    name: str,
    layers: Sequence[Layer],
    *,
    entrypoint: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Path:
    """An OCI layout as a tar, which `ctr images import` takes. `name` is the whole reference."""
    variables = [f"{key}={value}" for key, value in (environment or {}).items()]
    config = _encode(
        {
            "architecture": ARCHITECTURE,
            "os": "linux",
            "config": {"Entrypoint": list(entrypoint), "Env": variables},
            "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
        }
    )
    manifest = _encode(
        {
            "schemaVersion": 2,
            "mediaType": f"{_OCI}.manifest.v1+json",
            "config": _describe(config, f"{_OCI}.config.v1+json"),
            "layers": [
                {
                    "mediaType": f"{_OCI}.layer.v1.tar",
                    "digest": layer.digest,
                    "size": layer.path.stat().st_size,
                }
                for layer in layers
            ],
        }
    )
    index = _encode(
        {
            "schemaVersion": 2,
            "mediaType": f"{_OCI}.index.v1+json",
            "manifests": [
                {
                    **_describe(manifest, f"{_OCI}.manifest.v1+json"),
                    "platform": {"architecture": ARCHITECTURE, "os": "linux"},
                    "annotations": {
                        "io.containerd.image.name": name,
                        "org.opencontainers.image.ref.name": name.rpartition(":")[2],
                    },
                }
            ],
        }
    )
    path = cache / f"image-{hashlib.sha256(index).hexdigest()[:24]}.tar"
    if path.exists():
        path.touch()
        return path
    unfinished = path.with_suffix(".part")
    with tarfile.open(unfinished, "w") as tar:
        _put(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _put(tar, "index.json", index)
        for blob in (config, manifest):
            _put(tar, _blob_path(_digest(blob)), blob)
        for layer in layers:
            tar.add(layer.path, _blob_path(layer.digest), filter=_anonymous)
    unfinished.rename(path)
    return path


def forget_unused(cache: Path, *, keep: int = 16) -> None:
    """Removes layers and images but the last used: each change of the source makes new ones."""
    newest_first = sorted(cache.glob("*.tar"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest_first[keep:]:
        path.unlink(missing_ok=True)
    for path in cache.iterdir():
        if path.is_dir() and path.name.startswith("tmp"):
            shutil.rmtree(path, ignore_errors=True)  # of a build that was killed


def _encode(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, sort_keys=True).encode()


def _digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def _describe(blob: bytes, media_type: str) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _blob_path(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _put(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    entry.mode = 0o644
    tar.addfile(entry, io.BytesIO(content))

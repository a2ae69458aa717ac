# SPDX-License-Identifier: Apache-2.0
"""An OCI image layout of layers (opencontainers/image-spec v1.1), and its archive.

`index.json` names one image index, which has a manifest for each architecture.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from image.layers import Layer

Document = Mapping[str, Any]

_OCI = "application/vnd.oci.image"
INDEX = f"{_OCI}.index.v1+json"
MANIFEST = f"{_OCI}.manifest.v1+json"
CONFIG = f"{_OCI}.config.v1+json"
LAYER = f"{_OCI}.layer.v1.tar+gzip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The image of one architecture: its layers from the lowest up, each with what made it."""

    architecture: str
    layers: Sequence[tuple[str, Layer]]
    config: Document
    """`Entrypoint`, `Env`, `User` and so on, as the specification names them."""


def write_layout(
    folder: Path, images: Sequence[Image], *, name: str, epoch: int, labels: Mapping[str, str]
) -> str:
    """Writes the layout of the images as `folder`, an earlier one removed; the digest of the index.

    `name` is the whole reference, with the tag. `labels`: also the annotations of the manifests.
    """
    shutil.rmtree(folder, ignore_errors=True)
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(document: Document, media_type: str) -> dict[str, Any]:
        content = encode(document)
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    manifests = []
    for image in images:
        config = put(_config(image, epoch, labels), CONFIG)
        for _, layer in image.layers:
            shutil.copyfile(layer.path, blobs / layer.digest.removeprefix("sha256:"))
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": config,
            "layers": [
                {"mediaType": LAYER, "digest": layer.digest, "size": layer.size}
                for _, layer in image.layers
            ],
            "annotations": dict(labels),
        }
        platform = {"architecture": image.architecture, "os": "linux"}
        manifests.append({**put(manifest, MANIFEST), "platform": platform})
    index = put(
        {
            "schemaVersion": 2,
            "mediaType": INDEX,
            "manifests": manifests,
            "annotations": dict(labels),
        },
        INDEX,
    )
    names = {
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": name.rpartition(":")[2],
    }
    top = {
        "schemaVersion": 2,
        "mediaType": INDEX,
        "manifests": [{**index, "annotations": names}],
    }
    (folder / "index.json").write_bytes(encode(top))
    (folder / "oci-layout").write_bytes(encode({"imageLayoutVersion": "1.0.0"}))
    return str(index["digest"])


def write_archive(layout: Path, path: Path) -> None:
    """Packs a layout as one tar, which `ctr images import` and `podman load` read."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for file in sorted(each for each in layout.rglob("*") if each.is_file()):
            content = file.read_bytes()
            entry = tarfile.TarInfo(file.relative_to(layout).as_posix())
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def encode(document: Document) -> bytes:
    """A document as its one text."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def time_of(epoch: int) -> str:
    """A time as RFC 3339 has it."""
    return datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _config(image: Image, epoch: int, labels: Mapping[str, str]) -> Document:
    created = time_of(epoch)
    return {
        "architecture": image.architecture,
        "os": "linux",
        "created": created,
        "config": {**image.config, "Labels": dict(labels)},
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for _, layer in image.layers]},
        "history": [{"created": created, "created_by": what} for what, _ in image.layers],
    }

# SPDX-License-Identifier: Apache-2.0
"""What is in the image, as SPDX 2.3: each .deb and each wheel by version, address and digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from image import Architecture
from image.debian import Package
from image.layout import encode, time_of
from image.wheels import normalised

_NAMESPACE = "https://allotment.dev/spdx"


def describe(
    *,
    version: str,
    architecture: Architecture,
    debs: Sequence[Package],
    wheels: Mapping[Path, str],
    epoch: int,
) -> dict[str, Any]:
    """The document of one architecture's image. `wheels`: files and their SHA-256."""
    image = {
        "SPDXID": "SPDXRef-image",
        "name": "allotment",
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseDeclared": "Apache-2.0",
        "primaryPackagePurpose": "CONTAINER",
    }
    packages = [
        *(_debian(each) for each in debs),
        *(_wheel(path, digest) for path, digest in wheels.items()),
    ]
    packages.sort(key=lambda package: str(package["SPDXID"]))
    name = f"allotment-{version}-linux-{architecture.name}"
    content = hashlib.sha256(encode({"packages": packages})).hexdigest()
    relations = [("SPDXRef-DOCUMENT", "DESCRIBES", "SPDXRef-image")]
    relations += [("SPDXRef-image", "CONTAINS", str(each["SPDXID"])) for each in packages]
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": name,
        "documentNamespace": f"{_NAMESPACE}/{name}-{content[:32]}",
        "creationInfo": {
            "created": time_of(epoch),
            "creators": ["Tool: allotment-build_image"],
        },
        "packages": [image, *packages],
        "relationships": [
            {"spdxElementId": one, "relationshipType": kind, "relatedSpdxElement": other}
            for one, kind, other in relations
        ],
    }


def _debian(package: Package) -> dict[str, Any]:
    purl = (
        f"pkg:deb/debian/{quote(package.name)}@{quote(package.version, safe='')}"
        f"?arch={package.architecture}&distro=debian-13"
    )
    return _package("deb", package.name, package.version, purl, package.sha256)


def _wheel(path: Path, digest: str) -> dict[str, Any]:
    name, version, *_ = path.name.split("-")
    name = normalised(name)
    return _package("python", name, version, f"pkg:pypi/{name}@{quote(version, safe='')}", digest)


def _package(kind: str, name: str, version: str, purl: str, digest: str) -> dict[str, Any]:
    return {
        "SPDXID": f"SPDXRef-{kind}-{name.replace('+', '.')}",
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "checksums": [{"algorithm": "SHA256", "checksumValue": digest}],
        "externalRefs": [
            {
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": purl,
            }
        ],
    }

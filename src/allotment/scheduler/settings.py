# SPDX-License-Identifier: Apache-2.0
"""How the scheduler was started."""

from dataclasses import dataclass, field
from pathlib import Path

from allotment.dialects.systems import DialectSettings
from allotment.kube.leases import LeaseTimes
from allotment.model.requests import SOFT
from allotment.scheduler.book import BookSettings
from allotment.scheduler.webhook_serving import ListenSettings

__all__ = ["LeaseName", "Reached", "SchedulerSettings"]


@dataclass(frozen=True, slots=True)
class LeaseName:
    """The Lease by which replicas agree who answers."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """Write it as people do."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Reached:
    """By which Service, without a selector, kube-scheduler reaches the replica that leads."""

    namespace: str
    service: str
    address: str
    """This replica's IP address, which is written there while it leads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """`allot scheduler`'s options."""

    kubeconfig: Path | None = None
    """None: a pod's service account."""
    listen: str = "127.0.0.1:9447"
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    metrics_listen: str | None = None
    """None: figures and probes are on the same port alone."""
    node_policies: tuple[str, ...] = ("fragmentation",)
    device_policies: tuple[str, ...] = ("fragmentation",)
    modes: tuple[str, ...] = (SOFT,)
    """For pods that leave it open, the best first."""
    book: BookSettings = field(default=BookSettings())
    lease: LeaseName | None = None
    """None: this one leads alone."""
    reached: Reached | None = None
    """None: somebody else leads kube-scheduler to the replica that leads."""
    lease_times: LeaseTimes = field(default=LeaseTimes())
    webhook: ListenSettings | None = None
    """None: this one serves none."""
    dialects: DialectSettings = field(default=DialectSettings())
    take_over: frozenset[str] = frozenset()
    """Dialects of the systems whose running pods are counted."""
    identity: str = ""
    """Among the replicas."""
    log_format: str = "text"
    verbose: bool = False

# SPDX-License-Identifier: Apache-2.0
"""What `allot scheduler` was told, checked, and what its parts are told of it.

Apart from the command, which only says what options there are. Nothing of the scheduler is imported
before it is needed: its libraries are an extra.
"""

import os
import re
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from allotment.cli.options import installed
from allotment.model.errors import UsageError

if TYPE_CHECKING:
    from allotment.scheduler.settings import Reached, SchedulerSettings
    from allotment.scheduler.webhook_serving import ListenSettings

__all__ = ["LEASE", "WEBHOOK", "SchedulerOptions", "namespaced", "preferred_modes", "systems"]

LEASE = "allotment-system/allotment-scheduler"
WEBHOOK = "allotment-system/allotment-webhook"
_OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """The options of the command line, by their names there."""

    kubeconfig: Path | None
    listen: str
    tls_cert_file: Path | None
    tls_key_file: Path | None
    metrics_listen: str | None
    policies: str
    gpu_policies: str
    modes: str
    candidates: int
    webhook_listen: str
    webhook_service: str
    webhook_configuration: str
    webhook_client_ca: Path | None
    client_secret: str
    scheduler_name: str
    dialects: Path | None
    take_over: str
    lease: str
    lease_duration: int
    lease_renew: float
    service: str
    pod_ip: str
    identity: str | None
    print_config: bool
    plain_pods: bool
    print_manifests: bool
    log_format: str
    verbose: bool

    def check(self) -> None:
        """Refuse a name that no scheduler has: pods that have it would wait for ever.

        Raises `UsageError`.
        """
        name = self.scheduler_name
        if name and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", name):
            raise UsageError(
                f"--scheduler-name {name!r} is no name of a scheduler",
                hint="write that of kube-scheduler's profile, as in allotment-scheduler",
            )

    def run(self) -> None:
        """Run the scheduler until it is told to end. Raises `AllotError`."""
        with installed("allot scheduler", extra="kubernetes"):
            from allotment.scheduler.running import run
        run(self.settings())

    def settings(self) -> "SchedulerSettings":
        """Return what its parts are told. Raises `UsageError`."""
        with installed("allot scheduler", extra="kubernetes"):
            from allotment.kube.leases import LeaseTimes
            from allotment.scheduler.book import BookSettings
            from allotment.scheduler.settings import LeaseName, SchedulerSettings
            from allotment.scheduler.settings_file import read_file_settings
        self._check_together()
        lease = None
        if self.lease != _OFF:
            lease = LeaseName(*namespaced(self.lease, "a Lease", f"{LEASE}, or off"))
        written = read_file_settings(self.dialects)
        reached = self._reached()
        listening = self._listening(reached)
        return SchedulerSettings(
            kubeconfig=self.kubeconfig,
            listen=self.listen,
            tls_certificate=self.tls_cert_file,
            tls_key=self.tls_key_file,
            metrics_listen=self.metrics_listen,
            node_policies=_chain("--policy", self.policies),
            device_policies=_chain("--gpu-policy", self.gpu_policies),
            modes=preferred_modes(self.modes),
            take_over=systems(self.take_over),
            identity=self.identity or os.uname().nodename,
            log_format=self.log_format,
            verbose=self.verbose,
            book=BookSettings(candidates=self.candidates),
            lease=lease,
            reached=reached,
            dialects=written.dialects,
            webhook=None if listening is None else written.listening(listening),
            lease_times=LeaseTimes(
                lease_s=self.lease_duration,
                renew_s=self.lease_renew,
                margin_s=min(0.5, self.lease_duration / 6),
            ),
        )

    def _check_together(self) -> None:
        """Refuse what each option may say, and not beside the others."""
        if self.lease_renew > self.lease_duration / 2:
            raise UsageError(
                f"a lease of {self.lease_duration} s cannot be renewed every"
                f" {self.lease_renew:g} s",
                hint=f"renew it every {self.lease_duration / 3:g} s: one renewal may fail then",
            )
        has_webhook = self.webhook_listen != _OFF
        if self.client_secret and (not has_webhook or self.tls_cert_file is not None):
            raise UsageError(
                "--client-secret is for a certificate of the webhook's authority, which is kept by"
                " it",
                hint="give --webhook-listen too, and no --tls-cert-file",
            )
        if self.webhook_client_ca is not None and not has_webhook:
            raise UsageError(
                "--webhook-client-ca says whom the webhook answers, and there is none",
                hint="give --webhook-listen too; kube-scheduler is asked for a certificate by"
                " --client-secret",
            )

    def _reached(self) -> "Reached | None":
        """Take the Service's name apart, and look at the address; None: no Service."""
        from allotment.scheduler.settings import Reached

        if self.service == _OFF:
            return None
        named = namespaced(self.service, "a Service", f"{LEASE}, or off")
        try:
            return Reached(*named, str(ip_address(self.pod_ip)))
        except ValueError as error:
            raise UsageError(
                f"--service {self.service} needs an address to lead to, and {self.pod_ip!r} is"
                " none",
                hint="--pod-ip names it; in a pod, POD_IP from status.podIP",
            ) from error

    def _listening(self, reached: "Reached | None") -> "ListenSettings | None":
        """Return the webhook's part; None: there is none."""
        from allotment.scheduler.certificates_keeping import service_names
        from allotment.scheduler.webhook import WebhookSettings
        from allotment.scheduler.webhook_serving import GuardSettings, ListenSettings

        namespace, service = namespaced(self.webhook_service, "a Service", WEBHOOK)
        if self.webhook_listen == _OFF:
            return None
        names = () if reached is None else service_names(reached.service, reached.namespace)
        return ListenSettings(
            listen=self.webhook_listen,
            namespace=namespace,
            service=service,
            secret=service,
            configuration=self.webhook_configuration,
            client_authority=self.webhook_client_ca,
            guard=GuardSettings(secret=self.client_secret, names=names)
            if self.client_secret
            else None,
            webhook=WebhookSettings(scheduler_name=self.scheduler_name),
        )


def namespaced(text: str, what: str, example: str) -> tuple[str, str]:
    """Take NAMESPACE/NAME apart. Raises `UsageError`."""
    namespace, slash, name = text.partition("/")
    if not slash or not namespace or not name or "/" in name:
        raise UsageError(
            f"{text!r} does not name {what}", hint=f"write NAMESPACE/NAME, as in {example}"
        )
    return namespace, name


def _chain(option: str, text: str) -> tuple[str, ...]:
    """Take a chain of policies apart; `Cluster` refuses those that are not there."""
    names = tuple(part.strip() for part in text.split(","))
    if not all(names) or len(set(names)) != len(names):
        raise UsageError(
            f"{option} {text!r} is no chain of policies",
            hint="write different policies with commas: fragmentation,topology",
        )
    return names


def preferred_modes(text: str) -> tuple[str, ...]:
    """Take a list of modes apart, the best first, or the word for one. Raises `UsageError`."""
    from allotment.dialects.modes import STRONGEST, STRONGEST_FIRST
    from allotment.dialects.protocol import meant, shown
    from allotment.model.requests import EXCLUSIVE, MIG, MPS, SOFT

    known = (SOFT, MIG, MPS, EXCLUSIVE)
    names = tuple(part.strip() for part in text.split(","))
    if names == (STRONGEST,):
        return STRONGEST_FIRST
    for each in names:
        if each not in known:
            raise UsageError(
                f"--modes has {shown(each)}, in which no GPU is for parts{meant(each, known)}",
                hint=f"write some of {', '.join(known)}, the best first, or {STRONGEST}",
            )
    if len(set(names)) != len(names):
        raise UsageError(f"--modes {text!r} has a mode twice", hint="keep one of them")
    return names


def systems(text: str) -> frozenset[str]:
    """Take a list of dialects apart whose systems say what they gave. Raises `UsageError`."""
    from allotment.dialects.protocol import meant, shown
    from allotment.dialects.taking_over import SYSTEMS

    names = [each.strip() for each in text.split(",")] if text else []
    for each in names:
        if each not in SYSTEMS:
            raise UsageError(
                f"--take-over has {shown(each)}, of which nothing is read{meant(each, SYSTEMS)}",
                hint=f"write some of: {', '.join(SYSTEMS)}; drain nodes of other systems",
            )
    return frozenset(names)

# SPDX-License-Identifier: Apache-2.0
"""The options of `allot scheduler`, checked and converted to its settings.

Imports nothing of the scheduler at load time: its libraries are an extra.
"""

import os
import re
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from allotment.cli.options import installed
from allotment.model.compute import WHOLE
from allotment.model.errors import UsageError

if TYPE_CHECKING:
    from allotment.scheduler.serving import ListenSettings
    from allotment.scheduler.settings import Reached, SchedulerSettings

LEASE = "allotment-system/allotment-scheduler"
WEBHOOK = "allotment-system/allotment-webhook"
_OFF = "off"


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line, by name."""

    kubeconfig: Path | None
    listen: str
    tls_cert_file: Path | None
    tls_key_file: Path | None
    metrics_listen: str | None
    policies: str
    gpu_policies: str
    modes: str
    compute_floor: int
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
    otlp_endpoint: str | None
    log_format: str
    verbose: bool

    def check(self) -> None:
        """Refuse an invalid --scheduler-name: its pods would wait forever. Raises `UsageError`."""
        name = self.scheduler_name
        if name and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", name):
            raise UsageError(
                f"--scheduler-name {name!r} is not a valid scheduler name",
                hint="give the name of a kube-scheduler profile, for example allotment-scheduler",
            )

    def run(self) -> None:
        with installed("allot scheduler", extra="kubernetes"):
            from allotment.scheduler.running import run
        run(self.settings())

    def settings(self) -> "SchedulerSettings":
        with installed("allot scheduler", extra="kubernetes"):
            from allotment.kube.leases import LeaseTimes
            from allotment.scheduler.core.reservations import BookSettings
            from allotment.scheduler.settings import (
                LeaseName,
                SchedulerSettings,
                read_file_settings,
            )
        self._check_together()
        lease = None
        if self.lease != _OFF:
            lease = LeaseName(*namespaced(self.lease, "a Lease", f"{LEASE}, or off"))
        file_settings = read_file_settings(self.dialects)
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
            compute_floor=self.compute_floor * WHOLE // 100,
            take_over=systems(self.take_over),
            identity=self.identity or os.uname().nodename,
            otlp_endpoint=self.otlp_endpoint,
            log_format=self.log_format,
            verbose=self.verbose,
            book=BookSettings(candidates=self.candidates),
            lease=lease,
            reached=reached,
            dialects=file_settings.dialects,
            webhook=None if listening is None else file_settings.listening(listening),
            lease_times=LeaseTimes(
                lease_s=self.lease_duration,
                renew_s=self.lease_renew,
                margin_s=min(0.5, self.lease_duration / 6),
            ),
        )

    def _check_together(self) -> None:
        if self.lease_renew > self.lease_duration / 2:
            raise UsageError(
                f"a lease of {self.lease_duration} s cannot be renewed every"
                f" {self.lease_renew:g} s",
                hint=f"set --lease-renew to {self.lease_duration / 3:g}: then one renewal may fail",
            )
        has_webhook = self.webhook_listen != _OFF
        if self.client_secret and (not has_webhook or self.tls_cert_file is not None):
            raise UsageError(
                "--client-secret needs the certificate authority of the webhook",
                hint="add --webhook-listen, and remove --tls-cert-file",
            )
        if self.webhook_client_ca is not None and not has_webhook:
            raise UsageError(
                "--webhook-client-ca needs the webhook, which is off",
                hint="add --webhook-listen; for kube-scheduler's certificate use --client-secret",
            )

    def _reached(self) -> "Reached | None":
        """Parse --service and --pod-ip; None: no Service."""
        from allotment.scheduler.settings import Reached

        if self.service == _OFF:
            return None
        named = namespaced(self.service, "a Service", f"{LEASE}, or off")
        try:
            return Reached(*named, str(ip_address(self.pod_ip)))
        except ValueError as error:
            raise UsageError(
                f"--service {self.service} needs the address of this replica, and {self.pod_ip!r}"
                " is not an address",
                hint="give --pod-ip; in a pod, set POD_IP from status.podIP",
            ) from error

    def _listening(self, reached: "Reached | None") -> "ListenSettings | None":
        """Return the settings of the webhook; None: no webhook."""
        from allotment.scheduler.admission.webhook import WebhookSettings
        from allotment.scheduler.serving import GuardSettings, ListenSettings
        from allotment.scheduler.tls.rotation import service_names

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
    namespace, slash, name = text.partition("/")
    if not slash or not namespace or not name or "/" in name:
        raise UsageError(
            f"{text!r} does not name {what}", hint=f"write NAMESPACE/NAME, for example {example}"
        )
    return namespace, name


def _chain(option: str, text: str) -> tuple[str, ...]:
    """Split a chain of policies; `Cluster` refuses unknown names."""
    names = tuple(part.strip() for part in text.split(","))
    if not all(names) or len(set(names)) != len(names):
        raise UsageError(
            f"{option} {text!r} is not a chain of policies",
            hint="separate different policies by commas: fragmentation,topology",
        )
    return names


def preferred_modes(text: str) -> tuple[str, ...]:
    """Parse modes in order of preference, or `strongest`. Raises `UsageError`."""
    from allotment.dialects.own.protocol import STRONGEST, shown
    from allotment.model.formats import meant
    from allotment.model.modes import POD_MODES, STRONGEST_FIRST

    names = tuple(part.strip() for part in text.split(","))
    if names == (STRONGEST,):
        return STRONGEST_FIRST
    for mode in names:
        if mode not in POD_MODES:
            raise UsageError(
                f"--modes: {shown(mode)} is not a mode for parts of GPUs{meant(mode, POD_MODES)}",
                hint=f"give modes in order of preference ({', '.join(POD_MODES)}), or {STRONGEST}",
            )
    if len(set(names)) != len(names):
        raise UsageError(f"--modes {text!r} names a mode twice", hint="remove one of them")
    return names


def systems(text: str) -> frozenset[str]:
    """Parse the dialects of --take-over. Raises `UsageError`."""
    from allotment.dialects.foreign.settings import SYSTEMS
    from allotment.dialects.own.protocol import shown
    from allotment.model.formats import meant

    names = [name.strip() for name in text.split(",")] if text else []
    for name in names:
        if name not in SYSTEMS:
            raise UsageError(
                f"--take-over: cannot read pods of {shown(name)}{meant(name, SYSTEMS)}",
                hint=f"dialects: {', '.join(SYSTEMS)}; drain nodes of other systems",
            )
    return frozenset(names)

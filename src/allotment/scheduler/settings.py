# SPDX-License-Identifier: Apache-2.0
"""The scheduler's settings: options, and the administrator's file."""

import re
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec

from allotment.dialects.foreign.settings import (
    DialectSettings,
    read_section,
    read_sections,
    settings_of,
)
from allotment.dialects.own.protocol import shown
from allotment.kube.leases import LeaseTimes
from allotment.model.compute import DEFAULT_FLOOR
from allotment.model.errors import QuantityError, UsageError
from allotment.model.modes import SOFT
from allotment.model.quantities import parse_memory
from allotment.model.structs import replace
from allotment.scheduler.admission.webhook import Defaults, WebhookSettings
from allotment.scheduler.core.reservations import BookSettings
from allotment.scheduler.serving import ListenSettings
from allotment.scheduler.tls.authority import Lives


class LeaseName(msgspec.Struct, frozen=True):
    """The Lease by which replicas elect a leader."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Reached(msgspec.Struct, frozen=True):
    """The Service without selector by which kube-scheduler reaches the leader."""

    namespace: str
    service: str
    address: str
    """This replica's IP address, written to the Service's endpoints while it leads."""


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`allot scheduler`'s options."""

    kubeconfig: Path | None = None
    """None: the pod's service account."""
    listen: str = "127.0.0.1:9447"
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    metrics_listen: str | None = None
    """None: metrics and probes are only on the main port."""
    node_policies: tuple[str, ...] = ("fragmentation",)
    device_policies: tuple[str, ...] = ("fragmentation",)
    modes: tuple[str, ...] = (SOFT,)
    """Default modes of pods, the best first."""
    compute_floor: int = DEFAULT_FLOOR
    """Basis points of a GPU's time kept for its pods without a compute request."""
    book: BookSettings = msgspec.field(default=BookSettings())
    lease: LeaseName | None = None
    """None: this replica always leads."""
    reached: Reached | None = None
    """None: another program routes kube-scheduler to the leader."""
    lease_times: LeaseTimes = msgspec.field(default=LeaseTimes())
    webhook: ListenSettings | None = None
    """None: no webhook."""
    dialects: DialectSettings = msgspec.field(default=DialectSettings())
    take_over: frozenset[str] = frozenset()
    """Dialects whose running pods count."""
    identity: str = ""
    """This replica's name."""
    otlp_endpoint: str | None = None
    """The collector of traces; None: as OpenTelemetry's variables say."""
    log_format: str = "text"
    verbose: bool = False


WEBHOOK: Final = "webhook"
"""The section that does not belong to a dialect."""
_MOST_DEVICES: Final = 64
_MOST_PERCENT: Final = 100
_MOST_DAYS: Final = 36_500
_LEAST_AUTHORITY_DAYS: Final = 365
"""kube-scheduler reads trusted authorities only at start: after each new authority it must be
restarted, within 30 days."""
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_HOST: Final = re.compile(r"[0-9a-zA-Z:]([-0-9a-zA-Z.:]{0,251}[0-9a-zA-Z])?")
"""A DNS name or an address."""
_USUAL: Final = WebhookSettings()
_LIVES: Final = Lives()


class DefaultsSection(msgspec.Struct, kw_only=True, rename="camel"):
    """Defaults of containers that ask for a part of a GPU without an amount."""

    gpus: int = _USUAL.defaults.gpus
    memory: str | int | None = None
    compute: int | None = None


class CertificateSection(msgspec.Struct, kw_only=True, rename="camel"):
    """The webhook's certificates."""

    names: tuple[str, ...] = ()
    days: int = _LIVES.server.days
    authority_days: int = _LIVES.authority.days


class WebhookSection(msgspec.Struct, kw_only=True, rename="camel"):
    """The section `webhook` as written in the file."""

    defaults: dict[str, Any] = {}
    certificate: dict[str, Any] = {}
    overwrites_scheduler: bool = _USUAL.overwrites_scheduler
    replaced_schedulers: tuple[str, ...] = tuple(sorted(_USUAL.replaced_schedulers))
    may_be_privileged: bool = _USUAL.may_be_privileged
    ignored_namespaces: tuple[str, ...] = tuple(sorted(_USUAL.ignored_namespaces))


class FileSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the file; defaults without one."""

    dialects: DialectSettings = msgspec.field(default=DialectSettings())
    webhook: WebhookSettings = _USUAL
    names: tuple[str, ...] = ()
    """Additional names and addresses for the webhook's certificate."""
    lives: Lives = _LIVES

    def listening(self, settings: ListenSettings) -> ListenSettings:
        webhook = replace(self.webhook, scheduler_name=settings.webhook.scheduler_name)
        return replace(settings, names=self.names, lives=self.lives, webhook=webhook)


def read_file_settings(path: Path | None) -> FileSettings:
    """Read the file, if any. Raises `UsageError`."""
    if path is None:
        return FileSettings()
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(
            f"--dialects {path} cannot be read: {problem}", hint="name a YAML file in UTF-8"
        ) from error
    try:
        return load_file_settings(text)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", hint=error.hint) from error


def load_file_settings(text: str) -> FileSettings:
    """Parse the file's text; empty: all defaults. Raises `UsageError`."""
    sections = read_sections(text)
    webhook = sections.pop(WEBHOOK, None)
    settings = FileSettings(dialects=settings_of(sections, more=(WEBHOOK,)))
    return settings if webhook is None else _with_webhook(settings, webhook)


def _with_webhook(settings: FileSettings, written: object) -> FileSettings:
    section = read_section(WEBHOOK, written, WebhookSection)
    defaults = read_section(f"{WEBHOOK}.defaults", section.defaults, DefaultsSection)
    certificate = read_section(f"{WEBHOOK}.certificate", section.certificate, CertificateSection)
    days = _bounded("certificate.days", certificate.days, least=1, most=_MOST_DAYS)
    authority = _bounded(
        "certificate.authorityDays",
        certificate.authority_days,
        least=max(days, _LEAST_AUTHORITY_DAYS),
        most=_MOST_DAYS,
        why="kube-scheduler must be restarted for each new authority",
    )
    return replace(
        settings,
        names=_names("certificate.names", certificate.names, pattern=_HOST),
        lives=replace(
            settings.lives, server=timedelta(days=days), authority=timedelta(days=authority)
        ),
        webhook=WebhookSettings(
            overwrites_scheduler=section.overwrites_scheduler,
            replaced_schedulers=frozenset(
                _names("replacedSchedulers", section.replaced_schedulers)
            ),
            may_be_privileged=section.may_be_privileged,
            ignored_namespaces=frozenset(_names("ignoredNamespaces", section.ignored_namespaces)),
            defaults=_defaults(defaults),
        ),
    )


def _defaults(section: DefaultsSection) -> Defaults:
    memory = None
    if section.memory is not None:
        where = f"{WEBHOOK}.defaults.memory"
        try:
            amount = parse_memory(str(section.memory))
        except QuantityError as error:
            raise UsageError(f"{where}: {error.message}", hint=error.hint) from error
        if amount.size_bytes is None:
            raise UsageError(
                f"{where}: {section.memory} is a part of a GPU, not an amount",
                hint="write an amount, like 4Gi: containers without an amount get it on each GPU,"
                " whatever its size",
            )
        memory = amount.size_bytes
    return Defaults(
        gpus=_bounded("defaults.gpus", section.gpus, least=0, most=_MOST_DEVICES),
        memory_bytes=memory,
        compute_percent=None
        if section.compute is None
        else _bounded("defaults.compute", section.compute, least=0, most=_MOST_PERCENT),
    )


def _names(
    where: str, written: Collection[str], *, pattern: re.Pattern[str] = _NAME
) -> tuple[str, ...]:
    for name in written:
        if not pattern.fullmatch(name):
            raise UsageError(
                f"{WEBHOOK}.{where} has {shown(name)}, which is not a name",
                hint="write names of Kubernetes, as in [legacy, team-a]",
            )
    return tuple(dict.fromkeys(written))


def _bounded(where: str, number: int, *, least: int, most: int, why: str = "") -> int:
    if not least <= number <= most:
        raise UsageError(
            f"{WEBHOOK}.{where} is {number}",
            hint=f"write a number from {least} to {most}" + (f": {why}" if why else ""),
        )
    return number

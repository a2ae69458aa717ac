# SPDX-License-Identifier: Apache-2.0
"""What a cluster's administrator writes into a file: the dialects' settings, and the webhook's.

    disabled: [kai]
    hami: {memoryFactor: 10}
    webhook:
      defaults: {memory: 4Gi, compute: 10}
      ignoredNamespaces: [kube-system, legacy]

One file, because both are one contract: what the webhook is asked about, and what the policies
refuse, are made of it (`admission_manifests`).
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec

from allotment.dialects.protocol import shown
from allotment.dialects.systems import (
    DialectSettings,
    read_section,
    read_sections,
    settings_of,
)
from allotment.model.errors import QuantityError, UsageError
from allotment.model.quantities import parse_memory
from allotment.scheduler.certificates import Lives
from allotment.scheduler.webhook import Defaults, WebhookSettings
from allotment.scheduler.webhook_serving import ListenSettings

__all__ = ["WEBHOOK", "FileSettings", "WebhookSection", "load_file_settings", "read_file_settings"]

WEBHOOK: Final = "webhook"
"""The section that is no dialect's."""
_MOST_DEVICES: Final = 64
_MOST_PERCENT: Final = 100
_MOST_DAYS: Final = 36_500
_LEAST_AUTHORITY_DAYS: Final = 365
"""kube-scheduler reads whom to trust at its start alone: with each new authority it has to be
started again, within 30 days."""
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_HOST: Final = re.compile(r"[0-9a-zA-Z:]([-0-9a-zA-Z.:]{0,251}[0-9a-zA-Z])?")
"""A DNS name, or an address."""
_USUAL: Final = WebhookSettings()
_LIVES: Final = Lives()


class DefaultsSection(msgspec.Struct, kw_only=True, rename="camel"):
    """What a container has that asks for a part of a GPU and does not say how much."""

    gpus: int = _USUAL.defaults.gpus
    memory: str | int | None = None
    compute: int | None = None


class CertificateSection(msgspec.Struct, kw_only=True, rename="camel"):
    """How the webhook's certificates are made."""

    names: tuple[str, ...] = ()
    days: int = _LIVES.server.days
    authority_days: int = _LIVES.authority.days


class WebhookSection(msgspec.Struct, kw_only=True, rename="camel"):
    """The section `webhook`, as it is written."""

    defaults: dict[str, Any] = {}
    certificate: dict[str, Any] = {}
    overwrites_scheduler: bool = _USUAL.overwrites_scheduler
    replaced_schedulers: tuple[str, ...] = tuple(sorted(_USUAL.replaced_schedulers))
    may_be_privileged: bool = _USUAL.may_be_privileged
    ignored_namespaces: tuple[str, ...] = tuple(sorted(_USUAL.ignored_namespaces))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """All that the file says; without one, what holds by default."""

    dialects: DialectSettings = field(default=DialectSettings())
    webhook: WebhookSettings = _USUAL
    names: tuple[str, ...] = ()
    """More names and addresses for the webhook's certificate."""
    lives: Lives = _LIVES

    def listening(self, settings: ListenSettings) -> ListenSettings:
        """Return the webhook's settings with what the file says of them."""
        webhook = replace(self.webhook, scheduler_name=settings.webhook.scheduler_name)
        return replace(settings, names=self.names, lives=self.lives, webhook=webhook)


def read_file_settings(path: Path | None) -> FileSettings:
    """Read the file; None: there is none. Raises `UsageError`."""
    if path is None:
        return FileSettings()
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is not in UTF-8"
        raise UsageError(
            f"--dialects {path} cannot be read: {problem}", hint="it is a YAML file, in UTF-8"
        ) from error
    try:
        return load_file_settings(text)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", hint=error.hint) from error


def load_file_settings(text: str) -> FileSettings:
    """Read the file's text; empty: all by default. Raises `UsageError`."""
    sections = read_sections(text)
    webhook = sections.pop(WEBHOOK, None)
    found = FileSettings(dialects=settings_of(sections, more=(WEBHOOK,)))
    return found if webhook is None else _with_webhook(found, webhook)


def _with_webhook(found: FileSettings, written: object) -> FileSettings:
    its = read_section(WEBHOOK, written, WebhookSection)
    defaults = read_section(f"{WEBHOOK}.defaults", its.defaults, DefaultsSection)
    certificate = read_section(f"{WEBHOOK}.certificate", its.certificate, CertificateSection)
    days = _bounded("certificate.days", certificate.days, least=1, most=_MOST_DAYS)
    authority = _bounded(
        "certificate.authorityDays",
        certificate.authority_days,
        least=max(days, _LEAST_AUTHORITY_DAYS),
        most=_MOST_DAYS,
        why="kube-scheduler has to be started again for each new authority",
    )
    return replace(
        found,
        names=_names("certificate.names", certificate.names, pattern=_HOST),
        lives=replace(
            found.lives, server=timedelta(days=days), authority=timedelta(days=authority)
        ),
        webhook=WebhookSettings(
            overwrites_scheduler=its.overwrites_scheduler,
            replaced_schedulers=frozenset(_names("replacedSchedulers", its.replaced_schedulers)),
            may_be_privileged=its.may_be_privileged,
            ignored_namespaces=frozenset(_names("ignoredNamespaces", its.ignored_namespaces)),
            defaults=_defaults(defaults),
        ),
    )


def _defaults(its: DefaultsSection) -> Defaults:
    memory = None
    if its.memory is not None:
        where = f"{WEBHOOK}.defaults.memory"
        try:
            amount = parse_memory(str(its.memory))
        except QuantityError as error:
            raise UsageError(f"{where}: {error.message}", hint=error.hint) from error
        if amount.size_bytes is None:
            raise UsageError(
                f"{where}: {its.memory} is a part of a GPU, and not an amount",
                hint="write an amount, like 4Gi: a container that does not say has that much of"
                " each GPU, whatever its size",
            )
        memory = amount.size_bytes
    return Defaults(
        gpus=_bounded("defaults.gpus", its.gpus, least=0, most=_MOST_DEVICES),
        memory_bytes=memory,
        compute_percent=None
        if its.compute is None
        else _bounded("defaults.compute", its.compute, least=0, most=_MOST_PERCENT),
    )


def _names(
    where: str, written: Collection[str], *, pattern: re.Pattern[str] = _NAME
) -> tuple[str, ...]:
    for each in written:
        if not pattern.fullmatch(each):
            raise UsageError(
                f"{WEBHOOK}.{where} has {shown(each)}, which is no name",
                hint="write names as Kubernetes has them, [legacy, team-a]",
            )
    return tuple(dict.fromkeys(written))


def _bounded(where: str, found: int, *, least: int, most: int, why: str = "") -> int:
    if not least <= found <= most:
        raise UsageError(
            f"{WEBHOOK}.{where} is {found}",
            hint=f"write a number from {least} to {most}" + (f": {why}" if why else ""),
        )
    return found

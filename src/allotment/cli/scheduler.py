# SPDX-License-Identifier: Apache-2.0
"""`allot scheduler`: which node and which GPU, for every pod that asks for part of one."""

import os
import secrets
from pathlib import Path
from typing import Any

import click

from allotment.cli.options import installed, kubeconfig_option, log_options

_LISTEN = "127.0.0.1:9447"
_LEASE = "allotment-system/allotment-scheduler"
_WEBHOOK = "allotment-system/allotment-webhook"


@click.command(short_help="Choose node and GPU of pods: kube-scheduler's extender.")
@kubeconfig_option
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default=_LISTEN,
    show_default=True,
    envvar="ALLOTMENT_LISTEN",
    help="Answer kube-scheduler there.  [env: ALLOTMENT_LISTEN]",
)
@click.option(
    "--tls-cert-file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Serve HTTPS with this certificate (PEM). It is read again when it changes.",
)
@click.option(
    "--tls-key-file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Its key.",
)
@click.option(
    "--metrics-listen",
    metavar="HOST:PORT",
    help="Serve /metrics, /healthz and /readyz there as well, in threads of their own: these answer"
    " also when the scheduler hangs.",
)
@click.option(
    "--policy",
    "policies",
    metavar="P[,P...]",
    default="fragmentation",
    show_default=True,
    help="Which node is best: policies in a chain, the next one where the one before is even.",
)
@click.option(
    "--gpu-policy",
    "gpu_policies",
    metavar="P[,P...]",
    default="fragmentation",
    show_default=True,
    help="Which of a node's GPUs is best, likewise.",
)
@click.option(
    "--candidates",
    metavar="N",
    type=click.IntRange(1, 100_000),
    default=1,
    show_default=True,
    help="How many nodes kube-scheduler is shown, the best ones. With one it scores no more.",
)
@click.option(
    "--webhook-listen",
    metavar="HOST:PORT|off",
    default="off",
    show_default=True,
    help="Answer the API server there: the mutating webhook, which translates other systems' pods."
    " Its certificates are made and renewed by itself.",
)
@click.option(
    "--webhook-service",
    metavar="NAMESPACE/NAME",
    default=_WEBHOOK,
    show_default=True,
    help="The Service by which the API server reaches it; the Secret of its certificates is named"
    " like it.",
)
@click.option(
    "--webhook-configuration",
    metavar="NAME",
    default="allotment-scheduler",
    show_default=True,
    help="The MutatingWebhookConfiguration that is told whom to trust and about which pods to ask.",
)
@click.option(
    "--client-secret",
    metavar="NAME",
    default="",
    help="Answer those alone who show a certificate of the webhook's authority, by HTTPS: one for"
    " kube-scheduler is kept in this Secret, beside the webhook's, and renewed.",
)
@click.option(
    "--scheduler-name",
    metavar="NAME",
    default="",
    help="Write this schedulerName into pods with parts of GPUs that name none; by default they"
    " keep what they name.",
)
@click.option(
    "--dialects",
    "dialects",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="What is set otherwise in a dialect or in the webhook, and which dialects are not spoken"
    " (YAML; docs/reference/config.md).",
)
@click.option(
    "--take-over",
    "take_over",
    metavar="D[,D...]",
    default="",
    help="Count what pods of these dialects' own systems have that run already: while their nodes"
    " are taken over with them, and no longer (docs/reference/dialects.md).",
)
@click.option(
    "--lease",
    metavar="NAMESPACE/NAME|off",
    default="off",
    show_default=True,
    envvar="ALLOTMENT_LEASE",
    help="Agree with other replicas on who answers, by a Lease; off: this one answers alone."
    "  [env: ALLOTMENT_LEASE]",
)
@click.option(
    "--lease-duration",
    metavar="SECONDS",
    type=click.IntRange(2, 3600),
    default=3,
    show_default=True,
    help="Without a renewal for so long, another replica answers.",
)
@click.option(
    "--lease-renew",
    metavar="SECONDS",
    type=click.FloatRange(0.1, 1200.0),
    default=1.0,
    show_default=True,
    help="How often it is renewed: at most a half of its duration.",
)
@click.option(
    "--service",
    metavar="NAMESPACE/NAME|off",
    default="off",
    show_default=True,
    help="Lead this Service, which has no selector, to the replica that answers: it writes --pod-ip"
    " into the EndpointSlice NAME-ipv4 or NAME-ipv6.",
)
@click.option(
    "--pod-ip",
    metavar="ADDRESS",
    default="",
    envvar="POD_IP",
    help="At which address this replica is reached.  [env: POD_IP]",
)
@click.option(
    "--identity",
    metavar="NAME",
    envvar="POD_NAME",
    help="This replica's name in the Lease; default: the host's and a number.  [env: POD_NAME]",
)
@click.option(
    "--print-config",
    is_flag=True,
    help="Print a kube-scheduler configuration that asks this scheduler, and end.",
)
@click.option(
    "--print-manifests",
    is_flag=True,
    help="Print the webhook's configuration and the admission policies for these --dialects, for"
    " `kubectl apply -f -`, and end.",
)
@log_options
def command(
    *,
    kubeconfig: Path | None,
    listen: str,
    tls_cert_file: Path | None,
    tls_key_file: Path | None,
    metrics_listen: str | None,
    policies: str,
    gpu_policies: str,
    candidates: int,
    webhook_listen: str,
    webhook_service: str,
    webhook_configuration: str,
    client_secret: str,
    scheduler_name: str,
    dialects: Path | None,
    take_over: str,
    lease: str,
    lease_duration: int,
    lease_renew: float,
    service: str,
    pod_ip: str,
    identity: str | None,
    print_config: bool,
    print_manifests: bool,
    log_format: str,
    verbose: bool,
) -> None:
    """Choose the node and the GPUs of every pod that asks for allotment.dev/gpu.

    Works beside a stock kube-scheduler, as its extender: kube-scheduler finds the nodes that do for
    a pod otherwise, this service says which of them is best, chooses the GPUs, and binds the pod
    with the placement written on it. What it knows it reads from nodes and pods, so it can be ended
    and started at any time; with --lease several replicas take turns.

    \b
    Examples:
      allot scheduler --print-config > kube-scheduler.yaml
      allot scheduler --dialects settings.yaml --print-manifests | kubectl apply -f -
      allot scheduler --kubeconfig ~/.kube/config --listen 127.0.0.1:9447
      allot scheduler --listen :9447 --lease allotment-system/allotment-scheduler
    """  # noqa: D301 - click's mark
    _check_scheduler(scheduler_name)
    if print_config or print_manifests:
        if print_config and print_manifests:
            raise click.UsageError("--print-config and --print-manifests are for two files")
        if print_config:
            _print_configuration(
                listen,
                service=service,
                is_tls=tls_cert_file is not None,
                is_guarded=bool(client_secret),
                scheduler=scheduler_name,
                dialects=dialects,
            )
        else:
            _print_manifests(dialects, service=webhook_service, configuration=webhook_configuration)
        return
    _start(
        {
            "kubeconfig": kubeconfig,
            "listen": listen,
            "tls_certificate": tls_cert_file,
            "tls_key": tls_key_file,
            "metrics_listen": metrics_listen,
            "node_policies": _chain("--policy", policies),
            "device_policies": _chain("--gpu-policy", gpu_policies),
            "take_over": _systems(take_over),
            "identity": identity or f"{os.uname().nodename}-{secrets.token_hex(4)}",
            "log_format": log_format,
            "verbose": verbose,
        },
        candidates=candidates,
        lease=lease,
        lease_duration=lease_duration,
        lease_renew=lease_renew,
        reached=(service, pod_ip),
        client_secret=client_secret,
        webhook=(webhook_listen, webhook_service, webhook_configuration, scheduler_name),
        dialects=dialects,
    )


def _chain(option: str, text: str) -> tuple[str, ...]:
    """Take a chain of policies apart; `Cluster` refuses those that are not there."""
    from allotment.model.errors import UsageError

    names = tuple(part.strip() for part in text.split(","))
    if not all(names) or len(set(names)) != len(names):
        raise UsageError(
            f"{option} {text!r} is no chain of policies",
            hint="write different policies with commas: fragmentation,topology",
        )
    return names


def _systems(text: str) -> frozenset[str]:
    """Take a list of dialects apart whose systems say what they gave."""
    from allotment.dialects.protocol import meant, shown
    from allotment.dialects.taking_over import SYSTEMS
    from allotment.model.errors import UsageError

    names = [each.strip() for each in text.split(",")] if text else []
    for each in names:
        if each not in SYSTEMS:
            raise UsageError(
                f"--take-over has {shown(each)}, of which nothing is read{meant(each, SYSTEMS)}",
                hint=f"write some of: {', '.join(SYSTEMS)}; drain nodes of other systems",
            )
    return frozenset(names)


def _check_scheduler(name: str) -> None:
    """Refuse a name that no scheduler has: pods that have it would wait for ever."""
    import re

    from allotment.model.errors import UsageError

    if name and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", name):
        raise UsageError(
            f"--scheduler-name {name!r} is no name of a scheduler",
            hint="write that of kube-scheduler's profile, as in allotment-scheduler",
        )


def _named(text: str, what: str, example: str) -> tuple[str, str]:
    """Take NAMESPACE/NAME apart."""
    from allotment.model.errors import UsageError

    namespace, slash, name = text.partition("/")
    if not slash or not namespace or not name or "/" in name:
        raise UsageError(
            f"{text!r} does not name {what}", hint=f"write NAMESPACE/NAME, as in {example}"
        )
    return namespace, name


def _reached(service: str, address: str) -> tuple[str, str, str] | None:
    """Take the Service's name apart, and look at the address; None: no Service."""
    from ipaddress import ip_address

    from allotment.model.errors import UsageError

    if service == "off":
        return None
    named = _named(service, "a Service", "allotment-system/allotment-scheduler, or off")
    try:
        return (*named, str(ip_address(address)))
    except ValueError as error:
        raise UsageError(
            f"--service {service} needs an address to lead to, and {address!r} is none",
            hint="--pod-ip names it; in a pod, POD_IP from status.podIP",
        ) from error


def _print_configuration(
    listen: str,
    *,
    service: str,
    is_tls: bool,
    is_guarded: bool,
    scheduler: str,
    dialects: Path | None,
) -> None:
    from allotment.metrics.serving import parse_address
    from allotment.scheduler.kube_configuration import (
        CLIENT_FILES,
        SERVER_FILES,
        kube_configuration,
    )
    from allotment.scheduler.settings_file import read_file_settings

    host, port = parse_address(listen)
    host = host if host not in {"", "0.0.0.0", "::"} else "127.0.0.1"  # noqa: S104 - not bound here
    tls = CLIENT_FILES if is_guarded else SERVER_FILES if is_tls else {}
    if service != "off":
        namespace, name = _named(service, "a Service", "allotment-system/allotment-scheduler")
        host = f"{name}.{namespace}.svc"
        # So that an address may stand in its place, where no name of a Service is known.
        tls = {"serverName": host, **tls} if tls else {}
    # None of them changes it, but what would be refused at the start is refused here.
    read_file_settings(dialects)
    text = kube_configuration(
        host=host,
        port=port,
        tls=tls,
        scheduler=scheduler or "default-scheduler",
    )
    click.echo(text, nl=False)


def _print_manifests(dialects: Path | None, *, service: str, configuration: str) -> None:
    from allotment.dialects.systems import foreign_dialects
    from allotment.scheduler.admission_keys import all_keys
    from allotment.scheduler.admission_manifests import Installation, admission_objects, as_yaml
    from allotment.scheduler.settings_file import read_file_settings

    settings = read_file_settings(dialects)
    namespace, name = _named(service, "a Service", _WEBHOOK)
    installed = Installation(
        namespace=namespace,
        service=name,
        configuration=configuration,
        ignored_namespaces=settings.webhook.ignored_namespaces,
    )
    keys = all_keys(foreign_dialects(settings.dialects))
    click.echo(as_yaml(admission_objects(keys, installed)), nl=False)


def _start(
    options: dict[str, Any],
    *,
    candidates: int,
    lease: str,
    lease_duration: int,
    lease_renew: float,
    reached: tuple[str, str],
    client_secret: str,
    webhook: tuple[str, str, str, str],
    dialects: Path | None,
) -> None:
    from allotment.model.errors import UsageError

    if lease_renew > lease_duration / 2:
        raise UsageError(
            f"a lease of {lease_duration} s cannot be renewed every {lease_renew:g} s",
            hint=f"renew it every {lease_duration / 3:g} s: one renewal may fail then",
        )
    place = None if lease == "off" else _named(lease, "a Lease", f"{_LEASE}, or off")
    led = _reached(*reached)
    service = _named(webhook[1], "a Service", _WEBHOOK)
    if client_secret and (webhook[0] == "off" or options["tls_certificate"] is not None):
        raise UsageError(
            "--client-secret is for a certificate of the webhook's authority, which is kept by it",
            hint="give --webhook-listen too, and no --tls-cert-file",
        )
    with installed("allot scheduler", extra="kubernetes"):
        from allotment.kube.leases import LeaseTimes
        from allotment.scheduler.book import BookSettings
        from allotment.scheduler.certificates_keeping import service_names
        from allotment.scheduler.running import run
        from allotment.scheduler.settings import LeaseName, Reached, SchedulerSettings
        from allotment.scheduler.settings_file import read_file_settings
        from allotment.scheduler.webhook import WebhookSettings
        from allotment.scheduler.webhook_serving import GuardSettings, ListenSettings
    written = read_file_settings(dialects)
    run(
        SchedulerSettings(
            **options,
            book=BookSettings(candidates=candidates),
            lease=None if place is None else LeaseName(*place),
            reached=None if led is None else Reached(*led),
            dialects=written.dialects,
            webhook=None
            if webhook[0] == "off"
            else written.listening(
                ListenSettings(
                    listen=webhook[0],
                    namespace=service[0],
                    service=service[1],
                    secret=service[1],
                    configuration=webhook[2],
                    guard=GuardSettings(
                        secret=client_secret, names=service_names(led[1], led[0]) if led else ()
                    )
                    if client_secret
                    else None,
                    webhook=WebhookSettings(scheduler_name=webhook[3]),
                )
            ),
            lease_times=LeaseTimes(
                lease_s=lease_duration,
                renew_s=lease_renew,
                margin_s=min(0.5, lease_duration / 6),
            ),
        )
    )

# SPDX-License-Identifier: Apache-2.0
"""`allot scheduler`: which node and which GPU, for every pod that asks for part of one."""

import os
import secrets
from pathlib import Path
from typing import Any

import click

_LISTEN = "127.0.0.1:9447"
_LEASE = "allotment-system/allotment-scheduler"

_CONFIG = """\
# A KubeSchedulerConfiguration for kube-scheduler (--config): it asks `allot scheduler` about pods
# with {resource}, and nothing about any other.
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
# All nodes are to be looked at: where some are left out, the best one may be among them.
percentageOfNodesToScore: 100
profiles:
  - schedulerName: {scheduler}
extenders:
  - urlPrefix: {url}
    filterVerb: filter
    prioritizeVerb: prioritize
    bindVerb: bind
    preemptVerb: preempt
    weight: 1
    enableHTTPS: {https}
{tls}    nodeCacheCapable: true
    ignorable: false
    httpTimeout: 30s
    managedResources:
      - name: {resource}
        ignoredByScheduler: false
      # These stay on pods that were translated, and no node offers them.
{ignored}"""


@click.command(short_help="Choose node and GPU of pods: kube-scheduler's extender.")
@click.option(
    "--kubeconfig",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="KUBECONFIG",
    help="How to reach the API server; default: a pod's service account.  [env: KUBECONFIG]",
)
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
    default="allotment-system/allotment-webhook",
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
    help="What is set otherwise in a dialect, or which is not spoken (YAML; docs/reference/"
    "dialects.md).",
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
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="How the log is written, on standard error.",
)
@click.option("--verbose", "-v", is_flag=True, help="Log every step.")
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
    scheduler_name: str,
    dialects: Path | None,
    lease: str,
    lease_duration: int,
    lease_renew: float,
    identity: str | None,
    print_config: bool,
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
      allot scheduler --kubeconfig ~/.kube/config --listen 127.0.0.1:9447
      allot scheduler --listen :9447 --lease allotment-system/allotment-scheduler
    """  # noqa: D301 - click's mark
    if print_config:
        click.echo(_configuration(listen, is_tls=tls_cert_file is not None), nl=False)
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
            "identity": identity or f"{os.uname().nodename}-{secrets.token_hex(4)}",
            "log_format": log_format,
            "verbose": verbose,
        },
        candidates=candidates,
        lease=lease,
        lease_duration=lease_duration,
        lease_renew=lease_renew,
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


def _left_over() -> list[str]:
    """Return other systems' resources that nobody counts once a pod has been translated."""
    from allotment.dialects.systems import foreign_dialects
    from allotment.scheduler.admission_keys import keys_of

    # NVIDIA's own are counted by the kubelet's plugins as ever.
    names = {
        name
        for dialect in foreign_dialects()
        if dialect.name != "nvidia"
        for name in (*keys_of(dialect).resources, *getattr(dialect, "resources", ()))
    }
    return sorted(each for each in names if "*" not in each and each != "nvidia.com/gpu")


def _named(text: str, what: str, example: str) -> tuple[str, str]:
    """Take NAMESPACE/NAME apart."""
    from allotment.model.errors import UsageError

    namespace, slash, name = text.partition("/")
    if not slash or not namespace or not name or "/" in name:
        raise UsageError(
            f"{text!r} does not name {what}", hint=f"write NAMESPACE/NAME, as in {example}"
        )
    return namespace, name


def _configuration(listen: str, *, is_tls: bool) -> str:
    from allotment.metrics.serving import parse_address

    host, port = parse_address(listen)
    host = host if host not in {"", "0.0.0.0", "::"} else "127.0.0.1"  # noqa: S104 - not bound here
    shown = f"[{host}]" if ":" in host else host
    return _CONFIG.format(
        resource="allotment.dev/gpu",
        scheduler="default-scheduler",
        url=f"{'https' if is_tls else 'http'}://{shown}:{port}",
        https="true" if is_tls else "false",
        ignored="".join(
            f"      - name: {name}\n        ignoredByScheduler: true\n" for name in _left_over()
        ),
        tls="    tlsConfig:\n      caFile: /path/of/ca.crt\n" if is_tls else "",
    )


def _start(
    options: dict[str, Any],
    *,
    candidates: int,
    lease: str,
    lease_duration: int,
    lease_renew: float,
    webhook: tuple[str, str, str, str],
    dialects: Path | None,
) -> None:
    from allotment.model.errors import PrerequisiteError, UsageError

    if lease_renew > lease_duration / 2:
        raise UsageError(
            f"a lease of {lease_duration} s cannot be renewed every {lease_renew:g} s",
            hint=f"renew it every {lease_duration / 3:g} s: one renewal may fail then",
        )
    place = None if lease == "off" else _named(lease, "a Lease", f"{_LEASE}, or off")
    service = _named(webhook[1], "a Service", "allotment-system/allotment-webhook")
    try:
        from allotment.dialects.systems import DialectSettings, load_settings
        from allotment.kube.leases import LeaseTimes
        from allotment.scheduler.book import BookSettings
        from allotment.scheduler.running import run
        from allotment.scheduler.settings import LeaseName, SchedulerSettings
        from allotment.scheduler.webhook import WebhookSettings
        from allotment.scheduler.webhook_serving import ListenSettings
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("allotment"):
            raise
        raise PrerequisiteError(
            f"`allot scheduler` needs {error.name}, which is not installed",
            hint="install what Kubernetes needs besides: pip install 'allotment[kubernetes]'",
        ) from error
    run(
        SchedulerSettings(
            **options,
            book=BookSettings(candidates=candidates),
            lease=None if place is None else LeaseName(*place),
            dialects=load_settings(dialects.read_text("utf-8")) if dialects else DialectSettings(),
            webhook=None
            if webhook[0] == "off"
            else ListenSettings(
                listen=webhook[0],
                namespace=service[0],
                service=service[1],
                secret=service[1],
                configuration=webhook[2],
                webhook=WebhookSettings(scheduler_name=webhook[3]),
            ),
            lease_times=LeaseTimes(
                lease_s=lease_duration,
                renew_s=lease_renew,
                margin_s=min(0.5, lease_duration / 6),
            ),
        )
    )

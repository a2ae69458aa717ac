# SPDX-License-Identifier: Apache-2.0
"""`allot scheduler`: the kube-scheduler extender that chooses nodes and GPUs."""

from pathlib import Path
from typing import Any

import click

from allotment.cli.options import installed, kubeconfig_option, log_options, otlp_option
from allotment.cli.scheduler_options import LEASE, WEBHOOK, SchedulerOptions, namespaced
from allotment.model.compute import DEFAULT_FLOOR, WHOLE
from allotment.model.modes import SOFT

_LISTEN = "127.0.0.1:9447"


@click.command(short_help="Choose nodes and GPUs for pods: the kube-scheduler extender.")
@kubeconfig_option
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default=_LISTEN,
    envvar="ALLOTMENT_LISTEN",
    help="Address for kube-scheduler's requests.  [env: ALLOTMENT_LISTEN]",
)
@click.option(
    "--tls-cert-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Serve HTTPS with this certificate (PEM). Reloaded when it changes.",
)
@click.option(
    "--tls-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Key of the certificate (PEM).",
)
@click.option(
    "--metrics-listen",
    metavar="HOST:PORT",
    help="Address of /metrics, /healthz and /readyz in separate threads, which answer even if the"
    " scheduler hangs.",
)
@click.option(
    "--policy",
    "policies",
    metavar="P[,P...]",
    default="fragmentation",
    help="Policies that rank nodes; each one breaks the ties of the one before.",
)
@click.option(
    "--gpu-policy",
    "gpu_policies",
    metavar="P[,P...]",
    default="fragmentation",
    help="Policies that rank the GPUs of a node, likewise.",
)
@click.option(
    "--modes",
    metavar="M[,M...]",
    default=SOFT,
    help="Modes for pods that name none, in order of preference. The first mode that fits and can"
    " satisfy the request is used. strongest is mig,soft,mps.",
)
@click.option(
    "--compute-floor",
    metavar="PERCENT",
    type=click.IntRange(0, 100),
    default=100 * DEFAULT_FLOOR // WHOLE,
    help="Percent of a GPU's compute that is not guaranteed to other pods while a pod without a"
    " compute request is on it. Such a pod waits for a GPU with so much left. 0: none.",
)
@click.option(
    "--candidates",
    metavar="N",
    type=click.IntRange(1, 100_000),
    default=1,
    help="Number of best nodes to return to kube-scheduler. With 1 it skips scoring.",
)
@click.option(
    "--webhook-listen",
    metavar="HOST:PORT|off",
    default="off",
    help="Address of the mutating webhook, which translates pods of other systems. It creates and"
    " renews its certificates itself.",
)
@click.option(
    "--webhook-service",
    metavar="NAMESPACE/NAME",
    default=WEBHOOK,
    help="Service by which the API server reaches the webhook. The Secret of its certificates has"
    " the same name.",
)
@click.option(
    "--webhook-configuration",
    metavar="NAME",
    default="allotment-scheduler",
    help="MutatingWebhookConfiguration to update with the certificate authority and the pod rules.",
)
@click.option(
    "--webhook-client-ca",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Accept only reviews with a client certificate of these authorities (PEM; reloaded when it"
    " changes). The API server must be configured to send one"
    " (docs/guides/kubernetes-scheduler.md).",
)
@click.option(
    "--client-secret",
    metavar="NAME",
    default="",
    show_default=False,
    help="Serve HTTPS and accept only client certificates of the webhook's authority. This Secret"
    " holds one for kube-scheduler, which is renewed.",
)
@click.option(
    "--scheduler-name",
    metavar="NAME",
    default="",
    show_default=False,
    help="schedulerName to write into pods with parts of GPUs that name none, and the profile for"
    " them in --print-config.  [default: unchanged, and allotment-scheduler]",
)
@click.option(
    "--dialects",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="YAML file of settings of dialects and the webhook, and of disabled dialects"
    " (docs/reference/config.md).",
)
@click.option(
    "--take-over",
    metavar="D[,D...]",
    default="",
    show_default=False,
    help="Count running pods that these dialects' own systems placed. Use it only while you migrate"
    " their nodes (docs/reference/dialects.md).",
)
@click.option(
    "--lease",
    metavar="NAMESPACE/NAME|off",
    default="off",
    envvar="ALLOTMENT_LEASE",
    help="Lease by which replicas elect the one that answers; off: a single replica."
    "  [env: ALLOTMENT_LEASE]",
)
@click.option(
    "--lease-duration",
    metavar="SECONDS",
    type=click.IntRange(2, 3600),
    default=3,
    help="After this time without a renewal, another replica takes over.",
)
@click.option(
    "--lease-renew",
    metavar="SECONDS",
    type=click.FloatRange(0.1, 1200.0),
    default=1.0,
    help="Renewal interval of the Lease: at most half of its duration.",
)
@click.option(
    "--service",
    metavar="NAMESPACE/NAME|off",
    default="off",
    help="Service without a selector to point at the replica that answers: it writes --pod-ip into"
    " the EndpointSlice NAME-ipv4 or NAME-ipv6.",
)
@click.option(
    "--pod-ip",
    metavar="ADDRESS",
    default="",
    show_default=False,
    envvar="POD_IP",
    help="Address of this replica.  [env: POD_IP]",
)
@click.option(
    "--identity",
    metavar="NAME",
    envvar="POD_NAME",
    help="Name of this replica; the Lease adds a number of the process.  [env: POD_NAME; default:"
    " the host's name]",
)
@click.option(
    "--print-config",
    is_flag=True,
    help="Print a kube-scheduler configuration for this scheduler, and exit.",
)
@click.option(
    "--plain-pods/--no-plain-pods",
    default=False,
    help="With --print-config: whether kube-scheduler also asks about pods without GPUs, to keep"
    " them off nodes whose GPUs need the CPU. Each such pod then costs one request.",
)
@click.option(
    "--print-manifests",
    is_flag=True,
    help="Print the webhook's configuration and the admission policies for these --dialects, for"
    " `kubectl apply -f -`, and exit.",
)
@otlp_option
@log_options
def command(**given: Any) -> None:  # noqa: ANN401 - by the options above, `SchedulerOptions`
    """Choose the node and the GPUs of every pod that requests allotment.dev/gpu.

    Works as an extender of a stock kube-scheduler. kube-scheduler finds the nodes that pass its own
    checks. This service ranks them, chooses the GPUs, and binds the pod with the placement as an
    annotation. It reads its state from nodes and pods, so it can be stopped and started at any
    time. With --lease, several replicas elect one that answers.

    \b
    Examples:
      allot scheduler --print-config > kube-scheduler.yaml
      allot scheduler --dialects own.yaml --print-manifests | kubectl apply -f -
      allot scheduler --kubeconfig ~/.kube/config --listen 127.0.0.1:9447
      allot scheduler --listen :9447 --lease allotment-system/allotment-scheduler
    """  # noqa: D301 - click's mark
    options = SchedulerOptions(**given)
    options.check()
    if options.print_config and options.print_manifests:
        raise click.UsageError(
            "--print-config and --print-manifests exclude each other: each prints a file"
        )
    if options.print_config or options.print_manifests:
        with installed("allot scheduler", extra="kubernetes"):
            text = configuration(options) if options.print_config else manifests(options)
        click.echo(text, nl=False)
        return
    options.run()


def configuration(options: SchedulerOptions) -> str:
    from allotment.model.addresses import parse_address
    from allotment.scheduler.admission.manifests import (
        CLIENT_FILES,
        SERVER_FILES,
        kube_configuration,
    )
    from allotment.scheduler.settings import read_file_settings

    host, port = parse_address(options.listen)
    host = host if host not in {"", "0.0.0.0", "::"} else "127.0.0.1"  # noqa: S104 - not bound here
    tls = (
        CLIENT_FILES
        if options.client_secret
        else SERVER_FILES
        if options.tls_cert_file is not None
        else {}
    )
    if options.service != "off":
        namespace, name = namespaced(options.service, "a Service", LEASE)
        host = f"{name}.{namespace}.svc"
        # An address may replace the host where no Service name resolves.
        tls = {"serverName": host, **tls} if tls else {}
    # They do not change the result, but invalid settings are refused here already.
    read_file_settings(options.dialects)
    return kube_configuration(
        host=host,
        port=port,
        tls=tls,
        scheduler=options.scheduler_name or "allotment-scheduler",
        has_plain_pods=options.plain_pods,
    )


def manifests(options: SchedulerOptions) -> str:
    from allotment.dialects.foreign.settings import foreign_dialects
    from allotment.scheduler.admission.manifests import Installation, admission_objects, as_yaml
    from allotment.scheduler.admission.rules import all_keys
    from allotment.scheduler.settings import read_file_settings

    settings = read_file_settings(options.dialects)
    namespace, name = namespaced(options.webhook_service, "a Service", WEBHOOK)
    installation = Installation(
        namespace=namespace,
        service=name,
        configuration=options.webhook_configuration,
        ignored_namespaces=settings.webhook.ignored_namespaces,
    )
    keys = all_keys(foreign_dialects(settings.dialects))
    return as_yaml(admission_objects(keys, installation))

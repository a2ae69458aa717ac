# SPDX-License-Identifier: Apache-2.0
"""`allot scheduler`: which node and which GPU, for every pod that asks for part of one."""

from pathlib import Path
from typing import Any

import click

from allotment.cli.options import kubeconfig_option, log_options
from allotment.cli.scheduler_options import WEBHOOK, SchedulerOptions

_LISTEN = "127.0.0.1:9447"


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
    "--modes",
    metavar="M[,M...]",
    default="soft",
    show_default=True,
    help="By which mode parts of GPUs are enforced, for pods that name none: the first of these for"
    " which there is room, and which can give all that is asked for; strongest: mig,soft,mps.",
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
    default=WEBHOOK,
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
    "--webhook-client-ca",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Answer those reviews alone that come with a certificate of one of these authorities (PEM;"
    " read again when it changes): the API server's, which has to be told to show one"
    " (docs/guides/kubernetes-scheduler.md).",
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
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="What is set otherwise in a dialect or in the webhook, and which dialects are not spoken"
    " (YAML; docs/reference/config.md).",
)
@click.option(
    "--take-over",
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
    help="This replica's name, in the Lease with a number of the process; default: the host's."
    "  [env: POD_NAME]",
)
@click.option(
    "--print-config",
    is_flag=True,
    help="Print a kube-scheduler configuration that asks this scheduler, and end.",
)
@click.option(
    "--plain-pods/--no-plain-pods",
    default=True,
    show_default=True,
    help="With --print-config: let kube-scheduler ask about pods without GPUs too, so that they go"
    " where they are in the way least; or about pods with GPUs alone.",
)
@click.option(
    "--print-manifests",
    is_flag=True,
    help="Print the webhook's configuration and the admission policies for these --dialects, for"
    " `kubectl apply -f -`, and end.",
)
@log_options
def command(**given: Any) -> None:  # noqa: ANN401 - by the options above, `SchedulerOptions`
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
    options = SchedulerOptions(**given)
    options.check()
    if options.print_config and options.print_manifests:
        raise click.UsageError("--print-config and --print-manifests are for two files")
    if options.print_config or options.print_manifests:
        from allotment.cli.scheduler_printing import configuration, manifests

        text = configuration(options) if options.print_config else manifests(options)
        click.echo(text, nl=False)
        return
    options.run()

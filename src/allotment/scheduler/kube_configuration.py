# SPDX-License-Identifier: Apache-2.0
"""What kube-scheduler has to be told, so that it asks this one: a KubeSchedulerConfiguration.

The one resource that it names is Allotment's own, which every pod with a share has. Of other
systems' nothing is left on a pod that was translated, and a pod that was not is theirs to bind: who
claims its resources would bind it around them.

A pod without GPUs takes CPU and memory that pods with GPUs need beside them. kube-scheduler spreads
such pods over all nodes; a second entry, which claims nothing and so is about every pod, has the
policy say on which node one is in the way least. It only scores, so a pod with shares is not asked
about again where filter left one node (`--candidates 1`): kube-scheduler scores no single node.
"""

from collections.abc import Mapping
from typing import Final

from allotment.dialects.allotment import GPU

__all__ = ["CLIENT_FILES", "SERVER_FILES", "kube_configuration"]

SERVER_FILES: Final = {"caFile": "/path/of/ca.crt"}
"""Whom to trust, where somebody else makes the extender's certificates."""
CLIENT_FILES: Final = {
    "certFile": "/etc/kubernetes/allotment/tls.crt",
    "keyFile": "/etc/kubernetes/allotment/tls.key",
    "caFile": "/etc/kubernetes/allotment/ca.crt",
}
"""Where the Secret is mounted that has kube-scheduler's certificate."""

_CONFIG = """\
# A KubeSchedulerConfiguration for kube-scheduler (--config): it asks `allot scheduler` about pods
# with {resource}.
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
"""

_PLAIN_PODS = """\
  # Pods without GPUs, so that they go where they are in the way of others least. An answer is
  # waited for a second; without one they are placed as ever.
  - urlPrefix: {url}
    prioritizeVerb: prioritize
    weight: 1
    enableHTTPS: {https}
{tls}    nodeCacheCapable: true
    ignorable: true
    httpTimeout: 1s
"""


def kube_configuration(
    *, host: str, port: int, tls: Mapping[str, str], scheduler: str, has_plain_pods: bool = True
) -> str:
    """Write the configuration of a kube-scheduler that goes by the name `scheduler`.

    `tls`: what is set of TLS, by its names there; nothing: HTTP. `has_plain_pods`: pods without
    GPUs are scored as well.
    """
    shown = f"[{host}]" if ":" in host else host
    text = _CONFIG + _PLAIN_PODS if has_plain_pods else _CONFIG
    return text.format(
        resource=GPU,
        scheduler=scheduler,
        url=f"{'https' if tls else 'http'}://{shown}:{port}",
        https="true" if tls else "false",
        tls="".join(
            ["    tlsConfig:\n", *(f"      {name}: {text}\n" for name, text in tls.items())]
            if tls
            else []
        ),
    )

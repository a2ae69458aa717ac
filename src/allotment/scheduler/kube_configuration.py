# SPDX-License-Identifier: Apache-2.0
"""What kube-scheduler has to be told, so that it asks this one: a KubeSchedulerConfiguration.

The one resource that it names is Allotment's own, which every pod with a share has. Of other
systems' nothing is left on a pod that was translated, and a pod that was not is theirs to bind: who
claims its resources would bind it around them.
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
"""


def kube_configuration(*, host: str, port: int, tls: Mapping[str, str], scheduler: str) -> str:
    """Write the configuration of a kube-scheduler that goes by the name `scheduler`.

    `tls`: what is set of TLS, by its names there; nothing: HTTP.
    """
    shown = f"[{host}]" if ":" in host else host
    return _CONFIG.format(
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

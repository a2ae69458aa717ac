# SPDX-License-Identifier: Apache-2.0
"""The agent's rights and configurations, as in its manifest, for an agent outside of a pod."""

from __future__ import annotations

from pathlib import Path

import yaml

from testbed.api import Api, ApiError, Json
from testbed.waiting import TestbedError

_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_AGENT = {"kind": "User", "name": "agent", "apiGroup": "rbac.authorization.k8s.io"}

_OF_NO_NODE: Json = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRole",
    "metadata": {"name": "of-no-node"},
    "rules": [
        {
            "apiGroups": ["resource.k8s.io"],
            "resources": ["resourceclaims/driver"],
            "resourceNames": ["gpu.allotment.dev", "gpu.nvidia.com"],
            "verbs": ["arbitrary-node:patch"],
        }
    ],
}
"""In place of the manifest's `associated-node:patch`: only a pod's token names its node."""


def bind_agent(api: Api, manifest: Path) -> None:
    """Applies the manifest's namespaces and roles, and binds the user `agent` to each role.

    Raises:
        TestbedError: there is no such manifest, or no role in it.
    """
    documents = _read(manifest)
    for document in _of_kind(documents, "Namespace"):
        api.apply(f"/api/v1/namespaces/{document['metadata']['name']}", document)
    roles = [*_of_kind(documents, "ClusterRole"), *_of_kind(documents, "Role")]
    if not roles:
        raise TestbedError(f"{manifest} has no role")
    for role in roles:
        _bind(api, role)
    _bind(api, _OF_NO_NODE)


def apply_config(api: Api, manifest: Path) -> str:
    """Applies the manifest's ConfigMap, after `bind_agent`; NAMESPACE/NAME for `--config-map`.

    Raises:
        TestbedError: there is no such manifest, or not one ConfigMap in it.
    """
    found = _of_kind(_read(manifest), "ConfigMap")
    if len(found) != 1:
        raise TestbedError(f"{manifest} has {len(found)} ConfigMaps; one is the agent's")
    namespace, name = (str(found[0]["metadata"][key]) for key in ("namespace", "name"))
    api.apply(f"/api/v1/namespaces/{namespace}/configmaps/{name}", found[0])
    return f"{namespace}/{name}"


def _read(manifest: Path) -> list[Json]:
    if not manifest.exists():
        raise TestbedError(f"{manifest} is missing: it has the agent's roles and configurations")
    return [each for each in yaml.safe_load_all(manifest.read_text(encoding="utf-8")) if each]


def _bind(api: Api, role: Json) -> None:
    kind, name = str(role["kind"]), str(role["metadata"]["name"])
    namespace = role["metadata"].get("namespace")
    prefix = f"{_RBAC}/namespaces/{namespace}" if kind == "Role" else _RBAC
    api.apply(f"{prefix}/{kind.lower()}s/{name}", role)
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": f"{kind}Binding",
        "metadata": {"name": f"testbed-{name}"},
        "roleRef": {"kind": kind, "name": name, "apiGroup": "rbac.authorization.k8s.io"},
        "subjects": [_AGENT],
    }
    try:
        api.post(f"{prefix}/{kind.lower()}bindings", binding)
    except ApiError as error:
        if error.status != 409:  # it is there: the same role's, from before
            raise


def _of_kind(documents: list[Json], kind: str) -> list[Json]:
    return [document for document in documents if document.get("kind") == kind]

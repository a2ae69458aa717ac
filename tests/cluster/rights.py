# SPDX-License-Identifier: Apache-2.0
"""Which rights service accounts have by their roles, and which of them they use.

The API server's audit log has each request of theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from testbed.api import Json

Right = tuple[str, str, str]
"""An account, a resource and a verb, as `pods/status` and `patch`. Not which group or name."""

_ACCOUNTS = "system:serviceaccount:allotment-system:"
_GROUP = "system:serviceaccounts:allotment-system"
_LOG = "audit.log"


def audit_flags(state: Path) -> tuple[str, ...]:
    """Flags of kube-apiserver that write down what Allotment's service accounts ask for."""
    policy = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            {"level": "Metadata", "userGroups": [_GROUP]},
            {"level": "None"},
        ],
    }
    path = state / "audit.json"
    path.write_text(json.dumps(policy), encoding="utf-8")
    return (f"--audit-policy-file={path}", f"--audit-log-path={state / _LOG}")


def granted(documents: Iterable[Json]) -> set[Right]:
    """The rights by roles and their bindings; not by roles that Kubernetes has."""
    objects = list(documents)
    rules = {
        (each["kind"], each["metadata"]["name"]): each["rules"]
        for each in objects
        if each["kind"] in {"Role", "ClusterRole"}
    }
    return {
        (subject["name"], resource, verb)
        for each in objects
        if each["kind"] in {"RoleBinding", "ClusterRoleBinding"}
        for subject in each["subjects"]
        for rule in rules.get((each["roleRef"]["kind"], each["roleRef"]["name"]), ())
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if ":" not in verb  # asked for with another one, so in no request
    }


def requests(state: Path) -> Iterator[tuple[Right, int]]:
    """The right that each request of Allotment's so far needed, and its status."""
    text = (state / _LOG).read_text(encoding="utf-8")
    # The last line may be in the middle of being written.
    for line in text[: text.rfind("\n") + 1].splitlines():
        event = json.loads(line)
        about = event.get("objectRef", {})
        if "resource" in about:
            resource = "/".join([about["resource"], *filter(None, [about.get("subresource")])])
            account = event["user"]["username"].removeprefix(_ACCOUNTS)
            yield (account, resource, event["verb"]), event["responseStatus"]["code"]

# SPDX-License-Identifier: Apache-2.0
"""Which rights service accounts have by their roles, and which of them they use.

The API server's audit log has each request of theirs.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

from testbed.api import Json

Right = tuple[str, str]
"""A resource and a verb, as `pods/status` and `patch`."""

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


def granted(documents: Iterable[Json]) -> dict[str, set[Right]]:
    """The rights by account, of roles and bindings; not of roles that Kubernetes has."""
    objects = list(documents)
    roles = {
        (each["kind"], each["metadata"]["name"]): {
            (resource, verb)
            for rule in each["rules"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        for each in objects
        if each["kind"] in {"Role", "ClusterRole"}
    }
    found: defaultdict[str, set[Right]] = defaultdict(set)
    for each in objects:
        if each["kind"] in {"RoleBinding", "ClusterRoleBinding"}:
            role = each["roleRef"]
            for subject in each["subjects"]:
                found[subject["name"]] |= roles.get((role["kind"], role["name"]), set())
    return dict(found)


def requests(state: Path) -> Iterator[tuple[str, Right, int]]:
    """Account, right and status of each request of Allotment's so far."""
    text = (state / _LOG).read_text(encoding="utf-8")
    # The last line may be in the middle of being written.
    for line in text[: text.rfind("\n") + 1].splitlines():
        event = json.loads(line)
        about = event.get("objectRef", {})
        if "resource" in about:
            parts = [about["resource"], *filter(None, [about.get("subresource")])]
            account = event["user"]["username"].removeprefix(_ACCOUNTS)
            yield account, ("/".join(parts), event["verb"]), event["responseStatus"]["code"]


def unused(
    given: Mapping[str, AbstractSet[Right]], asked: Iterable[tuple[str, Right, int]]
) -> dict[str, set[Right]]:
    """The rights by account of which no use was seen."""
    left = {account: set(rights) for account, rights in given.items()}
    for account, right, _ in asked:
        left.get(account, set()).discard(right)
    return {account: rights for account, rights in left.items() if rights}

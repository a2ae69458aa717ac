# SPDX-License-Identifier: Apache-2.0
"""Compares a cluster's admission policies with the expected ones.

What decides is compared, not messages. A policy for one account is as good with another one, which
the cluster's owner chose: the accounts are returned beside the differences.
"""

import asyncio
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from allotment.kube.clients import Api
from allotment.kube.errors import DeniedError, ObjectMissingError

Spec = Mapping[str, Any]
Specs = Mapping[str, Spec]
"""By resource and name."""

ADMISSION: Final = "/apis/admissionregistration.k8s.io/v1"
_POLICIES: Final = "validatingadmissionpolicies"
_KINDS: Final = {
    "ValidatingAdmissionPolicy": _POLICIES,
    "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
}
_USER: Final = re.compile(r"request\.userInfo\.username [!=]= '([^']+)'")
_ACCOUNT: Final = "system:serviceaccount:"


class FoundPolicies(msgspec.Struct, frozen=True):
    """A cluster's policies and bindings; None: it has none of this name."""

    specs: Mapping[str, Spec | None]

    def problem(self, name: str, expected: Spec) -> str:
        """Say whether one is missing, or how it differs; empty: it decides as the expected one.

        The binding of a missing policy is no problem of its own.
        """
        resource, _, policy = name.partition("/")
        is_policy = resource == _POLICIES
        found = self.specs[name]
        if found is None and is_policy:
            return f"no policy {policy}"
        if found is None:
            has_policy = self.specs.get(f"{_POLICIES}/{policy}")
            return f"no binding of the policy {policy}" if has_policy else ""
        one, other = _deciding(expected), _deciding(found)
        differing = sorted(
            key for key in one.keys() | other.keys() if one.get(key) != other.get(key)
        )
        what = "the policy" if is_policy else "the binding of"
        text = f"{what} {policy} differs from this version's in {', '.join(differing)}"
        return text if differing else ""

    def accounts(self, expected: Specs) -> dict[str, dict[str, list[str]]]:
        """Return the users in place of each expected user, with the names of their policies."""
        users: dict[str, dict[str, list[str]]] = {}
        for name, spec in sorted(expected.items()):
            usual, user = user_of(spec), user_of(self.specs[name] or {})
            if usual and user:
                users.setdefault(usual, {}).setdefault(user, []).append(name.partition("/")[2])
        return users


def specs_of(documents: Iterable[Mapping[str, Any]]) -> dict[str, Spec]:
    """Return the specs of a manifest's policies and bindings."""
    return {
        f"{_KINDS[each['kind']]}/{each['metadata']['name']}": each["spec"]
        for each in documents
        if each["kind"] in _KINDS
    }


async def read_policies(api: Api, names: Iterable[str]) -> FoundPolicies:
    """Raises `KubeError`."""

    async def spec_at(name: str) -> Spec | None:
        try:
            body = await api.get(f"{ADMISSION}/{name}", asked=f"get {name}")
        except ObjectMissingError:
            return None
        return dict(json.loads(body)["spec"])

    known = list(names)
    return FoundPolicies(dict(zip(known, await asyncio.gather(*map(spec_at, known)), strict=True)))


async def exists(api: Api, user: str) -> bool | None:
    """Return whether a service account exists; None: unknown. Raises `KubeError`."""
    if not user.startswith(_ACCOUNT):
        return None
    namespace, _, name = user.removeprefix(_ACCOUNT).partition(":")
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}"
    try:
        await api.get(path, asked=f"get service account {namespace}/{name}")
    except ObjectMissingError:
        return False
    except DeniedError:
        return None
    return True


def user_of(spec: Spec) -> str:
    """Return the user that a policy is for, or for whose others it is; empty: it names none."""
    expressions = (each["expression"] for each in spec.get("matchConditions") or ())
    return next((found[1] for each in expressions if (found := _USER.fullmatch(each))), "")


def _deciding(spec: Spec) -> Spec:
    """Return a spec with the API server's defaults, without messages and its user.

    Defaults: pkg/apis/admissionregistration/v1/defaults.go, v1.36.
    """
    match = spec.get("matchConstraints")
    if match is None:
        return spec  # a binding
    rules = [{"scope": "*", **rule} for rule in match.get("resourceRules") or ()]
    selectors: dict[str, Any] = {"namespaceSelector": {}, "objectSelector": {}}
    user = user_of(spec)
    return {
        "failurePolicy": "Fail",
        **spec,
        "matchConstraints": {
            "matchPolicy": "Equivalent",
            **selectors,
            **match,
            "resourceRules": rules,
        },
        "matchConditions": [
            {**each, "expression": each["expression"].replace(f"'{user}'", "any account")}
            if _USER.fullmatch(each["expression"])
            else each
            for each in spec.get("matchConditions") or ()
        ],
        "validations": [
            {key: text for key, text in each.items() if not key.startswith("message")}
            for each in spec.get("validations") or ()
        ],
    }

# SPDX-License-Identifier: Apache-2.0
"""What `allot doctor` says of a cluster's admission policies, and of NVIDIA's CDI spec."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpus import gpu

from allotment.cli import doctor
from allotment.devices.sources import Inventory
from allotment.dialects.foreign.settings import foreign_dialects
from allotment.kube.errors import DeniedError, ObjectMissingError
from allotment.kube.policies import ADMISSION
from allotment.scheduler.admission.manifests import Installation, admission_objects
from allotment.scheduler.admission.rules import all_keys
from allotment.scheduler.settings import read_file_settings
from allotment.shares.cdi import has_toolkit_spec

Specs = dict[str, dict[str, Any]]
STATE = "allotment-state-folder"
PLACEMENTS = "allotment-placements"
KINDS = {"ValidatingAdmissionPolicy": "policies", "ValidatingAdmissionPolicyBinding": "bindings"}


@pytest.fixture(scope="module")
def installed(root: Path) -> Specs:
    """The specs of all policies and bindings, as the API server returns them."""
    found: Specs = {}
    for file in ("agent", "scheduler", "state-folder"):
        text = (root / "deploy" / "manifests" / f"{file}.yaml").read_text("utf-8")
        for each in yaml.safe_load_all(text):
            if each["kind"] not in KINDS:
                continue
            found[f"{KINDS[each['kind']]} {each['metadata']['name']}"] = spec = each["spec"]
            if (match := spec.get("matchConstraints")) is not None:
                match.setdefault("matchPolicy", "Equivalent")
                match.setdefault("namespaceSelector", {})
                match.setdefault("objectSelector", {})
                for rule in match["resourceRules"]:
                    rule.setdefault("scope", "*")
    return found


def findings(
    monkeypatch: pytest.MonkeyPatch,
    specs: Specs,
    *,
    accounts: Collection[str] = ("allotment-system/serviceaccounts/allotment-scheduler",),
    dialects: Path | None = None,
) -> dict[str, tuple[str, str, str]]:
    """What `doctor` finds in a cluster with these policies and service accounts, by check."""

    class Api:
        server = "https://api.test"

        async def get(self, path: str, *, asked: str) -> bytes:
            if path.startswith("/api/v1/namespaces/"):
                if "denied" in accounts:
                    raise DeniedError(asked)
                if path.removeprefix("/api/v1/namespaces/") not in accounts:
                    raise ObjectMissingError(asked)
                return b"{}"
            resource, _, name = path.removeprefix(f"{ADMISSION}/").partition("/")
            kind = "bindings" if resource.endswith("bindings") else "policies"
            if f"{kind} {name}" not in specs:
                raise ObjectMissingError(asked)
            return json.dumps({"spec": specs[f"{kind} {name}"]}).encode()

    @asynccontextmanager
    async def connect(_: object, *, context: object) -> AsyncIterator[Api]:
        del context
        yield Api()

    monkeypatch.setattr("allotment.kube.clients.connect", connect)
    monkeypatch.setenv("KUBECONFIG", "/of/a/cluster")
    # The other checks are of this machine.
    return {each.name: (each.outcome, each.detail, each.fix) for each in doctor._cluster(dialects)}  # noqa: SLF001


def test_policies_as_this_version_has_them_are_well(
    monkeypatch: pytest.MonkeyPatch, installed: Specs
) -> None:
    found = findings(monkeypatch, installed)
    assert {check: outcome for check, (outcome, _, _) in found.items()} == {
        "pods' host paths": "ok",
        "pods' placements": "ok",
        "the scheduler's policies": "ok",
    }
    assert all("https://api.test" in detail for _, detail, _ in found.values())
    named = " ".join(detail for _, detail, _ in found.values())
    assert all(name.partition(" ")[2] in named for name in installed)


def emptied(spec: dict[str, Any]) -> None:
    spec["validations"] = [{"expression": "true", "message": "", "reason": "Forbidden"}]


def for_no_account(spec: dict[str, Any]) -> None:
    spec["matchConditions"][0]["expression"] = "request.userInfo.username == ''"


def no_pods(spec: dict[str, Any]) -> None:
    spec["matchConstraints"]["objectSelector"] = {"matchLabels": {"a": "b"}}


@pytest.mark.parametrize(
    ("policy", "break_it", "text"),
    [
        (f"policies {STATE}", emptied, f"the policy {STATE} differs from this version's in valid"),
        (f"policies {PLACEMENTS}", emptied, f"the policy {PLACEMENTS} differs"),
        ("policies allotment-agent-own-node", emptied, "in validations"),
        ("policies allotment-scheduler-own-keys", emptied, "in validations"),
        ("policies allotment-scheduler-own-keys", for_no_account, "in matchConditions"),
        (f"policies {PLACEMENTS}", no_pods, "in matchConstraints"),
        (
            f"policies {PLACEMENTS}",
            lambda spec: spec.update(failurePolicy="Ignore"),
            "in failurePolicy",
        ),
        (
            f"policies {PLACEMENTS}",
            lambda spec: spec["matchConditions"].append({"name": "never", "expression": "false"}),
            "in matchConditions",
        ),
        (
            f"bindings {STATE}",
            lambda spec: spec.update(validationActions=["Warn", "Audit"]),
            f"the binding of {STATE} differs from this version's in validationActions",
        ),
        (f"bindings {STATE}", lambda spec: spec.update(policyName="other"), "in policyName"),
        (
            f"bindings {PLACEMENTS}",
            lambda spec: spec.update(
                matchResources={"objectSelector": {"matchLabels": {"a": "b"}}}
            ),
            "in matchResources",
        ),
    ],
)
def test_a_policy_that_differs_is_named_with_what_differs(
    monkeypatch: pytest.MonkeyPatch,
    installed: Specs,
    policy: str,
    break_it: Callable[[dict[str, Any]], None],
    text: str,
) -> None:
    specs = deepcopy(installed)
    break_it(specs[policy])
    found = findings(monkeypatch, specs)
    ((detail, fix),) = [(detail, fix) for kind, detail, fix in found.values() if kind == "note"]
    assert text in detail
    assert policy.partition(" ")[2] in detail
    assert "kubectl apply -f deploy/manifests/" in fix


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        (f"policies {STATE}", f"no policy {STATE}"),
        (f"bindings {PLACEMENTS}", f"no binding of the policy {PLACEMENTS}"),
    ],
)
def test_a_missing_policy_is_named(
    monkeypatch: pytest.MonkeyPatch, installed: Specs, missing: str, text: str
) -> None:
    specs = {name: spec for name, spec in installed.items() if name != missing}
    found = findings(monkeypatch, specs)
    (detail,) = [detail for kind, detail, _ in found.values() if kind == "note"]
    assert detail.startswith(f"{text} in the cluster")


def test_of_a_missing_policy_the_binding_is_not_named_too(
    monkeypatch: pytest.MonkeyPatch, installed: Specs
) -> None:
    specs = {name: spec for name, spec in installed.items() if not name.endswith(STATE)}
    _, detail, _ = findings(monkeypatch, specs)["pods' host paths"]
    assert detail.startswith(f"no policy {STATE} in the cluster")


def test_dialects_without_a_cluster_are_not_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (finding,) = doctor._cluster(tmp_path / "own.yaml")  # noqa: SLF001
    assert finding.detail.startswith("no kubeconfig")
    assert list(doctor._cluster(None)) == []  # noqa: SLF001


def without_scheduler_s(installed: Specs) -> Specs:
    gone = ("translated", "left-alone", "scheduler-own-keys", "records")
    return {name: spec for name, spec in installed.items() if not name.endswith(gone)}


def test_where_no_scheduler_is_installed_its_policies_are_not_missing(
    monkeypatch: pytest.MonkeyPatch, installed: Specs
) -> None:
    found = findings(monkeypatch, without_scheduler_s(installed), accounts=())
    assert {check: outcome for check, (outcome, _, _) in found.items()} == {
        "pods' host paths": "ok",
        "pods' placements": "ok",
    }


def test_where_a_scheduler_is_installed_all_its_policies_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, installed: Specs
) -> None:
    outcome, detail, _ = findings(monkeypatch, without_scheduler_s(installed))[
        "the scheduler's policies"
    ]
    assert outcome == "note"
    for name in ("translated", "left-alone", "scheduler-own-keys", "records"):
        assert f"no policy allotment-{name}" in detail


OWN = "system:serviceaccount:gpus:own-scheduler"


def with_account(specs: Specs, *names: str) -> Specs:
    """The policies with another account of the scheduler in those of these names."""
    usual = "system:serviceaccount:allotment-system:allotment-scheduler"
    return {
        name: json.loads(json.dumps(spec).replace(usual, OWN)) if name.endswith(names) else spec
        for name, spec in specs.items()
    }


def test_the_account_of_a_scheduler_is_its_owner_s_choice(
    monkeypatch: pytest.MonkeyPatch, installed: Specs
) -> None:
    found = findings(monkeypatch, with_account(installed, ""))
    assert {outcome for outcome, _, _ in found.values()} == {"ok"}
    _, detail, _ = found["account allotment-scheduler"]
    assert f"{OWN} (allotment-bindings, allotment-placements, allotment-scheduler-own-" in detail
    # It also says whether a scheduler is installed.
    gone = with_account(without_scheduler_s(installed), "")
    assert "the scheduler's policies" not in findings(monkeypatch, gone)
    accounts = ("gpus/serviceaccounts/own-scheduler",)
    assert "the scheduler's policies" in findings(monkeypatch, gone, accounts=accounts)
    # Without the right to look for accounts, doctor knows only that this one was chosen.
    assert "the scheduler's policies" in findings(monkeypatch, gone, accounts=["denied"])
    usual = without_scheduler_s(installed)
    assert "the scheduler's policies" not in findings(monkeypatch, usual, accounts=["denied"])


def test_policies_for_several_accounts_are_named(
    monkeypatch: pytest.MonkeyPatch, installed: Specs
) -> None:
    found = findings(monkeypatch, with_account(installed, "allotment-bindings"))
    ((detail, fix),) = [(detail, fix) for kind, detail, fix in found.values() if kind == "note"]
    assert f"{OWN} (allotment-bindings)" in detail
    assert "allotment-scheduler (allotment-placements, allotment-scheduler-own-keys)" in detail
    assert "write the account" in fix


def test_policies_of_own_dialects_are_compared_with_their_settings(
    monkeypatch: pytest.MonkeyPatch, installed: Specs, tmp_path: Path
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("hami: {resourceMemoryName: example.com/vmem}\n", "utf-8")
    settings = read_file_settings(path)
    installation = Installation(configuration="own")
    keys = all_keys(foreign_dialects(settings.dialects))
    specs = installed | {
        f"{KINDS[each.document['kind']]} {each.document['metadata']['name']}": each.document["spec"]
        for each in admission_objects(keys, installation)
        if each.document["kind"] in KINDS
    }
    assert findings(monkeypatch, specs)["the scheduler's policies"][0] == "note"
    found = findings(monkeypatch, specs, dialects=path)
    assert {outcome for outcome, _, _ in found.values()} == {"ok"}


@pytest.mark.parametrize(
    ("spec", "is_missing"),
    [
        (None, True),
        ("kind: nvidia.com/gpu\ndevices: [{name: '0'}]\n", True),
        ("kind: nvidia.com/gpu\ndevices: [{name: '0'}, {name: GPU-1}]\n", False),
    ],
    ids=["none", "of one GPU", "of all"],
)
def test_what_containers_lack_without_nvidias_spec_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spec: str | None, *, is_missing: bool
) -> None:
    if spec is not None:
        (tmp_path / "nvidia.yaml").write_text(spec)
    monkeypatch.setattr(doctor, "real_inventory", lambda: Inventory((gpu(0), gpu(1)), ()))
    monkeypatch.setattr(doctor, "has_toolkit_spec", partial(has_toolkit_spec, folders=[tmp_path]))
    found = {each.name: each for each in doctor._driver()}  # noqa: SLF001
    assert ("NVIDIA's CDI spec" in found) == is_missing
    if is_missing:
        assert "video and graphics" in found["NVIDIA's CDI spec"].detail
        assert "nvidia-ctk cdi generate" in str(found["NVIDIA's CDI spec"].fix)

# SPDX-License-Identifier: Apache-2.0
"""The manifests and the image's recipe: they fit together, and grant what is needed and no more."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import allotment
from allotment.agent.config.options import NVIDIA_OPTIONS
from allotment.agent.config.parsing import parse
from allotment.agent.settings import KUBELET_SOCKET
from allotment.cli.agent import command

Document = dict[str, Any]


@pytest.fixture(scope="module")
def documents(root: Path) -> list[Document]:
    text = (root / "deploy" / "manifests" / "agent.yaml").read_text("utf-8")
    return list(yaml.safe_load_all(text))


def one(documents: list[Document], kind: str) -> Document:
    (found,) = (each for each in documents if each["kind"] == kind)
    return found


@pytest.fixture
def pod(documents: list[Document]) -> Document:
    template: Document = one(documents, "DaemonSet")["spec"]["template"]
    return template


@pytest.fixture
def container(pod: Document) -> Document:
    (found,) = pod["spec"]["containers"]
    return dict(found)


def test_the_agent_may_do_what_it_needs_and_nothing_else(documents: list[Document]) -> None:
    def rights(kind: str) -> set[tuple[str, str, str]]:
        return {
            (resource, verb, ",".join(rule.get("resourceNames", ())))
            for rule in one(documents, kind)["rules"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
            if rule["apiGroups"] == [""]
        }

    read = ("list", "watch")
    assert rights("ClusterRole") == {
        *(("pods", verb, "") for verb in read),
        *(("nodes", verb, "") for verb in (*read, "patch")),
        ("nodes/status", "patch", ""),
        ("events", "create", ""),
        ("events", "patch", ""),
    }
    assert rights("Role") == {("configmaps", verb, "allotment-config") for verb in read}


def test_it_is_root_with_the_capabilities_that_the_readme_explains(
    root: Path, pod: Document, container: Document
) -> None:
    rights = container["securityContext"]
    assert rights["capabilities"]["drop"] == ["ALL"]
    text = (root / "deploy" / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| `([A-Z_]+)` \|", text, re.MULTILINE)
    assert rights["capabilities"]["add"] == rows
    assert "privileged" not in rights
    # Who sees no other's processes takes shares in use for free ones.
    assert "SYS_PTRACE" in rows
    assert rights["appArmorProfile"] == {"type": "Unconfined"}
    assert pod["spec"]["hostPID"] is True


def test_names_are_the_same_everywhere(
    documents: list[Document], pod: Document, container: Document
) -> None:
    account = one(documents, "ServiceAccount")["metadata"]
    namespace = one(documents, "Namespace")["metadata"]["name"]
    assert account["namespace"] == namespace
    for kind in ("RoleBinding", "ClusterRoleBinding"):
        binding = one(documents, kind)
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": account["name"], "namespace": namespace}
        ]
        assert binding["roleRef"]["kind"] == kind.removesuffix("Binding")
    policy = one(documents, "ValidatingAdmissionPolicy")
    (condition,) = policy["spec"]["matchConditions"]
    assert f"'system:serviceaccount:{namespace}:{account['name']}'" in condition["expression"]
    assert (
        one(documents, "ValidatingAdmissionPolicyBinding")["spec"]["policyName"]
        == policy["metadata"]["name"]
    )
    assert pod["spec"]["serviceAccountName"] == account["name"]
    selector = one(documents, "DaemonSet")["spec"]["selector"]["matchLabels"]
    assert selector.items() <= pod["metadata"]["labels"].items()
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert values["CONFIG_MAP"] == one(documents, "ConfigMap")["metadata"]["name"]
    assert values["DEFAULT_CONFIG"] in one(documents, "ConfigMap")["data"]
    (port,) = container["ports"]
    assert values["METRICS_ADDRESS"] == f":{port['containerPort']}"
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])


def test_the_agent_understands_what_it_is_told(container: Document) -> None:
    known = {str(each.envvar) for each in command.params if getattr(each, "envvar", None)}
    known |= {name for option in NVIDIA_OPTIONS for name in option.env}
    of_others = {"POD_NAMESPACE", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}
    assert {each["name"] for each in container["env"]} <= known | of_others


def test_what_it_reads_and_writes_is_mounted(pod: Document, container: Document) -> None:
    hosts = {
        each["name"]: each["hostPath"]["path"]
        for each in pod["spec"]["volumes"]
        if "hostPath" in each
    }
    inside = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert hosts.items() <= inside.items()  # the same paths: the runtime reads the host's
    assert {
        str(KUBELET_SOCKET.parent),
        "/var/run/cdi",
        "/run/allotment",
    } <= set(hosts.values())


def test_configurations_that_come_with_it_are_valid(documents: list[Document]) -> None:
    for name, text in one(documents, "ConfigMap")["data"].items():
        parse(text, source=name)


def test_the_image_is_of_this_version(root: Path, container: Document) -> None:
    image = f"allotment:{allotment.__version__}"
    assert container["image"] == image
    recipe = (root / "deploy" / "Containerfile").read_text("utf-8")
    assert f"-t {image}" in recipe
    for paths in re.findall(r"^COPY (?!--)(.+) \S+$", recipe, re.MULTILINE):
        for path in paths.split():
            assert (root / path).exists(), path

# SPDX-License-Identifier: Apache-2.0
"""The manifests and the image's recipe: they fit together, and grant what is needed and no more."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import allotment
from allotment.agent.config.options import NVIDIA_OPTIONS
from allotment.agent.config.parsing import parse
from allotment.agent.configuring import KUBELET_SOCKET, AgentSettings
from allotment.cli.agent import command
from allotment.cli.front import command as front_command
from allotment.cli.scheduler import command as scheduler_command
from allotment.cli.web import command as web_command
from allotment.dialects.foreign.kubeshare import GROUP, KIND
from allotment.kube.sharepods import MANIFEST
from allotment.scheduler.admission import claims
from allotment.scheduler.admission.rules import IGNORE_LABELS
from allotment.scheduler.admission.webhook import PATH
from allotment.scheduler.running import EXTENDER_PORT

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
    found, _ = pod["spec"]["containers"]
    return dict(found)


@pytest.fixture
def front(pod: Document) -> Document:
    _, found = pod["spec"]["containers"]
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
        *(("pods", verb, "") for verb in (*read, "delete")),
        *(("nodes", verb, "") for verb in (*read, "patch")),
        ("pods/status", "patch", ""),
        ("nodes/status", "patch", ""),
        ("events", "create", ""),
        ("events", "patch", ""),
    }
    own = {("configmaps", verb, "allotment-config") for verb in read}
    assert rights("Role") == {*own, ("serviceaccounts", "get", "allotment-scheduler")}


def explained_rights(root: Path, section: str) -> set[tuple[str, str]]:
    """The resources and verbs of a section's table: a cell has `RESOURCE`, ...: VERB, ...; ..."""
    text = (root / "deploy" / "README.md").read_text("utf-8")
    table = text.partition(f"## {section}\n\n")[2].partition("\n\n")[0]
    return {
        (resource, verb)
        for cell in re.findall(r"^\| (`[a-z/]+`.*?) \|", table, re.MULTILINE)
        for names, _, verbs in (part.partition(": ") for part in cell.split("; "))
        for resource in re.findall(r"`([a-z/]+)`", names)
        for verb in verbs.split(", ")
    }


def test_the_readme_explains_each_right_of_the_agent(root: Path, documents: list[Document]) -> None:
    roles = [one(documents, "ClusterRole"), one(documents, "Role")]
    rights = {each[:2] for role in roles for each in rights_of(role)}
    assert explained_rights(root, "What the agent may do") == rights


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
    policies = [each for each in documents if each["kind"] == "ValidatingAdmissionPolicy"]
    for policy in policies:
        if policy["metadata"]["labels"]["app.kubernetes.io/component"] != "agent":
            continue  # generated: `test_keys.py`
        (condition,) = policy["spec"]["matchConditions"]
        assert f"'system:serviceaccount:{namespace}:{account['name']}'" in condition["expression"]
    bindings = [each for each in documents if each["kind"] == "ValidatingAdmissionPolicyBinding"]
    names = [each["metadata"]["name"] for each in policies]
    assert [each["spec"]["policyName"] for each in bindings] == names
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
        str(AgentSettings(node="n").pod_resources.parent),
        "/var/run/cdi",
        "/run/allotment",
    } <= set(hosts.values())


def test_the_front_is_beside_the_agent_and_takes_over_before_the_old_one_ends(
    documents: list[Document], container: Document, front: Document
) -> None:
    # Else the kubelet would lose all devices in an upgrade, and fail the pods that arrive.
    update = one(documents, "DaemonSet")["spec"]["updateStrategy"]["rollingUpdate"]
    assert update == {"maxSurge": "10%", "maxUnavailable": 0}
    assert front["image"] == container["image"]
    assert front["args"] == ["front"]
    assert {"name": "ALLOTMENT_FRONT", "value": "off"} in container["env"]
    (ready,) = front["env"]
    assert ready["name"] in {str(each.envvar) for each in front_command.params}
    assert ready["value"] in front["readinessProbe"]["exec"]["command"]
    mounted = {each["name"]: each for each in container["volumeMounts"]}
    assert all(each == mounted[each["name"]] for each in front["volumeMounts"])
    assert {each["name"] for each in front["volumeMounts"]} == {"device-plugins", "state", "tmp"}
    assert front["securityContext"]["capabilities"] == {"drop": ["ALL"]}


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


def test_whatever_the_image_installs_is_pinned(root: Path) -> None:
    recipe = (root / "deploy" / "Containerfile").read_text("utf-8").replace("\\\n", " ")
    installs = [line for line in re.split(r"\n|&&", recipe) if "pip install" in line]
    assert installs
    assert [line for line in installs if "--constraint" not in line] == []
    assert "-m build" not in recipe  # would install in an environment of its own


# ---- the scheduler -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scheduling(root: Path) -> dict[tuple[str, str], Document]:
    text = (root / "deploy" / "manifests" / "scheduler.yaml").read_text("utf-8")
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)}


def rights_of(role: Document) -> set[tuple[str, str, str]]:
    return {
        (resource, verb, ",".join(rule.get("resourceNames", ())))
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_right_to_make_pods_comes_with_sharepods_alone(
    root: Path, scheduling: dict[tuple[str, str], Document]
) -> None:
    text = (root / MANIFEST).read_text("utf-8")
    documents = {each["kind"]: each for each in yaml.safe_load_all(text)}
    rights = rights_of(documents["ClusterRole"])
    assert rights == {
        *(("sharepods", verb, "") for verb in ("get", "list", "watch")),
        ("sharepods/status", "patch", ""),
        ("sharepods/finalizers", "update", ""),
        ("pods", "create", ""),
        ("namespaces", "get", ""),
    }
    assert ("pods", "create", "") not in rights_of(scheduling["ClusterRole", "allotment-scheduler"])
    (subject,) = documents["ClusterRoleBinding"]["subjects"]
    assert ("ServiceAccount", subject["name"]) in scheduling
    definition = documents["CustomResourceDefinition"]["spec"]
    assert (definition["group"], definition["names"]["kind"]) == (GROUP, KIND)
    explained = (root / "deploy" / "README.md").read_text("utf-8")
    for resource in {each[0] for each in rights}:
        assert f"`{resource}`" in explained, resource


def the_container(scheduling: dict[tuple[str, str], Document], name: str) -> Document:
    (found,) = scheduling["Deployment", name]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_the_scheduler_may_do_what_the_readme_explains_and_nothing_else(
    root: Path, scheduling: dict[tuple[str, str], Document]
) -> None:
    everywhere = rights_of(scheduling["ClusterRole", "allotment-scheduler"])
    assert everywhere == {
        *(("pods", verb, "") for verb in ("get", "list", "watch")),
        *(
            (each, verb, "")
            for each in ("nodes", "resourceclaims", "resourcequotas", "poddisruptionbudgets")
            for verb in ("list", "watch")
        ),
        ("pods/binding", "create", ""),
        ("pods/status", "patch", ""),
        *(("events", verb, "") for verb in ("create", "patch")),
        *(
            ("mutatingwebhookconfigurations", verb, "allotment-scheduler")
            for verb in ("get", "patch")
        ),
    }
    here = rights_of(scheduling["Role", "allotment-scheduler"])
    assert {each for each in here if each[0] == "secrets"} == {
        ("secrets", verb, "allotment-webhook,allotment-kube-scheduler") for verb in ("get", "patch")
    }
    assert {each[2] for each in here if each[0] == "leases"} == {"allotment-scheduler"}
    # Nobody has to be let make what is there already.
    for secret in ("allotment-webhook", "allotment-kube-scheduler"):
        assert "data" not in scheduling["Secret", secret]
    assert ("Lease", "allotment-scheduler") in scheduling
    explained = explained_rights(root, "What the scheduler may do")
    assert explained == {each[:2] for each in everywhere | here}


def test_the_scheduler_s_names_are_the_same_everywhere(
    scheduling: dict[tuple[str, str], Document],
) -> None:
    pods = scheduling["Deployment", "allotment-scheduler"]["spec"]["template"]
    container = the_container(scheduling, "allotment-scheduler")
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    account = f"system:serviceaccount:allotment-system:{pods['spec']['serviceAccountName']}"
    for name in ("allotment-placements", "allotment-bindings"):
        (condition,) = scheduling["ValidatingAdmissionPolicy", name]["spec"]["matchConditions"]
        assert f"'{account}'" in condition["expression"]
    for name in ("allotment-translated", "allotment-placements", "allotment-bindings"):
        binding = scheduling["ValidatingAdmissionPolicyBinding", name]["spec"]
        assert (binding["policyName"], binding["validationActions"]) == (name, ["Deny"])
    service = scheduling["Service", "allotment-webhook"]["spec"]
    for selector in (
        service["selector"],
        scheduling["PodDisruptionBudget", "allotment-scheduler"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= pods["metadata"]["labels"].items()
    assert service["ports"][0]["targetPort"] == "webhook" in ports
    webhook, of_claims = scheduling["MutatingWebhookConfiguration", "allotment-scheduler"][
        "webhooks"
    ]
    client = webhook["clientConfig"]["service"]
    assert ("Service", client["name"]) in scheduling
    assert client["path"] == PATH
    assert of_claims["clientConfig"]["service"] == {**client, "path": claims.PATH}
    assert [each["failurePolicy"] for each in (webhook, of_claims)] == ["Fail", "Ignore"]
    assert {each["sideEffects"] for each in (webhook, of_claims)} == {"None"}
    for role in ("ClusterRoleBinding", "RoleBinding"):
        (subject,) = scheduling[role, "allotment-scheduler"]["subjects"]
        assert subject["name"] == "allotment-scheduler"
    assert pods["metadata"]["annotations"]["prometheus.io/port"] == str(ports["metrics"])


def test_the_leader_s_service_leads_where_the_leader_writes(
    scheduling: dict[tuple[str, str], Document],
) -> None:
    service = scheduling["Service", "allotment-scheduler"]
    assert "selector" not in service["spec"]
    (port,) = service["spec"]["ports"]
    assert port["name"] == EXTENDER_PORT
    slices = {name: each for (kind, name), each in scheduling.items() if kind == "EndpointSlice"}
    here = rights_of(scheduling["Role", "allotment-scheduler"])
    names = ",".join(slices)
    assert {each for each in here if each[0] == "endpointslices"} == {
        ("endpointslices", verb, names) for verb in ("get", "patch")
    }
    for family in ("IPv4", "IPv6"):
        each = slices.pop(f"{service['metadata']['name']}-{family.lower()}")
        assert each["addressType"] == family
        labels = each["metadata"]["labels"]
        assert labels["kubernetes.io/service-name"] == service["metadata"]["name"]
        # kubectl apply leaves what it does not name.
        assert not {"endpoints", "ports"} & each.keys()
    assert not slices


def test_the_manifests_agree_on_what_is_in_both(
    documents: list[Document], scheduling: dict[tuple[str, str], Document]
) -> None:
    """Where only agents run, the same policies guard pods; kubectl applies both, in any order."""
    both = {
        key: document
        for document in documents
        if (key := (document["kind"], document["metadata"]["name"])) in scheduling
    }
    assert both == {key: scheduling[key] for key in both}
    assert {name for kind, name in both if kind == "ValidatingAdmissionPolicy"} == {
        "allotment-placements",
        "allotment-bindings",
    }
    assert len(both) == 4  # with their bindings


def test_doctor_in_the_agent_s_pod_may_read_all_policies(
    root: Path, documents: list[Document], scheduling: dict[tuple[str, str], Document]
) -> None:
    text = (root / "deploy" / "manifests" / "state-folder.yaml").read_text("utf-8")
    there = [*documents, *scheduling.values(), *yaml.safe_load_all(text)]
    policies = {
        each["metadata"]["name"] for each in there if each["kind"] == "ValidatingAdmissionPolicy"
    }
    (rule,) = (
        rule
        for rule in one(documents, "ClusterRole")["rules"]
        if "validatingadmissionpolicies" in rule["resources"]
    )
    assert (set(rule["resourceNames"]), rule["verbs"]) == (policies, ["get"])


def test_both_look_away_from_the_same_namespaces(
    scheduling: dict[tuple[str, str], Document],
) -> None:
    webhook, _ = scheduling["MutatingWebhookConfiguration", "allotment-scheduler"]["webhooks"]
    policy = scheduling["ValidatingAdmissionPolicy", "allotment-translated"]["spec"]
    selector = webhook["namespaceSelector"]
    assert selector == policy["matchConstraints"]["namespaceSelector"]
    assert {each["key"] for each in selector["matchExpressions"]} > set(IGNORE_LABELS)
    # By a pod's label it is left to another system with what that one gives, and not as a whole.
    assert "objectSelector" not in {**webhook, **policy["matchConstraints"]}


def test_the_scheduler_understands_what_it_is_told(
    scheduling: dict[tuple[str, str], Document],
) -> None:
    container = the_container(scheduling, "allotment-scheduler")
    name, *arguments = container["args"]
    assert name == "scheduler"
    with scheduler_command.make_context(name, list(arguments)) as context:
        values = context.params
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert values["listen"] == f":{ports['extender']}"
    assert values["webhook_listen"] == f":{ports['webhook']}"
    assert values["metrics_listen"] == f":{ports['metrics']}"
    assert values["lease"] == "allotment-system/allotment-scheduler"
    assert values["service"] == "allotment-system/allotment-scheduler"
    assert "POD_IP" in {each["name"] for each in container["env"]}
    assert values["webhook_configuration"] == "allotment-scheduler"
    assert values["webhook_service"] == "allotment-system/allotment-webhook"
    assert container["image"] == f"allotment:{allotment.__version__}"


def test_kube_scheduler_is_told_what_print_config_prints(
    scheduling: dict[tuple[str, str], Document],
) -> None:
    container = the_container(scheduling, "allotment-scheduler")
    secret = next(each for each in container["args"] if each.startswith("--client-secret"))
    printed = CliRunner().invoke(scheduler_command, ["--print-config", secret]).output
    wanted = yaml.safe_load(printed)
    text = scheduling["ConfigMap", "allotment-kube-scheduler"]["data"]["config.yaml"]
    found = yaml.safe_load(text)
    port = scheduling["Service", "allotment-scheduler"]["spec"]["ports"][0]["port"]
    (profile,), (extender,) = found["profiles"], found["extenders"]
    url = f"https://allotment-scheduler.allotment-system.svc:{port}"
    assert [extender] == [each | {"urlPrefix": url} for each in wanted["extenders"]]
    assert profile == wanted["profiles"][-1], "the cluster's own has its other profiles"
    asks = scheduling["Deployment", "allotment-kube-scheduler"]["spec"]["template"]["spec"]
    (mounted,) = (each["secret"] for each in asks["volumes"] if "secret" in each)
    assert mounted["secretName"] == secret.partition("=")[2]
    (folder,) = (
        each["mountPath"]
        for each in asks["containers"][0]["volumeMounts"]
        if each["name"] == "certificate"
    )
    files = {f"{folder}/{each['path']}" for each in mounted["items"]}
    assert set(extender["tlsConfig"].values()) == files
    assert f"--scheduler-name={profile['schedulerName']}" in container["args"]
    assert found["leaderElection"]["resourceName"] in {
        each["metadata"]["name"] for key, each in scheduling.items() if key[0] == "Lease"
    }


# ---- the page ------------------------------------------------------------------------------------


def test_the_page_may_read_and_nothing_else(root: Path) -> None:
    text = (root / "deploy" / "manifests" / "web.yaml").read_text("utf-8")
    documents = list(yaml.safe_load_all(text))
    rights = {
        (verb, resource)
        for kind in ("ClusterRole", "Role")
        for rule in one(documents, kind)["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    reviews = {("create", "tokenreviews"), ("create", "subjectaccessreviews")}
    assert {verb for verb, _ in rights - reviews} == {"get", "list"}
    assert "secrets" not in text
    assert ("get", "pods/proxy") not in {
        (verb, resource)
        for rule in one(documents, "ClusterRole")["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_page_s_arguments_are_those_of_the_command(root: Path) -> None:
    text = (root / "deploy" / "manifests" / "web.yaml").read_text("utf-8")
    template = one(list(yaml.safe_load_all(text)), "Deployment")["spec"]["template"]
    [container] = template["spec"]["containers"]
    name, *arguments = container["args"]
    assert name == "web"
    with web_command.make_context("web", arguments) as context:
        assert context.params["listen"].startswith("127.0.0.1:")
        assert context.params["login"]
        assert context.params["cluster"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_krew_accepts_the_plugin_and_finds_its_program(root: Path) -> None:
    """By the rules of krew's `validate-krew-manifest`, and as krew moves an archive's files."""
    path = root / "deploy" / "krew" / "allot.yaml"
    text = path.read_text("utf-8").replace("@VERSION@", allotment.__version__)
    plugin = yaml.safe_load(re.sub(r"@SHA256_[A-Z0-9]+@", "0" * 64, text))
    assert plugin["apiVersion"] == "krew.googlecontainertools.github.com/v1alpha2"
    assert (plugin["kind"], plugin["metadata"]) == ("Plugin", {"name": path.stem})
    spec = plugin["spec"]
    texts = {"shortDescription": 70, "description": 80, "caveats": 80}
    assert spec.keys() == {*texts, "version", "homepage", "platforms"}
    assert re.fullmatch(r"v\d+\.\d+\.\d+", spec["version"])
    assert "\n" not in spec["shortDescription"]
    for name, most in texts.items():
        assert max(map(len, spec[name].splitlines())) <= most
    platforms = [each["selector"] for each in spec["platforms"]]
    assert platforms == [{"matchLabels": {"os": "linux", "arch": a}} for a in ("amd64", "arm64")]
    archive = [PurePosixPath("allot-1", each) for each in ("bin", "lib", "LICENSE")]
    for each in spec["platforms"]:
        assert each.keys() == {"selector", "uri", "sha256", "bin", "files"}
        assert each["uri"]
        assert each["sha256"] == "0" * 64
        # What a pattern matches keeps its name, under `to`.
        moved = {
            PurePosixPath(move["to"], found.name)
            for move in each["files"]
            for found in archive
            if found.match(move["from"])
        }
        assert moved == {PurePosixPath(name) for name in ("bin", "lib", "LICENSE")}
        assert PurePosixPath(each["bin"]) == PurePosixPath("bin", "kubectl-allot")

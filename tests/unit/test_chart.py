# SPDX-License-Identifier: Apache-2.0
"""The chart, by real helm: it renders the manifests, and each value does what it describes."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jsonschema_rs
import kubernetes_validate
import pytest
import yaml
from testbed.build import ROOT, binaries_path
from testbed.versions import KUBERNETES

import allotment

Json = dict[str, Any]
Key = tuple[str, str]

CHART = ROOT / "deploy" / "charts" / "allotment"
NAMESPACE = "allotment-system"
VERSIONS = tuple(f"1.{minor}" for minor in range(31, 38))
CLAIMS_FROM = 34  # resource.k8s.io/v1
CHECKSUM = "checksum/config"
EVERYTHING: Json = {
    "createNamespace": True,
    "stateFolder": {"enabled": True},
    "resourceClaims": {"enabled": True, "nvidiaClasses": True},
    "sharePods": {"enabled": True},
    "readerRoles": {"enabled": True},
    "web": {"enabled": True},
    "monitoring": {"podMonitors": True, "prometheusRule": True, "dashboards": True},
}


def run_helm(*words: str | Path, values: Json | None = None) -> subprocess.CompletedProcess[str]:
    binary = binaries_path() / "helm"
    if not binary.exists():
        pytest.skip("helm is not built here (make testbed)")
    given = [] if values is None else ["--values", "-"]
    return subprocess.run(
        [str(binary), *map(str, words), *given],
        input=json.dumps(values),
        # No settings, caches or plugins of this machine's user.
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )


def template(
    values: Json, *, chart: Path = CHART, namespace: str = NAMESPACE
) -> subprocess.CompletedProcess[str]:
    where = ["--namespace", namespace, "--kube-version", f"v{KUBERNETES}"]
    return run_helm("template", "allotment", chart, *where, values=values)


@cache
def _rendered(values: str, chart: Path) -> str:
    done = template(json.loads(values), chart=chart)
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(values: Json, chart: Path = CHART) -> dict[Key, Json]:
    return by_key(yaml.load_all(_rendered(json.dumps(values), chart), Loader=yaml.CSafeLoader))


def by_key(documents: Iterator[Json]) -> dict[Key, Json]:
    """The objects by kind and name; none is there twice."""
    found = [each for each in documents if each]
    objects = {(each["kind"], each["metadata"]["name"]): each for each in found}
    assert len(objects) == len(found)
    return objects


def manifests(*names: str) -> dict[Key, Json]:
    """The objects of files of deploy; agent.yaml and scheduler.yaml share some."""
    objects: dict[Key, Json] = {}
    for name in names:
        for key, document in by_key(
            yaml.safe_load_all((ROOT / "deploy" / name).read_text())
        ).items():
            assert objects.setdefault(key, document) == document
    return objects


def take_checksum(objects: dict[Key, Json]) -> str:
    """Remove the annotation that restarts kube-scheduler when its configuration changes."""
    pods = objects["Deployment", "allotment-kube-scheduler"]["spec"]["template"]
    digest: str = pods["metadata"].pop("annotations").pop(CHECKSUM)
    return digest


def test_the_default_rendering_is_agent_and_scheduler_as_in_the_manifests() -> None:
    found = render({})
    assert len(take_checksum(found)) == 64
    wanted = manifests("manifests/agent.yaml", "manifests/scheduler.yaml")
    # helm needs the namespace before it renders anything: `--create-namespace`.
    del wanted["Namespace", NAMESPACE]
    assert found == wanted


def test_with_everything_it_renders_all_manifests() -> None:
    found = render(EVERYTHING)
    take_checksum(found)
    definition = found["CustomResourceDefinition", "sharepods.kubeshare.nthu"]["metadata"]
    assert definition.pop("annotations") == {"helm.sh/resource-policy": "keep"}
    boards = {
        name: text
        for kind, each in [*found]
        if each.endswith("-dashboard")
        for name, text in found.pop((kind, each))["data"].items()
    }
    folder = CHART / "monitoring" / "dashboards"
    assert boards == {path.name: path.read_text() for path in folder.iterdir()}
    names = [f"manifests/{path.name}" for path in (CHART / "manifests").iterdir()]
    more = ["monitoring/pod-monitors.yaml", "monitoring/prometheus-rule.yaml"]
    assert found == manifests(*names, *more)


def test_a_packed_chart_has_the_manifests_in_it(tmp_path: Path) -> None:
    done = run_helm("package", CHART, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    (packed,) = tmp_path.iterdir()
    assert packed.name == f"allotment-{allotment.__version__}.tgz"
    with tarfile.open(packed) as archive:
        names = {each.name for each in archive if each.isfile()}
    assert "allotment/manifests/agent.yaml" in names
    assert "allotment/monitoring/prometheus.yaml" not in names
    # The release, which has the chart, is a Secret of at most 1 MiB.
    assert packed.stat().st_size < 300_000
    assert render(EVERYTHING, packed) == render(EVERYTHING)


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["default", "everything"])
def test_helm_s_linter_has_no_complaint(values: Json) -> None:
    done = run_helm("lint", "--strict", CHART, "--namespace", NAMESPACE, values=values)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


def test_chart_and_image_are_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == allotment.__version__


# ---- values --------------------------------------------------------------------------------------


class Change(NamedTuple):
    """A value other than the default one, and the text that it adds to the rendering."""

    value: object
    adds: str = ""
    removes: str = ""
    within: Mapping[str, Any] = MappingProxyType({})
    """Other values, without which this one has no effect."""


WEB: Json = {"web": {"enabled": True}}
MONITORS: Json = {"monitoring": {"podMonitors": True, "prometheusRule": True}}
TOLERATED = [{"key": "team", "operator": "Exists"}]
LARGE = {"limits": {"memory": "7Gi"}}
CHANGES: Mapping[str, Change] = {
    "global.imageRegistry": Change(
        "registry.example:5000", "registry.example:5000/kube-scheduler:"
    ),
    "image.registry": Change("registry.example", "image: registry.example/allotment:0.1.0"),
    "image.repository": Change("team/gpus", "image: team/gpus:0.1.0"),
    "image.tag": Change("9", "image: allotment:9"),
    "image.pullPolicy": Change("Always", "imagePullPolicy: Always"),
    "imagePullSecrets": Change(["mirror"], "imagePullSecrets:\n      - name: mirror"),
    "createNamespace": Change(True, "pod-security.kubernetes.io/enforce: privileged"),
    "agent.enabled": Change(False, removes="kind: DaemonSet"),
    "agent.configs": Change({"pool": "version: v1"}, "pool: 'version: v1'"),
    "agent.defaultConfig": Change("soft", "name: DEFAULT_CONFIG\n          value: soft"),
    "agent.simulated": Change("a100-80gb:2", "- agent\n        - --simulated=a100-80gb:2"),
    "agent.runtimeClassName": Change("nvidia", "runtimeClassName: nvidia"),
    "agent.nodeSelector": Change({"pool": "gpu"}, "kubernetes.io/os: linux\n        pool: gpu"),
    "agent.tolerations": Change(TOLERATED, "- key: team", removes="CriticalAddonsOnly"),
    "agent.resources": Change(LARGE, "memory: 7Gi"),
    "agent.priorityClassName": Change("high", "priorityClassName: high"),
    "scheduler.enabled": Change(False, removes="kind: MutatingWebhookConfiguration"),
    "scheduler.replicas": Change(3, "replicas: 3"),
    "scheduler.schedulerName": Change("gpus", "schedulerName: gpus"),
    "scheduler.modes": Change(["soft", "mps"], "--modes=soft,mps"),
    "scheduler.policy": Change(["binpack"], "- --policy=binpack"),
    "scheduler.gpuPolicy": Change(["spread"], "- --gpu-policy=spread"),
    "scheduler.computeFloor": Change(0, "--compute-floor=0"),
    "scheduler.takeOver": Change(["hami", "volcano"], "--take-over=hami,volcano"),
    "scheduler.podDisruptionBudget": Change(False, removes="kind: PodDisruptionBudget"),
    "scheduler.networkPolicy": Change(False, removes="kind: NetworkPolicy"),
    "scheduler.nodeSelector": Change({"role": "control"}, "role: control"),
    "scheduler.tolerations": Change(TOLERATED, "- key: team"),
    "scheduler.resources": Change(LARGE, "memory: 7Gi"),
    "scheduler.priorityClassName": Change("high", removes="system-cluster-critical"),
    "webhook.failurePolicy": Change(
        "Ignore", "path: /webhook/pods\n      port: 443\n  failurePolicy: Ignore"
    ),
    "kubeScheduler.enabled": Change(False, removes="kind: KubeSchedulerConfiguration"),
    "kubeScheduler.replicas": Change(1, "replicas: 1"),
    "kubeScheduler.image.registry": Change("mirror.example", "mirror.example/kube-scheduler:v"),
    "kubeScheduler.image.repository": Change("k/scheduler", "registry.k8s.io/k/scheduler:v"),
    "kubeScheduler.image.tag": Change("v1.35.1", "registry.k8s.io/kube-scheduler:v1.35.1"),
    "kubeScheduler.resources": Change(LARGE, "memory: 7Gi"),
    "stateFolder.enabled": Change(True, "policyName: allotment-state-folder"),
    "resourceClaims.enabled": Change(True, "name: share.allotment.dev"),
    "resourceClaims.nvidiaClasses": Change(
        True, "name: mig.nvidia.com", within={"resourceClaims": {"enabled": True}}
    ),
    "sharePods.enabled": Change(True, "name: sharepods.kubeshare.nthu"),
    "readerRoles.enabled": Change(True, "name: allotment-reader"),
    "web.enabled": Change(True, "serviceAccountName: allotment-web"),
    "web.prometheus": Change("http://p:9090", "--prometheus=http://p:9090", within=WEB),
    "web.nodeSelector": Change({"role": "web"}, "role: web", within=WEB),
    "web.tolerations": Change(TOLERATED, "- key: team", within=WEB),
    "web.resources": Change(LARGE, "memory: 7Gi", within=WEB),
    "monitoring.podMonitors": Change(True, "kind: PodMonitor"),
    "monitoring.prometheusRule": Change(True, "kind: PrometheusRule"),
    "monitoring.labels": Change({"release": "prom"}, "release: prom", within=MONITORS),
    "monitoring.dashboards": Change(True, "name: allotment-fleet-dashboard"),
    "monitoring.dashboardLabels": Change(
        {"team": "gpus"}, "team: gpus", within={"monitoring": {"dashboards": True}}
    ),
}
TOGETHER: Mapping[str, Json] = {
    "agents-alone": {"scheduler": {"enabled": False}, **MONITORS},
    "scheduler-alone": {"agent": {"enabled": False}, **MONITORS},
    "an-own-kube-scheduler": {
        "kubeScheduler": {"enabled": False},
        "scheduler": {"schedulerName": "default-scheduler"},
    },
    "no-label-of-dashboards": {
        "monitoring": {"dashboards": True, "dashboardLabels": {"grafana_dashboard": None}}
    },
    "one-replica": {"scheduler": {"replicas": 1}, "kubeScheduler": {"replicas": 1}},
    "without-selectors": {
        "agent": {"nodeSelector": None, "tolerations": [], "priorityClassName": ""},
        "scheduler": {"priorityClassName": ""},
    },
}


def with_value(path: str, change: Change) -> Json:
    values = copy.deepcopy(dict(change.within))
    folder = values
    *parents, name = path.split(".")
    for parent in parents:
        folder = folder.setdefault(parent, {})
    folder[name] = change.value
    return values


def leaves(schema: Json, values: Json, path: str = "") -> Iterator[tuple[str, Json, object]]:
    """The values that the schema describes, each with its default."""
    assert schema["properties"].keys() == values.keys(), path
    # An umbrella chart has its own values in `global`, for all of its charts.
    assert schema["additionalProperties"] is (path == "global."), path
    for name, part in schema["properties"].items():
        if "properties" in part:
            yield from leaves(part, values[name], f"{path}{name}.")
        else:
            yield f"{path}{name}", part, values[name]


@pytest.fixture(scope="module")
def described() -> dict[str, str]:
    """The description of each value in the schema."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    return {path: part["description"] for path, part, _ in leaves(schema, values)}


def commented(text: str) -> Iterator[tuple[str, str]]:
    """The values of a file, each with the comment above it."""
    parents: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        if found := re.fullmatch(r" *# (.*)", line):
            comment.append(found[1])
            continue
        if found := re.match(r"( *)([\w.]+):", line):
            parents[len(found[1]) // 2 :] = [found[2]]
            if comment:
                yield ".".join(parents), " ".join(comment)
        comment = []


def test_values_and_schema_have_the_same_descriptions(described: Mapping[str, str]) -> None:
    comments = dict(commented((CHART / "values.yaml").read_text()))
    assert {path: comments.get(path) for path in described} == described


def test_each_value_is_tried(described: Mapping[str, str]) -> None:
    assert described.keys() == CHANGES.keys()


@pytest.mark.parametrize("path", CHANGES)
def test_each_value_changes_the_rendering(path: str) -> None:
    change = CHANGES[path]
    before = _rendered(json.dumps(dict(change.within)), CHART)
    after = _rendered(json.dumps(with_value(path, change)), CHART)
    assert change.adds or change.removes
    if change.adds:
        assert change.adds in after
        assert change.adds not in before
    if change.removes:
        assert change.removes in before
        assert change.removes not in after


@pytest.mark.parametrize(
    ("path", "pods"),
    [
        *((f"agent.{name}", ["agent"]) for name in ("nodeSelector", "tolerations", "resources")),
        ("agent.priorityClassName", ["agent"]),
        ("scheduler.nodeSelector", ["kube-scheduler", "scheduler"]),
        ("scheduler.tolerations", ["kube-scheduler", "scheduler"]),
        ("scheduler.priorityClassName", ["kube-scheduler", "scheduler"]),
        ("scheduler.resources", ["scheduler"]),
        ("kubeScheduler.resources", ["kube-scheduler"]),
        *((f"web.{name}", ["web"]) for name in ("nodeSelector", "tolerations", "resources")),
    ],
)
def test_a_value_of_pods_changes_those_of_its_part_alone(path: str, pods: list[str]) -> None:
    change = CHANGES[path]
    before, after = render(dict(change.within)), render(with_value(path, change))
    changed = {name for (_, name), each in after.items() if each != before[_, name]}
    assert changed == {f"allotment-{name}" for name in pods}


def test_images_come_from_the_one_registry_that_an_isolated_cluster_reaches() -> None:
    values = {**EVERYTHING, "global": {"imageRegistry": "r.example"}, "imagePullSecrets": ["pull"]}
    pods = [
        each["spec"]["template"]["spec"]
        for (kind, _), each in render(values).items()
        if kind in {"DaemonSet", "Deployment"}
    ]
    assert len(pods) == 4
    assert {each["image"].partition("/")[0] for pod in pods for each in pod["containers"]} == {
        "r.example"
    }
    assert [pod["imagePullSecrets"] for pod in pods] == [[{"name": "pull"}]] * 4


def test_monitors_are_of_the_parts_that_are_installed() -> None:
    for part, other in (("agent", "scheduler"), ("scheduler", "agent")):
        found = render({other: {"enabled": False}, **MONITORS})
        assert [name for kind, name in found if kind == "PodMonitor"] == [f"allotment-{part}"]


def test_a_budget_never_keeps_the_only_replica_on_its_node() -> None:
    kinds = {kind for kind, _ in render(TOGETHER["one-replica"])}
    assert "PodDisruptionBudget" not in kinds


def test_kube_scheduler_restarts_with_another_configuration() -> None:
    named = with_value("scheduler.schedulerName", CHANGES["scheduler.schedulerName"])
    assert take_checksum(render(named)) != take_checksum(render({}))


def test_policies_against_forged_placements_are_there_whatever_is_installed() -> None:
    guards = {
        (kind, f"allotment-{name}")
        for kind in ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
        for name in ("placements", "bindings")
    }
    for name in ("agents-alone", "scheduler-alone", "an-own-kube-scheduler"):
        assert guards <= render(TOGETHER[name]).keys(), name


# ---- Kubernetes' own schemas ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def all_objects() -> list[Json]:
    """All objects of all renderings that differ."""
    matrix = [{}, EVERYTHING, *TOGETHER.values()]
    matrix += [with_value(path, change) for path, change in CHANGES.items()]
    objects = (each for values in matrix for each in render(values).values())
    return [*{json.dumps(each): each for each in objects}.values()]


def errors(objects: list[Json], version: str) -> Iterator[str]:
    """What the API of this version of Kubernetes does not know."""
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    folder /= f"v{version}.0-local-strict"
    definitions = json.loads((folder / "_definitions.json").read_text())
    registry = jsonschema_rs.Registry([(definitions["$id"], definitions)])

    @cache
    def validator(kind: str, api_version: str) -> jsonschema_rs.Validator:
        group, _, of_group = api_version.rpartition("/")
        words = [kind.lower(), group.partition(".")[0], of_group]
        path = folder / f"{'-'.join(filter(None, words))}.json"
        return jsonschema_rs.validator_for(json.loads(path.read_text()), registry=registry)

    for each in objects:
        for error in validator(each["kind"], each["apiVersion"]).iter_errors(each):
            yield f"{each['kind']} {each['metadata']['name']}: {error.message}"


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(all_objects: list[Json], version: str) -> None:
    minor = int(version.partition(".")[2])
    unknown = {"monitoring.coreos.com"} | ({"resource.k8s.io"} if minor < CLAIMS_FROM else set())
    objects = [
        # Before 1.36 the schema asks for `endpoints`, which the API server itself never did.
        {"endpoints": [], **each} if each["kind"] == "EndpointSlice" else each
        for each in all_objects
        if each["apiVersion"].partition("/")[0] not in unknown
    ]
    assert len(objects) > 100
    assert [*errors(objects, version)] == []


def test_a_field_that_kubernetes_does_not_know_would_be_found() -> None:
    pods = copy.deepcopy(render({})["DaemonSet", "allotment-agent"])
    pods["spec"]["template"]["spec"]["nodeSelectors"] = {}
    (error,) = errors([pods], VERSIONS[-1])
    assert "nodeSelectors" in error


# ---- wrong values --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"schedulers": {}}, "schedulers"),
        ({"agent": {"nodeSelectors": {}}}, "nodeSelectors"),
        ({"scheduler": {"replicas": 0}}, "/scheduler/replicas"),
        ({"scheduler": {"replicas": "2"}}, "/scheduler/replicas"),
        ({"scheduler": {"modes": ["fast"]}}, "/scheduler/modes/0"),
        ({"scheduler": {"modes": []}}, "/scheduler/modes"),
        ({"scheduler": {"computeFloor": 101}}, "/scheduler/computeFloor"),
        ({"agent": {"configs": {"pool": {"version": "v1"}}}}, "/agent/configs/pool"),
        ({"agent": {"resources": {"memory": "1Gi"}}}, "memory"),
        ({"agent": {"tolerations": [{"effect": "Never"}]}}, "/agent/tolerations/0/effect"),
        ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
        ({"image": {"registry": "https://registry.example"}}, "/image/registry"),
        ({"image": {"repository": ""}}, "/image/repository"),
        ({"imagePullSecrets": [{"name": "pull"}]}, "/imagePullSecrets/0"),
        ({"webhook": {"failurePolicy": "fail"}}, "/webhook/failurePolicy"),
        ({"web": {"prometheus": "prometheus:9090"}}, "/web/prometheus"),
        ({"monitoring": {"labels": {"release": 1}}}, "/monitoring/labels/release"),
        ({"agent": {"defaultConfig": "pool"}}, "agent.defaultConfig: agent.configs has no pool"),
        (
            {"scheduler": {"schedulerName": "default-scheduler"}},
            "scheduler.schedulerName: default-",
        ),
        (
            {"resourceClaims": {"nvidiaClasses": True}},
            "resourceClaims.nvidiaClasses: claims are off",
        ),
        (
            {"scheduler": {"enabled": False}, "sharePods": {"enabled": True}},
            "sharePods.enabled: SharePods are served by the scheduler",
        ),
    ],
    ids=lambda part: part.split(":")[0].strip("/") if isinstance(part, str) else "",
)
def test_a_wrong_value_is_refused_by_its_name(values: Json, named: str) -> None:
    done = template(values)
    assert done.returncode != 0
    assert re.search(rf"{re.escape(named)}\b", done.stderr), done.stderr


def test_it_is_installed_into_its_own_namespace_alone() -> None:
    done = template({}, namespace="default")
    assert done.returncode != 0
    assert "--namespace allotment-system --create-namespace" in done.stderr

# SPDX-License-Identifier: Apache-2.0
"""`allot migrate`: plans from what a cluster has, and whole moves there and back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from migrated_cluster import AGENT, MigratedCluster, Terminal, merged, migrated_http
from old_systems import (
    CONFIG_LABEL,
    GPUS,
    MADE,
    NVIDIA,
    SLICED,
    SPECS,
    agent,
    container,
    dra,
    hami,
    nvidia,
    tencent,
    variables,
)
from tests.unit.test_chart import render

from allotment.agent.config.parsing import parse
from allotment.cli.migrate_systems import OLD_SYSTEMS
from allotment.dialects.foreign.settings import SYSTEMS, settings_of

BY_MAP = {"name": "MIG_STRATEGY", "valueFrom": {"configMapKeyRef": {"name": "x", "key": "y"}}}


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    cluster = MigratedCluster()
    with migrated_http(cluster, tmp_path) as kubeconfig:
        yield Terminal(cluster, kubeconfig)


def test_nvidias_plugin_there_and_back(terminal: Terminal) -> None:
    cluster = terminal.cluster
    nvidia(cluster)
    before = {name: cluster.labels(name) for name in cluster.nodes}
    affinity = cluster.affinity(NVIDIA)
    plan = terminal.plan()
    assert plan["system"] == "nvidia"
    assert [node["name"] for node in plan["nodes"]] == ["gpu-1", "gpu-2"]
    assert plan["nodes"][0]["pods"] == ["ml/old"]
    assert plan["nodes"][0]["offers"] == GPUS
    assert plan["nodes"][0]["config"] == "shared"
    assert plan["daemon_sets_with_rule"] == [NVIDIA, f"{NVIDIA}-gpu-feature-discovery"]
    assert cluster.writes == []

    agent(cluster, plan)
    done = terminal.run("apply", "gpu-1", "--yes")
    assert done.exit_code == 0, done.stderr
    assert "1 node moved from NVIDIA's device plugin" in done.stdout
    assert cluster.on("gpu-1") == {AGENT}
    assert cluster.on("gpu-2") == {NVIDIA, f"{NVIDIA}-gpu-feature-discovery"}
    assert "ml/old" in cluster.users
    states = [(node["name"], node["state"]) for node in terminal.plan()["nodes"]]
    assert states == [("gpu-1", "moved"), ("gpu-2", "old")]

    assert terminal.run("apply", "--yes").exit_code == 0
    assert cluster.on("gpu-2") == {AGENT}
    assert terminal.run("back", "gpu-1", "--yes").exit_code == 0
    assert cluster.on("gpu-1") == {NVIDIA, f"{NVIDIA}-gpu-feature-discovery"}
    assert cluster.affinity(NVIDIA) != affinity
    assert terminal.run("back", "--yes").exit_code == 0
    assert {name: cluster.labels(name) for name in cluster.nodes} == before
    assert cluster.affinity(NVIDIA) != affinity, "its pods would be replaced"
    done = terminal.run("back", "--yes", "--remove-rules")
    assert done.exit_code == 0, done.stderr
    assert cluster.affinity(NVIDIA) == affinity
    assert not any(cluster.is_cordoned(name) for name in cluster.nodes)


def test_the_way_back_removes_what_the_agent_wrote(terminal: Terminal) -> None:
    """Otherwise a scheduler would go on to send pods to the node."""
    cluster = terminal.cluster
    nvidia(cluster)
    agent(cluster, terminal.plan())
    assert terminal.run("apply", "--yes").exit_code == 0
    for node in cluster.nodes.values():
        node["metadata"]["annotations"] |= {
            "allotment.dev/devices": "{}",
            "allotment.dev/labels": "nvidia.com/gpu.count",
        }
        node["metadata"]["labels"]["nvidia.com/gpu.count"] = "2"
        node["status"]["capacity"]["allotment.dev/gpu-compute"] = "200"
    assert terminal.run("back", "gpu-1", "--yes").exit_code == 0
    assert cluster.nodes["gpu-1"]["metadata"]["annotations"] == {}
    assert cluster.labels("gpu-1") == {"nvidia.com/gpu.present": "true"}
    assert cluster.nodes["gpu-1"]["status"]["capacity"] == GPUS
    assert "allotment.dev/devices" in cluster.nodes["gpu-2"]["metadata"]["annotations"]


def test_nvidias_settings(terminal: Terminal) -> None:
    nvidia(terminal.cluster)
    plan = terminal.plan()
    values = plan["values"]
    assert yaml.safe_load(values["agent"]["configs"]["shared"]) == yaml.safe_load(SLICED)
    assert values["agent"]["defaultConfig"] == "shared"
    assert values["agent"]["runtimeClassName"] == "nvidia"
    assert values["agent"]["nodeSelector"]["allotment.dev/agent"] == "true"
    assert values["scheduler"] == {"enabled": False}
    said = {each["name"]: each for each in plan["settings"]}
    assert said["shared"]["value"] == "nvidia.com/gpu x 4 (timeSlicing)"
    assert said["shared: flags.mpsRoot"]["becomes"] is None
    assert "state folder" in said["shared: flags.mpsRoot"]["reason"]
    assert any("--enforce" in note for note in plan["notes"])


def test_enforced_replicas(terminal: Terminal) -> None:
    nvidia(terminal.cluster)
    plan = terminal.plan("--enforce")
    file = parse(plan["values"]["agent"]["configs"]["shared"], source="shared")
    assert file.allotment is not None
    assert [each.mode for each in file.allotment.devices or ()] == ["soft"]
    assert plan["notes"] == []


def test_the_operators_labels_take_the_plugin_off(terminal: Terminal) -> None:
    cluster = terminal.cluster
    label = "nvidia.com/gpu.deploy.device-plugin"
    cluster.add_node("gpu-1", labels={label: "true"}, capacity=GPUS)
    cluster.add_daemon_set(
        "gpu-operator/nvidia-device-plugin-daemonset",
        selector={label: "true"},
        containers=[container(env=variables(MIG_STRATEGY="mixed", MPS_ROOT="/run", **SPECS))],
    )
    plan = terminal.plan()
    assert plan["daemon_sets_with_rule"] == []
    assert plan["nodes"][0]["labels"] == {label: "false"}
    assert yaml.safe_load(plan["values"]["agent"]["configs"]["default"]) == {
        "version": "v1",
        "flags": {"migStrategy": "mixed", "plugin": {"passDeviceSpecs": True}},
    }
    assert terminal.settings()["MPS_ROOT"].startswith("no: the control daemons")


def test_a_configuration_that_the_agent_refuses_is_named(terminal: Terminal) -> None:
    nvidia(terminal.cluster)
    broken = {"metadata": {"name": "configs", "namespace": "nvidia-device-plugin"}}
    texts = {"shared": SLICED, "odd": "flags: {sharing: {}}", "text": "[", "entry.sh": "exit"}
    terminal.cluster.others["config_maps"] = [{**broken, "data": texts}]
    settings = terminal.settings()
    assert settings["odd"].startswith("no: odd: $.flags.sharing: unknown key")
    assert settings["text"] == "no: it is not YAML"
    assert set(terminal.plan()["values"]["agent"]["configs"]) == {"shared"}


# ---- the other systems ---------------------------------------------------------------------------


def test_each_system_of_the_table_is_made_here() -> None:
    assert list(MADE) == list(OLD_SYSTEMS)
    assert {name for each in OLD_SYSTEMS.values() for name in each.take_over} <= set(SYSTEMS)


@pytest.mark.parametrize("system", MADE)
def test_every_system_there_and_back(terminal: Terminal, system: str) -> None:
    cluster = terminal.cluster
    MADE[system](cluster)
    before = cluster.labels("gpu-1")
    plugins = cluster.on("gpu-1")
    affinities = {name: cluster.affinity(name) for name in plugins}
    plan = terminal.plan()
    assert plan["system"] == system
    agent(cluster, plan)
    assert terminal.run("apply", "gpu-1", "--yes").exit_code == 0
    assert cluster.on("gpu-1") == {AGENT}
    left = cluster.nodes["gpu-1"]["metadata"]["annotations"]
    assert not set(OLD_SYSTEMS[system].annotations) & left.keys()
    done = terminal.run("back", "--yes", "--remove-rules")
    assert done.exit_code == 0, done.stderr
    assert cluster.on("gpu-1") == plugins
    assert cluster.labels("gpu-1") == before
    assert {name: cluster.affinity(name) for name in plugins} == affinities


@pytest.mark.parametrize("system", MADE)
def test_every_plan_has_values_that_the_chart_and_the_agent_accept(
    terminal: Terminal, system: str, root: Path
) -> None:
    MADE[system](terminal.cluster)
    plan = terminal.plan()
    values = yaml.safe_load(terminal.run("plan", "-o", "values").stdout)
    assert values == plan["values"]
    chart = root / "deploy" / "charts" / "allotment"
    usual = yaml.safe_load((chart / "values.yaml").read_text("utf-8"))
    schema = json.loads((chart / "values.schema.json").read_text("utf-8"))
    jsonschema_rs.validator_for(schema).validate(merged(usual, values))
    configs = usual["agent"]["configs"] | values["agent"].get("configs", {})
    for name, text in configs.items():
        parse(text, source=name)
    assert values["agent"]["defaultConfig"] in configs
    assert {node["config"] for node in plan["nodes"]} <= configs.keys()
    settings_of(plan["dialects"])


@pytest.mark.parametrize("system", ["nvidia", "hami"])
def test_helm_installs_the_agent_on_labelled_nodes_alone(terminal: Terminal, system: str) -> None:
    MADE[system](terminal.cluster)
    values = terminal.plan()["values"]
    found = render(values)
    pods = found["DaemonSet", "allotment-agent"]["spec"]["template"]["spec"]
    assert pods["nodeSelector"] == {"kubernetes.io/os": "linux", "allotment.dev/agent": "true"}
    configs = found["ConfigMap", "allotment-config"]["data"]
    assert configs.items() >= values["agent"]["configs"].items()
    variables = {each["name"]: each.get("value") for each in pods["containers"][0]["env"]}
    assert variables["DEFAULT_CONFIG"] == values["agent"]["defaultConfig"]
    scheduler = found.get(("Deployment", "allotment-scheduler"))
    if system == "nvidia":
        assert scheduler is None
    else:
        assert scheduler is not None
        args = scheduler["spec"]["template"]["spec"]["containers"][0]["args"]
        assert "--take-over=hami" in args


def test_hamis_settings(terminal: Terminal) -> None:
    hami(terminal.cluster)
    plan = terminal.plan()
    assert plan["dialects"] == {
        "hami": {
            "defaultMemory": 4000,
            "gpuCorePolicy": "force",
            "nodeSchedulerPolicy": "spread",
            "disableCoreLimit": True,
        }
    }
    said = terminal.settings()
    assert said["deviceSplitCount"] == "no: a GPU takes as many shares as fit"
    assert said["newSetting"] == "no: Allotment has no such setting"
    assert "defaultCores" in said["defaultCores"]
    assert said["gpu-1: devicesplitcount"].startswith("no: ")
    assert plan["values"]["scheduler"] == {"takeOver": ["hami"]}
    assert yaml.safe_load(plan["values"]["agent"]["configs"]["gpu-1"]) == {
        "version": "v1",
        "allotment": {"devices": [{"modes": ["mig"]}]},
    }
    assert plan["nodes"][0]["labels"] == {"gpu": None, CONFIG_LABEL: "gpu-1"}
    more = {"key": "team", "operator": "Exists", "effect": "NoSchedule"}
    assert more in plan["values"]["agent"]["tolerations"]
    kinds = {(each["kind"], each["name"]) for each in plan["found"]}
    assert ("Deployment", "kube-system/hami-scheduler") in kinds
    assert ("MutatingWebhookConfiguration", "hami-webhook") in kinds


@pytest.mark.parametrize(
    ("system", "name", "becomes"),
    [
        ("volcano", "gpuMemoryFactor", "--dialects: volcano.gpuMemoryFactor"),
        ("volcano", "deviceshare.SchedulePolicy", "no: scheduler.policy and"),
        ("hami", "--mig-strategy", "no: slices are cut on request"),
        ("aliyun", "memoryUnit", "--dialects: aliyun.memoryUnit"),
        ("aliyun", "--health-check", "no: health is always checked"),
        ("tencent", "--share-mode", "no: GPUs are always shared"),
        ("nvidia-dra", "DynamicMIG", "agent.configs.dra: modes [soft, mig]"),
        ("nvidia-dra", "PassthroughSupport", "no: VfioDeviceConfig is not served"),
        ("nvidia-dra", "Newer", "no: Allotment does not know this gate"),
        ("nvidia-dra", "compute-domain.nvidia.com", "no: ComputeDomains leave with the same"),
    ],
)
def test_settings_of_others(terminal: Terminal, system: str, name: str, becomes: str) -> None:
    MADE[system](terminal.cluster)
    said = terminal.settings()
    assert said[name].startswith(becomes)
    assert "MPSSupport" not in said


@pytest.mark.parametrize(
    ("system", "part", "name", "becomes"),
    [
        ("nvidia", {"args": ["--mig-strategy=single"]}, "--mig-strategy", "agent.configs: flags."),
        ("nvidia", {"args": ["--pass-device-specs"]}, "--pass-device-specs", "agent.configs: "),
        ("nvidia", {"args": ["--newer=1"]}, "--newer", "no: `allot migrate` does not know it"),
        ("nvidia", {"env": [BY_MAP]}, "MIG_STRATEGY", "no: its value is in another object"),
        ("hami", {"args": ["--device-memory-scaling=2"]}, "deviceMemoryScaling", "--dialects: "),
        ("hami", {"args": ["--device-split-count", "5"]}, "deviceSplitCount", "no: a GPU takes"),
        ("hami", {"envFrom": [{"configMapRef": {}}]}, "envFrom", "no: its value is in another"),
        ("aliyun", {"args": ["-memory-unit", "MiB"]}, "memoryUnit", "--dialects: "),
        ("tencent", {"env": variables(EXTRA_FLAGS="--x --y=1")}, "--y", "no: `allot migrate` does"),
    ],
)
def test_flags_and_variables(
    terminal: Terminal, system: str, part: dict[str, Any], name: str, becomes: str
) -> None:
    cluster = terminal.cluster
    MADE[system](cluster)
    (workload, *_) = cluster.daemon_sets.values()
    image = "registry.example.com/plugin"
    workload["spec"]["template"]["spec"]["containers"] = [container(image=image, **part)]
    assert terminal.settings()[name].startswith(becomes)


def test_pods_that_no_scheduler_would_count_hold_their_node(terminal: Terminal) -> None:
    cluster = terminal.cluster
    hami(cluster)
    plan = terminal.plan()
    del plan["values"]["scheduler"]["takeOver"]
    agent(cluster, plan)
    done = terminal.run("apply", "--yes")
    assert done.exit_code == 7
    assert "it has no --take-over=hami" in done.stderr
    assert cluster.writes == []
    del cluster.users["ml/old"]
    assert terminal.run("apply", "--yes").exit_code == 0


def test_a_claim_holds_its_node(terminal: Terminal) -> None:
    cluster = terminal.cluster
    dra(cluster)
    agent(cluster, terminal.plan())
    for name, driver in (("a", "gpu.nvidia.com"), ("b", "nic.example.com")):
        result = {"driver": driver, "pool": "gpu-1"}
        users = [{"resource": "pods", "name": f"old-{name}"}]
        status = {"allocation": {"devices": {"results": [result]}}, "reservedFor": users}
        cluster.add("claims", f"ml/{name}", status=status)
    assert "drain the node of ml/old-a" in terminal.plan()["nodes"][0]["obstacle"]
    done = terminal.run("apply", "--yes")
    assert done.exit_code == 7
    assert "ml/old-a" in done.stderr
    assert "ml/old-b" not in done.stderr
    assert cluster.writes == []
    del cluster.others["claims"][0]
    cluster.forbidden.add("/apis/resource.k8s.io/v1/resourceclaims")
    assert "its claims are unknown" in terminal.run("apply", "--yes").stderr
    cluster.forbidden.clear()
    assert terminal.run("apply", "--yes").exit_code == 0


def serve_mps(cluster: MigratedCluster, name: str, selector: dict[str, str]) -> None:
    image = "nvcr.io/nvidia/k8s-device-plugin:v0.20.0"
    cluster.add_daemon_set(f"{NVIDIA}-{name}", image=image, selector=selector)


def test_pods_of_an_mps_server_hold_their_node(terminal: Terminal) -> None:
    """Its server is in a DaemonSet of the plugin's image, and leaves with the plugin."""
    cluster = terminal.cluster
    nvidia(cluster)
    serve_mps(cluster, "mps-control-daemon", {"nvidia.com/mps.capable": "true"})
    cluster.nodes["gpu-1"]["metadata"]["labels"]["nvidia.com/mps.capable"] = "true"
    agent(cluster, terminal.plan())
    first, second = (node["obstacle"] for node in terminal.plan()["nodes"])
    assert first.endswith("its running clients end: drain the node of ml/old")
    assert second.startswith("the rule to avoid moved nodes replaces the MPS servers of all nodes")
    for words, message in (((), "the MPS server leaves"), (("gpu-2",), "MPS servers of all nodes")):
        done = terminal.run("apply", *words, "--yes")
        assert done.exit_code == 7
        assert message in done.stderr
    assert cluster.writes == []
    del cluster.users["ml/old"]
    assert terminal.run("apply", "--yes").exit_code == 0
    cluster.add_pod("ml/new", "gpu-1", {"nvidia.com/gpu": "1"})
    assert terminal.run("apply", "--yes").exit_code == 0, "the agent's own server"


@pytest.mark.parametrize(
    ("key", "effect", "added"),
    [
        ("nvidia.com/gpu", "NoSchedule", 0),
        ("nvidia.com/gpu", "NoExecute", 1),
        ("CriticalAddonsOnly", "NoExecute", 0),
        ("team", "PreferNoSchedule", 0),
    ],
)
def test_taints_that_the_chart_does_not_tolerate(
    terminal: Terminal, key: str, effect: str, added: int
) -> None:
    nvidia(terminal.cluster)
    terminal.cluster.nodes["gpu-1"]["spec"]["taints"] = [{"key": key, "effect": effect}]
    found = terminal.plan()["values"]["agent"].get("tolerations", [])
    assert found.count({"key": key, "operator": "Exists", "effect": effect}) == added


def test_other_daemon_sets_that_a_label_evicts_are_named(terminal: Terminal) -> None:
    hami(terminal.cluster)
    assert terminal.plan()["notes"] == []
    terminal.cluster.add_daemon_set("ops/exporter", image="exporter", selector={"gpu": "on"})
    (note,) = terminal.plan()["notes"]
    assert note.startswith("DaemonSet ops/exporter selects nodes by the label gpu")


@pytest.mark.parametrize("name", ["amd-gpu-manager-exporter", "gpu-manager-exporter"])
def test_other_gpu_managers_are_not_tencents(terminal: Terminal, name: str) -> None:
    terminal.cluster.add_node("gpu-1")
    terminal.cluster.add_daemon_set(f"amd/{name}", image=f"example.com/amd/{name}:v1")
    assert terminal.run("plan").exit_code == 4
    image = "ccr.ccs.tencentyun.com/tkeimages/gpu-manager:v1.1"
    terminal.cluster.add_daemon_set("kube-system/renamed", image=image)
    assert [each["name"] for each in terminal.plan()["found"]] == ["kube-system/renamed"]


# ---- choices and refusals ------------------------------------------------------------------------


def test_two_systems_are_moved_one_by_one(terminal: Terminal) -> None:
    nvidia(terminal.cluster)
    tencent(terminal.cluster)
    terminal.cluster.nodes["gpu-1"]["metadata"]["labels"]["nvidia.com/gpu.present"] = "true"
    done = terminal.run("plan")
    assert done.exit_code == 2
    assert "2 GPU systems: nvidia, tencent" in done.stderr
    assert terminal.plan("--from", "tencent")["system"] == "tencent"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("plan", "--from", "hamy"), 2, "unknown system"),
        (("plan", "--from", "hami"), 4, "no HAMi in this cluster"),
        (("apply", "cpu-1", "--yes"), 4, "node cpu-1 has no plugin of NVIDIA's device plugin"),
        (("apply", "gpu-1", "--yes"), 4, "the agent is not installed"),
        (("back", "gpu-1", "--yes"), 4, "node gpu-1 was not moved"),
    ],
)
def test_refusals(terminal: Terminal, words: tuple[str, ...], code: int, message: str) -> None:
    nvidia(terminal.cluster)
    done = terminal.run(*words)
    assert done.exit_code == code
    assert message in done.stderr
    assert terminal.cluster.writes == []


def test_a_cluster_without_another_system(terminal: Terminal) -> None:
    terminal.cluster.add_node("a")
    done = terminal.run("plan")
    assert done.exit_code == 4
    assert "no other GPU system" in done.stderr


@pytest.mark.parametrize(
    ("words", "answer"), [(("--dry-run",), None), ((), "n\n")], ids=["dry-run", "no"]
)
def test_nothing_is_changed_without_a_yes(
    terminal: Terminal, words: tuple[str, ...], answer: str | None
) -> None:
    nvidia(terminal.cluster)
    agent(terminal.cluster, terminal.plan())
    done = terminal.run("apply", *words, answer=answer)
    assert done.exit_code == 0
    assert "node gpu-1: running pods of NVIDIA's device plugin: 1" in done.stdout
    assert terminal.cluster.writes == []


def test_a_dry_run_fails_where_the_move_would(terminal: Terminal) -> None:
    cluster = terminal.cluster
    hami(cluster)
    plan = terminal.plan()
    assert "the agent is not installed" in terminal.run("apply", "--dry-run").stderr
    del plan["values"]["scheduler"]["takeOver"]
    agent(cluster, plan)
    assert "it has no --take-over=hami" in terminal.run("apply", "--dry-run").stderr
    cluster.others["deployments"].pop()
    agent(cluster, terminal.plan())
    assert terminal.run("apply", "--dry-run").exit_code == 0
    assert terminal.run("apply", "--yes").exit_code == 0
    writes = len(cluster.writes)
    assert terminal.run("back", "--dry-run").exit_code == 0
    cluster.add_pod("ml/new", "gpu-1", {"allotment.dev/gpu": "1"})
    assert "ml/new" in terminal.run("back", "--dry-run").stderr
    assert terminal.run("back", "--dry-run", "--keep-pods").exit_code == 0
    assert len(cluster.writes) == writes


def test_a_rule_without_a_moved_node_is_removed(terminal: Terminal) -> None:
    """As when a move stopped between the rule and the first node, or the last node was deleted."""
    cluster = terminal.cluster
    nvidia(cluster)
    affinity = cluster.affinity(NVIDIA)
    agent(cluster, terminal.plan())
    assert terminal.run("apply", "gpu-2", "--yes").exit_code == 0
    del cluster.nodes["gpu-2"]
    assert cluster.affinity(NVIDIA) != affinity
    assert terminal.run("back", "--remove-rules", "--dry-run").exit_code == 0
    assert cluster.affinity(NVIDIA) != affinity
    done = terminal.run("back", "--yes", "--remove-rules")
    assert done.exit_code == 0
    assert f"DaemonSet {NVIDIA} selects nodes as before" in done.stdout
    assert cluster.affinity(NVIDIA) == affinity


def test_a_rule_that_an_upgrade_removed_is_put_back(terminal: Terminal) -> None:
    """Then plugin and agent are both on the node, and the plugin's end is also the agent's."""
    cluster = terminal.cluster
    nvidia(cluster)
    agent(cluster, terminal.plan())
    affinity = cluster.affinity(NVIDIA)
    assert terminal.run("apply", "gpu-1", "--yes").exit_code == 0
    cluster.daemon_sets[NVIDIA]["spec"]["template"]["spec"]["affinity"] = affinity
    cluster.reconcile()
    assert cluster.on("gpu-1") == {AGENT, NVIDIA}
    seen: list[set[str]] = []
    cluster.on_write = lambda path: seen.append(cluster.on("gpu-1")) if "daemons" in path else None
    done = terminal.run("apply", "gpu-2", "--yes")
    assert done.exit_code == 0, done.stderr
    assert "node gpu-1: the old plugin is there again" in done.stdout
    assert seen == [{NVIDIA}], "the agent leaves before the rule ends the plugin"
    assert cluster.on("gpu-1") == cluster.on("gpu-2") == {AGENT}
    assert not cluster.is_cordoned("gpu-1")
    assert "node gpu-1: already moved" in terminal.run("apply", "--yes").stdout


def test_what_may_not_be_read_is_a_note(terminal: Terminal) -> None:
    nvidia(terminal.cluster)
    terminal.cluster.forbidden.add("/apis/node.k8s.io/v1/runtimeclasses")
    assert any("runtimeclasses" in note for note in terminal.plan()["notes"])
    terminal.cluster.forbidden.add("/api/v1/nodes")
    done = terminal.run("plan")
    assert done.exit_code != 0
    assert "list nodes, pods, daemonsets" in done.stderr


def test_the_first_failure_stops_the_move(terminal: Terminal) -> None:
    cluster = terminal.cluster
    nvidia(cluster)
    agent(cluster, terminal.plan())
    cluster.stuck.add(NVIDIA)
    done = terminal.run("apply", "--yes", "--timeout", "1s")
    assert done.exit_code == 7
    assert "node gpu-1 waited 1 s for the old plugin to leave" in done.stderr
    assert "allot migrate back gpu-1" in done.stderr
    assert cluster.record("gpu-2") is None
    cluster.stuck.clear()
    assert terminal.run("apply", "--yes").exit_code == 0
    assert cluster.on("gpu-1") == cluster.on("gpu-2") == {AGENT}


def test_ctrl_c_leaves_a_state_that_the_next_apply_goes_on_from(terminal: Terminal) -> None:
    cluster = terminal.cluster
    nvidia(cluster)
    agent(cluster, terminal.plan())
    cluster.stuck.add(NVIDIA)
    words = ["apply", "gpu-1", "--yes", "--kubeconfig", str(terminal.kubeconfig)]
    with subprocess.Popen(
        [sys.executable, "-m", "allotment", "migrate", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while "cordoned" not in (line := process.stdout.readline()):
            assert line, "it ended"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped: the last node above may be cordoned" in said
    assert cluster.is_cordoned("gpu-1")
    cluster.stuck.clear()
    assert terminal.run("apply", "gpu-1", "--yes").exit_code == 0
    assert cluster.on("gpu-1") == {AGENT}
    assert not cluster.is_cordoned("gpu-1")


def test_a_refusal_in_the_middle_says_that_a_node_may_be_closed(terminal: Terminal) -> None:
    cluster = terminal.cluster
    nvidia(cluster)
    agent(cluster, terminal.plan())
    cluster.forbidden.add("/api/v1/nodes/gpu-2")
    done = terminal.run("apply", "--yes")
    assert done.exit_code != 0
    assert "stopped: the last node above" in done.stderr
    assert cluster.on("gpu-1") == {AGENT}
    assert cluster.record("gpu-2") is None


def test_the_table_names_the_steps(terminal: Terminal) -> None:
    nvidia(terminal.cluster)
    shown = terminal.run("plan").stdout
    for words in (
        "From NVIDIA's device plugin (nvidia). Nothing was changed.",
        "(not carried over) the control daemons of MPS",
        "1. You: install Allotment: allot migrate plan --from nvidia -o values",
        f"2. apply: DaemonSet {NVIDIA} gets a rule",
        "apply, node by node",
        "You: remove the plugin's chart",
    ):
        assert words in shown

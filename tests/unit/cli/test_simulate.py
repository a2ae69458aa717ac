# SPDX-License-Identifier: Apache-2.0
"""`allot simulate`: what it prints, what it writes, what it refuses."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from allotment.cli import main
from allotment.kube.inventories import DEVICES, encode
from allotment.kube.live import LiveCluster, LivePod
from allotment.model.clusters import NodeDevice, NodeInventory, PodNeed, WantedContainer
from allotment.model.pods import PodUid
from allotment.model.requests import whole_devices
from allotment.simulate.outcomes import CLAIMS, beside_claims, document_of, summaries_of
from allotment.simulate.scenes import LiveScene

NODES = "sn,cpu_milli,memory_mib,gpu,model\nn-0,64000,262144,2,T4\nn-1,64000,262144,2,P100\n"
PODS = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time\n"
    "a,1000,10,1,500,,0,100\nb,1000,10,1,1000,T4,10,40\nc,1000,10,0,0,,20,90\n"
)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "pods.csv").write_text(PODS)
    return ["--nodes", f"{tmp_path}/nodes.csv", "--pods", f"{tmp_path}/pods.csv"]


def simulate(*words: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *words])


def documented(*words: str) -> Any:  # noqa: ANN401 - JSON
    shown = simulate(*words, "-o", "json")
    assert shown.exit_code == 0, shown.stderr
    return json.loads(shown.stdout)


def test_json_has_each_policy_and_seed(files: list[str]) -> None:
    document = documented(*files, "--policy", "binpack,fgd", "--seeds", "42-44,7")
    runs = document["runs"]
    assert [(each["policy"], each["seed"]) for each in runs] == [
        (policy, seed) for policy in ("binpack", "fgd") for seed in (42, 43, 44, 7)
    ]
    for run in runs:
        assert set(run["allocated_pct"]) == {"95", "100", "130"}
        assert set(run["fragmented_pct"]) == {"95", "100", "130"}
        assert set(run["decision_ms"]) == {"p50", "p99"}
        assert 0 < run["allocated_pct"]["130"] <= 100
        assert run["placed"] + run["impossible"] <= run["pods"]
    assert document["interrupted"] is False
    summary = document["summary"]
    mean = sum(run["allocated_pct"]["100"] for run in runs[:4]) / 4
    assert summary[0]["allocated_pct"]["100"] == pytest.approx(mean, abs=1e-3)


def test_a_table_has_a_line_for_each_policy(files: list[str]) -> None:
    shown = simulate(*files, "--policy", "first-fit,spread", "--seeds", "1-3")
    assert shown.exit_code == 0
    head, *rows = shown.stdout.splitlines()
    assert head.startswith("POLICY")
    assert "FRAGMENTED" in head
    assert [row.split()[:2] for row in rows] == [["first-fit", "3"], ["spread", "3"]]
    assert shown.stderr == ""


def test_claims_have_a_line_and_policies_are_compared_with_them(files: list[str]) -> None:
    shown = simulate(*files, "--policy", "binpack,fgd", "--dra")
    assert shown.exit_code == 0, shown.stderr
    _, *rows, one, other = shown.stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["binpack", "fgd", "claims"]
    assert re.fullmatch(
        r"binpack beside claims: [+-][\d.]+ pods placed, [+-][\d.]+ % of the GPUs allocated,"
        r" [+-][\d.]+ % free but unusable",
        one,
    )
    assert other.startswith("fgd beside claims: ")
    document = documented(*files, "--policy", "binpack", "--dra")
    ours, claims = document["summary"]
    (less,) = document["beside_claims"]
    assert less["policy"] == "binpack"
    assert less["placed"] == pytest.approx(ours["placed"] - claims["placed"], abs=1e-3)
    assert less["allocated_pct"] == pytest.approx(
        ours["allocated_pct"]["100"] - claims["allocated_pct"]["100"], abs=1e-3
    )
    assert document["settings"]["dra"] is True
    assert documented(*files, "--policy", "binpack")["beside_claims"] == []
    assert simulate(*files, "--policy", "claims").exit_code != 0, "it is no policy"


def test_departures(files: list[str]) -> None:
    (run,) = documented(*files, "--departures", "--policy", "binpack")["runs"]
    # 500 until 20, and 1000 from 10 on, of 4000, over 20 seconds.
    assert run["allocated_pct"] == {"mean": 25.0, "late": 37.5, "most": 37.5}
    assert (run["waited"], run["still_waiting"], run["impossible"]) == (0, 0, 0)
    shown = simulate(*files, "--departures", "--policy", "binpack")
    assert "STILL" in shown.stdout
    tuned = documented(*files, "--departures", "--tune", "1.2", "--policy", "binpack")
    assert tuned["runs"][0]["asked_pct"]["late"] == pytest.approx(120, rel=0.01)


def test_as_they_are_pods_come_once(files: list[str]) -> None:
    document = documented(*files, "--tune", "0", "--policy", "binpack")
    assert document["runs"][0]["pods"] == 3
    assert document["settings"]["tune"] is None


def test_what_is_generated_is_written_and_read(tmp_path: Path) -> None:
    names = ("--nodes", f"{tmp_path}/n.csv", "--pods", f"{tmp_path}/p.csv")
    made = simulate("--generate", "--scale", "0.01", "--seeds", "5", *names)
    assert (made.exit_code, made.stdout) == (0, "")
    assert "nodes" in made.stderr
    read = documented(*names, "--policy", "binpack", "--gpu-memory")
    at_once = documented(
        "--generate", "--scale", "0.01", "--seeds", "5", "--policy", "binpack", "--gpu-memory"
    )
    again = documented(*names, "--policy", "binpack", "--gpu-memory", "--seeds", "5")
    assert read["runs"][0]["curve"] != at_once["runs"][0]["curve"]
    assert again["runs"][0]["curve"] == at_once["runs"][0]["curve"]
    twice = simulate("--generate", *names)
    assert twice.exit_code == 2
    assert "exists already" in twice.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give --nodes and --pods, or --generate, or --from-cluster"),
        (["--from-cluster", "--generate"], "--from-cluster excludes a trace"),
        (["--from-cluster", "--departures"], "--departures needs a trace"),
        (["--generate", "--replay", "pending"], "--replay needs --from-cluster"),
        (["--generate", "--modes", "mig"], "--modes needs --from-cluster"),
        (["--from-cluster", "--modes", "migg"], "--modes: 'migg' is not a mode"),
        (["--generate", "--kubeconfig", "x"], "--kubeconfig needs --from-cluster"),
        (["--nodes", "x"], "--nodes needs --pods"),
        (["--generate", "--pods", "x"], "--pods needs --nodes"),
        (["--nodes", "x", "--pods", "y", "--scale", "2"], "--scale needs --generate"),
        (["--nodes", "/none/x", "--pods", "y"], "cannot read /none/x"),
        (["--generate", "--policy", "best"], "unknown policy 'best'"),
        (["--generate", "--policy", "fgd,"], "unknown policy ''"),
        (["--generate", "--seeds", "x"], "'x' is not a seed"),
        (["--generate", "--seeds", "5-3"], "ends before it begins"),
        (["--generate", "--seeds", "1-9999999"], "more than 1000 seeds"),
        (["--generate", "--seeds", "-5"], "'-5' is not a seed"),
        (["--generate", "--tune", "-1"], "--tune"),
        (["--generate", "--tune", "nan"], "--tune"),
        (["--generate", "--jobs", "0"], "--jobs"),
    ],
)
def test_what_cannot_be_meant(words: list[str], said: str) -> None:
    shown = simulate(*words)
    assert shown.exit_code == 2, shown.output
    assert shown.stdout == ""
    assert said in shown.stderr
    assert "hint: " in shown.stderr


def test_a_bad_line_is_named(files: list[str]) -> None:
    Path(files[-1]).write_text(PODS + "d,1000,10,1,5000,,0,100\n")
    shown = simulate(*files)
    assert shown.exit_code == 2
    assert "pods.csv, line 5: gpu_milli is '5000'" in shown.stderr


def test_a_cluster_that_cannot_be_reached(tmp_path: Path) -> None:
    shown = simulate("--from-cluster", "--policy", "binpack", "--kubeconfig", f"{tmp_path}/none")
    assert shown.exit_code == 1
    assert f"{tmp_path}/none: cannot be used for the API server" in shown.stderr
    assert "hint: " in shown.stderr


def test_a_cluster_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "config"
    write_kubeconfig(kubeconfig, "http://127.0.0.1:1")
    shown = simulate("--from-cluster", "--policy", "binpack", "--kubeconfig", str(kubeconfig))
    assert "cannot be reached: Connection refused" in shown.stderr
    assert "hint: check that `kubectl get nodes` works with this kubeconfig" in shown.stderr


def write_kubeconfig(path: Path, address: str) -> None:
    path.write_text(
        json.dumps(
            {
                "current-context": "it",
                "contexts": [{"name": "it", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": address}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
            }
        )
    )


@pytest.fixture
def usual_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """An API server that kubectl would find; its nodes."""
    lists = ("/api/v1/nodes", "/api/v1/pods", "/apis/resource.k8s.io/v1/resourceclaims")
    answers: dict[str, list[object]] = {path: [] for path in lists}

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            items = answers[self.path.partition("?")[0]]
            text = json.dumps({"metadata": {}, "items": items}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    (tmp_path / ".kube").mkdir()
    write_kubeconfig(tmp_path / ".kube" / "config", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield answers["/api/v1/nodes"]
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_cluster_without_anything_to_place_is_said_to_be_so(usual_cluster: list[object]) -> None:
    shown = simulate("--from-cluster", "--policy", "binpack")
    assert shown.exit_code == 2
    assert "no node of the cluster publishes GPUs" in shown.stderr
    written = encode(LIVE.nodes[0])
    usual_cluster.append({"metadata": {"name": "n", "annotations": {DEVICES: written}}})
    shown = simulate("--from-cluster", "--policy", "binpack")
    assert shown.exit_code == 0, shown.stderr
    assert "nothing to place: no pod of the cluster has a part" in shown.stderr
    shown = simulate("--from-cluster", "--policy", "binpack", "--replay", "pending")
    assert "nothing to place: no pod of the cluster waits for" in shown.stderr


def fields(document: object, path: str = "") -> Iterator[str]:
    """The dotted paths of a document's values; `[]` stands for a list's entries."""
    if isinstance(document, dict) and not path.endswith(("reasons", "_stdev")):
        for name, value in document.items():
            yield from fields(value, f"{path}.{name}" if path else name)
    elif isinstance(document, list):
        for value in document:
            yield from fields(value, f"{path}[]")
    else:
        yield path


MEANS = frozenset({"policy", "seeds", "decision_ms", "allocated_pct_stdev"})


def test_fields_are_the_documented_ones(files: list[str], root: Path) -> None:
    page = (root / "docs" / "reference" / "json.md").read_text()
    _, _, part = page.partition("## `allot simulate`")
    named = set(re.findall(r"^\| `([^`]+)` \|", part.partition("\n## ")[0], re.MULTILINE))
    scene = LiveScene(cluster=LIVE)
    live, claims = (scene.run(name, 1, lambda _: None) for name in ("binpack", CLAIMS))
    kinds = [
        documented(*files, "--policy", "binpack", "--dra"),
        documented(*files, "--policy", "binpack", "--dra", "--departures"),
        documented(*files, "--policy", "binpack"),
        documented("--generate", "--scale", "0.01", "--policy", "binpack"),
        documented(*files, "--policy", "binpack", "--departures"),
        {
            "settings": {"from_cluster": True, "replay": "all", "modes": ["soft"]},
            "runs": [document_of(live)],
            "summary": summaries_of([live]),
            "beside_claims": beside_claims(summaries_of([live, claims])),
        },
    ]
    shown = set()
    for document in kinds:
        parts = ("settings", "runs", "beside_claims")
        shown |= set(fields({name: document.get(name, []) for name in parts}))
        means = document["summary"][0]
        shown |= set(fields({"summary": [{name: means[name] for name in MEANS}]}))
        assert set(means) - MEANS <= set(document["runs"][0])
    assert shown | {"interrupted"} == named


LIVE = LiveCluster(
    nodes=(
        NodeInventory(name="n", devices=(NodeDevice(uuid="G", model="H", memory_bytes=1 << 30),)),
    ),
    pods=(
        LivePod(
            need=PodNeed(
                uid=PodUid("p"),
                containers=(WantedContainer(name="c", request=whole_devices(2, mode="soft")),),
            )
        ),
    ),
)

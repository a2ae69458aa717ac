# SPDX-License-Identifier: Apache-2.0
"""`allot scheduler`, as far as it goes without a cluster: what it prints, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from allotment.cli.scheduler import command
from allotment.model.errors import AllotError, UsageError
from allotment.scheduler.settings import SchedulerSettings


def test_the_configuration_is_one_of_kube_scheduler() -> None:
    options = ["--print-config", "--listen", ":9000"]
    result = CliRunner().invoke(command, [*options, "--plain-pods"])
    assert result.exit_code == 0, result.output
    config = yaml.safe_load(result.output)
    assert config["kind"] == "KubeSchedulerConfiguration"
    extender, plain = config["extenders"]
    assert extender["urlPrefix"] == "http://127.0.0.1:9000"
    assert extender["nodeCacheCapable"] is True
    assert extender["ignorable"] is False
    assert [each["name"] for each in extender["managedResources"]] == ["allotment.dev/gpu"]
    assert plain["urlPrefix"] == extender["urlPrefix"]
    assert plain["ignorable"] is True
    assert "managedResources" not in plain
    assert [each for each in plain if each.endswith("Verb")] == ["prioritizeVerb"]
    alone = CliRunner().invoke(command, options)
    assert yaml.safe_load(alone.output) == config | {"extenders": [extender]}


def test_the_configuration_slows_no_other_profile() -> None:
    config = yaml.safe_load(CliRunner().invoke(command, ["--print-config"]).output)
    assert config.keys() == {"apiVersion", "kind", "profiles", "extenders"}
    assert config["profiles"] == [
        {"schedulerName": "default-scheduler"},
        {"schedulerName": "allotment-scheduler", "percentageOfNodesToScore": 100},
    ]


def test_a_profile_is_printed_once() -> None:
    options = ["--print-config", "--scheduler-name", "default-scheduler"]
    (profile,) = yaml.safe_load(CliRunner().invoke(command, options).output)["profiles"]
    assert profile == {"schedulerName": "default-scheduler", "percentageOfNodesToScore": 100}


def test_the_configuration_names_the_authority_where_it_is_https() -> None:
    options = ["--print-config", "--listen", "[::1]:9000", "--tls-cert-file", "x.crt"]
    config = yaml.safe_load(CliRunner().invoke(command, [*options, "--plain-pods"]).output)
    extender, plain = config["extenders"]
    assert plain["tlsConfig"] == extender["tlsConfig"]
    assert extender["urlPrefix"] == "https://[::1]:9000"
    assert extender["enableHTTPS"] is True
    assert extender["tlsConfig"]["caFile"]


def test_the_configuration_leads_to_the_service_and_shows_who_asks() -> None:
    options = ["--listen", ":9447", "--client-secret", "c", "--service", "gpus/ext"]
    config = yaml.safe_load(CliRunner().invoke(command, [*options, "--print-config"]).output)
    (extender,) = config["extenders"]
    assert extender["urlPrefix"] == "https://ext.gpus.svc:9447"
    assert extender["tlsConfig"]["serverName"] == "ext.gpus.svc"
    assert extender["tlsConfig"]["certFile"]
    plain = CliRunner().invoke(command, [*options[:2], *options[4:], "--print-config"]).output
    (extender,) = yaml.safe_load(plain)["extenders"]
    assert extender["urlPrefix"] == "http://ext.gpus.svc:9447"
    assert "tlsConfig" not in extender


def test_what_is_printed_goes_by_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(
        "disabled: [volcano]\nhami: {resourceMemoryName: example.com/vmem}\n"
        "webhook: {ignoredNamespaces: [kube-system, legacy]}\n"
    )
    options = ["--dialects", str(path)]
    result = CliRunner().invoke(command, [*options, "--print-config", "--scheduler-name", "ours"])
    config = yaml.safe_load(result.output)
    assert [each["schedulerName"] for each in config["profiles"]] == ["default-scheduler", "ours"]
    names = ["--webhook-service", "gpus/hook", "--webhook-configuration", "gpus"]
    result = CliRunner().invoke(command, [*options, "--print-manifests", *names])
    assert result.exit_code == 0, result.output
    found = {each["kind"]: each for each in yaml.safe_load_all(result.output)}
    webhook, _ = found["MutatingWebhookConfiguration"]["webhooks"]
    assert webhook["clientConfig"]["service"]["namespace"] == "gpus"
    assert "'example.com/vmem'" in webhook["matchConditions"][0]["expression"]
    for key in ("nvidia.com/gpumem", "volcano.sh/vgpu-number"):
        assert f"'{key}'" not in result.output
    assert "[kube-system, legacy]" in result.output


def test_one_thing_is_printed_at_a_time() -> None:
    result = CliRunner().invoke(command, ["--print-config", "--print-manifests"])
    assert result.exit_code == 2
    assert "exclude each other" in result.output


@pytest.mark.parametrize("option", ["--print-config", "--print-manifests"])
def test_settings_that_are_none_are_told(option: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("webhook: {default: {}}")
    result = CliRunner().invoke(command, [option, "--dialects", str(path)])
    assert isinstance(result.exception, UsageError)
    assert str(path) in result.exception.message
    assert "did you mean 'defaults'?" in result.exception.message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "binpack,,spread"], "chain of policies"),
        (["--gpu-policy", "binpack,binpack"], "chain of policies"),
        (["--policy", "best"], "best"),
        (["--lease", "here"], "Lease"),
        (["--lease", "a/b/c"], "Lease"),
        (["--lease-duration", "3", "--lease-renew", "2"], "renewed"),
        (["--listen", "nowhere"], "address"),
        (["--metrics-listen", "nowhere"], "address"),
        (["--webhook-listen", "nowhere"], "address"),
        (["--webhook-service", "x"], "Service"),
        (["--scheduler-name", "A b"], "not a valid scheduler name"),
        (["--tls-cert-file", "only.crt"], "needs its key"),
        (["--webhook-client-ca", __file__], "which is off"),
        (["--client-secret", "x"], "authority of the webhook"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_next_step(
    options: list[str], words: str, tmp_path: Path
) -> None:
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
            }
        )
    )
    result = CliRunner().invoke(command, ["--kubeconfig", str(kubeconfig), *options])
    assert isinstance(result.exception, UsageError), result.exception
    assert words in result.exception.message
    assert result.exception.hint


@pytest.mark.parametrize(("words", "floor"), [([], 500), (["--compute-floor", "0"], 0)])
def test_the_floor_is_a_setting(
    words: list[str], floor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[SchedulerSettings] = []
    monkeypatch.setattr("allotment.scheduler.running.run", given.append)
    result = CliRunner().invoke(command, words)
    assert result.exception is None, result.output
    assert [each.compute_floor for each in given] == [floor]


def test_no_way_to_the_api_server_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    result = CliRunner().invoke(command, [])
    assert isinstance(result.exception, AllotError)
    assert "kubeconfig" in (result.exception.hint or "")


@pytest.mark.parametrize("text", ["qgpu", "hami,nvidia", "hamy", "hami,,volcano"])
def test_nothing_is_taken_over_from_systems_that_say_nothing(text: str) -> None:
    result = CliRunner().invoke(command, ["--take-over", text])
    assert isinstance(result.exception, UsageError)
    assert "--take-over: cannot read" in result.exception.message
    assert "hami, volcano" in str(result.exception.hint)
    assert ("did you mean 'hami'" in result.exception.message) == (text == "hamy")

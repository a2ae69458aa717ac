# SPDX-License-Identifier: Apache-2.0
"""The settings' file: what it says holds, and what it cannot mean is told with its place."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.model.errors import UsageError
from allotment.scheduler.admission.webhook import Defaults, WebhookSettings
from allotment.scheduler.serving import ListenSettings
from allotment.scheduler.settings import (
    CertificateSection,
    DefaultsSection,
    FileSettings,
    WebhookSection,
    load_file_settings,
    read_file_settings,
)
from allotment.scheduler.tls.authority import Lives

ALL = """
disabled: [kai]
hami: {memoryFactor: 10}
webhook:
  defaults: {gpus: 0, memory: 4Gi, compute: 10}
  certificate: {names: [gpus.example.com, 192.0.2.7, "2001:db8::7"], days: 30, authorityDays: 400}
  overwritesScheduler: true
  replacedSchedulers: [hami-scheduler, volcano]
  mayBePrivileged: true
  ignoredNamespaces: [kube-system, legacy]
"""


def test_without_a_word_all_is_as_usual() -> None:
    for text in ("", "# nothing", "webhook: {}", "webhook: {defaults: {}, certificate: {}}"):
        assert load_file_settings(text) == FileSettings()
    assert read_file_settings(None) == FileSettings()
    usual = ListenSettings()
    assert FileSettings().listening(usual) == usual


def test_every_setting_is_heard() -> None:
    found = load_file_settings(ALL)
    assert found.dialects.disabled == {"kai"}
    settings = found.listening(
        ListenSettings(service="hook", webhook=WebhookSettings(scheduler_name="ours"))
    )
    assert settings.service == "hook"
    assert settings.names == ("gpus.example.com", "192.0.2.7", "2001:db8::7")
    assert settings.lives == Lives(authority=timedelta(days=400), server=timedelta(days=30))
    assert settings.webhook == WebhookSettings(
        scheduler_name="ours",
        overwrites_scheduler=True,
        replaced_schedulers=frozenset({"hami-scheduler", "volcano"}),
        may_be_privileged=True,
        ignored_namespaces=frozenset({"kube-system", "legacy"}),
        defaults=Defaults(gpus=0, memory_bytes=4 << 30, compute_percent=10),
    )


@pytest.mark.parametrize(
    ("written", "says", "hint"),
    [
        ("webhook: 1", "webhook is not a section", "known fields: defaults, certificate"),
        ("webhok: {}", "'webhok' has none (did you mean 'webhook'?)", "webhook; and disabled"),
        ("webhook: {default: {}}", "'default', which is unknown (did you mean", "known fields:"),
        ("webhook: {defaults: 1}", "webhook: Expected `object`, got `int`", ""),
        ("webhook: {defaults: {gpu: 1}}", "webhook.defaults has 'gpu'", "gpus, memory, compute"),
        ("webhook: {defaults: {gpus: many}}", "Expected `int`, got `str` - at `$.gpus`", ""),
        ("webhook: {defaults: {gpus: 65}}", "webhook.defaults.gpus is 65", "from 0 to 64"),
        ("webhook: {defaults: {compute: -1}}", "webhook.defaults.compute is -1", "from 0 to 100"),
        ("webhook: {defaults: {memory: 4}}", "webhook.defaults.memory", "like"),
        ("webhook: {defaults: {memory: 25%}}", "25% is a part of a GPU", "like 4Gi"),
        ("webhook: {defaults: {memory: 4Go}}", "webhook.defaults.memory", ""),
        ("webhook: {ignoredNamespaces: legacy}", "Expected `array`, got `str`", ""),
        (
            "webhook: {ignoredNamespaces: [A b]}",
            "ignoredNamespaces has 'A b'",
            "names of Kubernetes",
        ),
        ("webhook: {replacedSchedulers: ['']}", "replacedSchedulers has ''", "names of Kubernetes"),
        ("webhook: {certificate: {names: ['a/b']}}", "certificate.names has 'a/b'", ""),
        ("webhook: {certificate: {days: 0}}", "webhook.certificate.days is 0", "from 1 to"),
        (
            "webhook: {certificate: {days: 900, authorityDays: 800}}",
            "webhook.certificate.authorityDays is 800",
            "from 900",
        ),
        (
            "webhook: {certificate: {authorityDays: 364}}",
            "webhook.certificate.authorityDays is 364",
            "from 365 to 36500: kube-scheduler must be restarted",
        ),
        ("webhook: {mayBePrivileged: 'yes'}", "Expected `bool`, got `str`", ""),
        ("[", "the settings are not valid YAML", "write a section"),
        ("- a", "the settings are not a mapping of sections", ""),
    ],
)
def test_what_it_cannot_mean_is_told_with_its_place(written: str, says: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_file_settings(written)
    assert says in caught.value.message
    assert caught.value.hint
    assert hint in caught.value.hint


def test_the_file_is_named_in_what_is_told(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(ALL)
    assert read_file_settings(path) == load_file_settings(ALL)
    path.write_text("webhook: 1")
    with pytest.raises(UsageError, match=r"settings\.yaml: the settings: webhook is not a section"):
        read_file_settings(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"cannot be read: it is not UTF-8"):
        read_file_settings(path)
    with pytest.raises(UsageError, match=r"cannot be read: Is a directory"):
        read_file_settings(tmp_path)


KEYS = st.sampled_from(
    [
        *("defaults", "certificate", "gpus", "memory", "compute", "names", "days"),
        *("authorityDays", "mayBePrivileged", "ignoredNamespaces", "replacedSchedulers"),
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.floats(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@given(JSON)
def test_whatever_it_says_is_taken_or_told(written: object) -> None:
    import yaml

    try:
        found = load_file_settings(yaml.safe_dump({"webhook": written}))
    except UsageError:
        return
    assert found.lives.authority >= found.lives.server
    assert found.webhook.defaults.memory_bytes != 0


def test_every_setting_is_on_its_page(root: Path) -> None:
    page = (root / "docs" / "reference" / "config.md").read_text("utf-8")
    cells = {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| `web")}
    known = {
        f"`webhook.{prefix}{name}`"
        for prefix, kind in (
            ("", WebhookSection),
            ("defaults.", DefaultsSection),
            ("certificate.", CertificateSection),
        )
        for name in kind.__struct_encode_fields__
        if name not in {"defaults", "certificate"}
    }
    assert cells == known

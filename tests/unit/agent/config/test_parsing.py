# SPDX-License-Identifier: Apache-2.0
"""A configuration is understood, or refused in one sentence with its place and NVIDIA's words."""

import json
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from allotment.agent.config.parsing import keys, parse
from allotment.agent.config.schema import ConfigFile, ReplicatedResource, Sharing
from allotment.model.errors import UsageError

GPU_UUID = "GPU-b1028956-cfa2-0990-bf4a-5da9abb51763"
SHARED = "sharing: {timeSlicing: {resources: [%s]}}"
TWO = "{resources: [{name: gpu, replicas: 2}]}"
LONG = f"{{name: {'g' * 50}, replicas: 2}}"
RULE = "allotment: {devices: [%s]}"


def refused(text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        parse(text, source="c.yaml")
    return caught.value


def test_a_file_of_nvidias_is_understood() -> None:
    file = parse(
        """
        version: v1
        flags:
          migStrategy: none
          plugin: {deviceListStrategy: [envvar, cdi-cri], nvidiaCTKPath: /x, deviceIDStrategy: uuid}
          gfd: {sleepInterval: 1m30s, noTimestamp: yes}
        resources:
          gpus: [{pattern: "*A100*", name: big}]
        sharing:
          timeSlicing:
            failRequestsGreaterThanOne: true
            resources:
            - name: nvidia.com/gpu
              replicas: 4
              devices: [0, "1", 0:1, GPU-b1028956-cfa2-0990-bf4a-5da9abb51763]
              rename: part
        imex: {channelIDs: [0]}
        """,
        source="c.yaml",
    )
    assert file.flags is not None
    assert file.flags.plugin is not None
    assert file.flags.plugin.device_list_strategy == ["envvar", "cdi-cri"]
    assert file.sharing is not None
    assert file.sharing.sliced is not None
    assert file.sharing.sliced.resources == [
        ReplicatedResource(
            name="nvidia.com/gpu", replicas=4, devices=[0, "1", "0:1", GPU_UUID], rename="part"
        )
    ]
    assert parse("", source="c.yaml") == ConfigFile()
    assert parse("sharing: {mps: }", source="c.yaml").sharing == Sharing()


@pytest.mark.parametrize(
    ("text", "place", "words", "hint"),
    [
        # What is not known.
        ("flags: {sharing: {}}", "$.flags.sharing", "unknown key", "beginning of a line"),
        ("shareing: {}", "$.shareing", "unknown key", "did you mean `sharing`?"),
        ("flags: {migstrategy: none}", "$.flags.migstrategy", "", "did you mean `migStrategy`?"),
        ("flags: {passDeviceSpecs: true}", "$.flags", "unknown key", "under `flags.plugin`"),
        ("plugin: {}", "$.plugin", "unknown key", "`plugin` belongs under `flags`"),
        ("sharing: {timeSlicing: {replicas: 4}}", "$.sharing", "", "sharing.timeSlicing.resources"),
        ("allotment: {device: []}", "$.allotment.device", "", "did you mean `devices`?"),
        ("allotment: {dra: {driverName: gpu}}", "$.allotment.dra.driverName", "none of", ""),
        (
            "allotment: {metrics: {aliases: [dgcm]}}",
            "$.allotment.metrics.aliases[0]",
            "none of",
            "",
        ),
        ("allotment: {metrics: {prices: {a100: -1}}}", "metrics.prices: a100: -1", "", "0 to"),
        ("allotment: {metrics: {prices: {a100: .nan}}}", "metrics.prices: a100: nan", "", "0 to"),
        ("allotment: {metrics: {prices: {GPU-1: 1}}}", "prices: 'GPU-1' is no model", "", "words"),
        ("allotment: {metrics: {currency: a b}}", "metrics.currency: 'a b'", "", "like EUR"),
        ("allotment: {dra: {driver: x}}", "$.allotment.dra.driver", "unknown key", "driverName"),
        ("allotment: {x: 1}", "$.allotment.x", "", "valid keys: devices, sharesPerDevice"),
        ("apiVersion: v1\nkind: ConfigMap", "$.apiVersion", "", "its `data` has"),
        ("version: v2\nnew: 1", "$.version", "unknown version: v2", "version: v1"),
        ("version: 1", "$.version", "unknown version: 1", "version: v1"),
        # NVIDIA's own refusals.
        ("sharing: {timeSlicing: {}}", "$.sharing.timeSlicing:", "no resources specified", ""),
        ("sharing: {timeSlicing: }", "$.sharing.timeSlicing:", "no resources specified", "leave"),
        ("sharing: {timeSlicing: null, mps: }", "$.sharing.timeSlicing:", "no resources", ""),
        (SHARED % "", "$.sharing.timeSlicing.resources", "no resources specified", ""),
        (SHARED % "{replicas: 2}", "resources[0]", "no resource name specified", ""),
        (SHARED % "{name: gpu}", "resources[0]", "no replicas specified", ""),
        (SHARED % "{name: gpu, replicas: 1}", "resources[0].replicas", "must be >= 2", ""),
        (SHARED % "{name: gpu, replicas: 2000}", "resources[0].replicas", "kubelet", "1000"),
        (SHARED % "{name: GPU, replicas: 2}", "[0].name", "incorrect format for resource", ""),
        (
            SHARED % ("{name: %s, replicas: 2}" % ("g" * 53)),
            "[0].name",
            "63 characters or less",
            "",
        ),
        (
            SHARED % "{name: gpu, replicas: 2, devices: some}",
            "[0].devices",
            "devices set as 'some' but the only valid string input is 'all'",
            "",
        ),
        (
            SHARED % "{name: gpu, replicas: 2, devices: 0}",
            "[0].devices",
            "devices set as '0' but a count of devices must be > 0",
            "",
        ),
        (SHARED % "{name: gpu, replicas: 2, devices: 2.0}", "[0].devices", "unrecognized type", ""),
        (SHARED % "{name: gpu, replicas: 2, devices: [x]}", "devices[0]", "unsupported type", ""),
        (SHARED % "{name: gpu, replicas: 2, devices: [1.5]}", "devices[0]", "unsupported type", ""),
        (SHARED % "{name: gpu, replicas: 2, devices: [GPU-1]}", "devices[0]", "unsupported", ""),
        (SHARED % "{name: gpu, replicas: 2, devices: []}", "devices", "the list of devices", ""),
        ("resources: {gpus: [{name: x}]}", "gpus[0]", "must have a 'pattern' field set", ""),
        ("resources: {gpus: [{pattern: x}]}", "gpus[0]", "must have a 'name' field set", ""),
        ("resources: {mig: [{pattern: '*', name: x_y}]}", "$.resources.mig[0].name", "format", ""),
        (
            "flags: {plugin: {deviceListStrategy: 3}}",
            "$.flags",
            "invalid deviceListStrategy: 3",
            "",
        ),
        (
            f"sharing: {{timeSlicing: {{renameByDefault: true, resources: [{LONG}]}}}}",
            "[0].name",
            "63 characters or less",
            "",
        ),
        *(
            (SHARED % f"{{name: gpu, replicas: 2, rename: {name}}}", "[0].rename", words, "")
            for name, words in (
                ("allotment.dev/gpu", "incorrect format for resource name"),
                ("node.kubernetes.io/gpu", "incorrect format"),
                ("kubernetes.io/gpu", "incorrect format"),
                ("example/gpu", "incorrect format"),
                ("example.com/a/b", "incorrect format"),
                ("example.com/Gpu", "incorrect format"),
                (f"example.com/{'g' * 60}", "63 characters or less"),
            )
        ),
        # MPS.
        (
            "sharing: {mps: {resources: [{name: gpu, replicas: 1}]}}",
            "$.sharing.mps.resources[0].replicas",
            "number of replicas must be >= 2",
            "",
        ),
        (
            f"sharing: {{timeSlicing: {TWO}, mps: {TWO}}}",
            "$.sharing.mps.resources[0]",
            "time-slicing and MPS are mutually exclusive, and both name gpu",
            "out of sharing.timeSlicing or of sharing.mps",
        ),
        # Kinds of values.
        ('flags: {failOnInitError: "true"}', "$.flags.failOnInitError", "", "without quotes"),
        ("flags: {gfd: {sleepInterval: 60}}", "$.flags.gfd.sleepInterval", "", "60s"),
        ("flags: []", "$.flags", "[] is a list, expected keys with values", ""),
        ("[1]", "$", "is a list", ""),
        # Ours.
        (
            RULE % "{mode: sofd}",
            "$.allotment.devices[0].mode",
            "none of exclusive, mig, mps, soft",
            "",
        ),
        (RULE % "{match: {index: [0]}}", "$.allotment.devices[0]", "the rule names no mode", ""),
        (
            RULE % "{modes: []}",
            "$.allotment.devices[0]",
            "the rule names no mode",
            "modes: [soft, mig]",
        ),
        (RULE % "{mode: soft, modes: [mig]}", "devices[0].modes", "has `mode` as well", ""),
        (RULE % "{modes: [mig, soft, mig]}", "devices[0].modes", "given twice", ""),
        (RULE % "{modes: [timeslice]}", "devices[0].modes[0]", "none of exclusive, mig", ""),
        (
            RULE % "{mode: soft, mig: {keep: 5m}}",
            "devices[0].mig",
            "only for mode mig",
            "or add mig",
        ),
        (RULE % "{mode: mig, mig: {keep: 5}}", "devices[0].mig.keep", "expected a text", ""),
        (RULE % "{mode: mig, mig: {keep: 5 min}}", "devices[0].mig.keep", "no", "30s"),
        (RULE % "{mode: mig, mig: {keep: 169h}}", "devices[0].mig.keep", "168h at most", ""),
        (RULE % "{mode: mig, mig: {reset: 1}}", "devices[0].mig.reset", "", ""),
        (RULE % "{mode: soft, timeSlice: short}", "devices[0].timeSlice", "mode is soft", ""),
        (RULE % "{mode: soft, match: {}}", "devices[0].match", "`match` is empty", "leave `match`"),
        (RULE % "{mode: soft, match: {index: []}}", "match.index", "matches no GPU", ""),
        (RULE % "{mode: soft, match: {index: [-1]}}", "match.index[0]", "no index", ""),
        (RULE % "{mode: soft, match: {uuid: [7ca1]}}", "match.uuid[0]", "no beginning", "GPU-"),
        (RULE % "{mode: soft, match: {pci: [3b]}}", "match.pci[0]", "no PCI address", "lspci"),
        (RULE % "{mode: soft, match: {model: ['*']}}", "match.model[0]", "no model", ""),
        (RULE % "{mode: soft, match: {model: [gpu-x]}}", "match.model[0]", "no model", ""),
        (
            "allotment: {sharesPerDevice: 0}",
            "$.allotment.sharesPerDevice",
            "are not possible",
            "63",
        ),
        (
            "allotment: {sharesPerDevice: 64}",
            "$.allotment.sharesPerDevice",
            "are not possible",
            "63",
        ),
        (
            "sharing: {mps: {resources: [{name: gpu, replicas: 4}]}}\n"
            + RULE % "{mode: timeslice}",
            "$.allotment.devices[0].mode",
            "no effect beside sharing.mps",
            "mode: mps",
        ),
        ("allotment: {health: {evict: lots}}", "health.evict", "none of lost, never", ""),
        ("allotment: {health: {evictAfter: 25h}}", "health.evictAfter", "24h at most", ""),
        ("allotment: {health: {xid: {x: ignore}}}", "$.allotment.health.xid", "no XID", "79"),
        ("allotment: {health: {xid: {79: x}}}", "health.xid.79", "there is no action 'x'", ""),
    ],
    ids=str,
)
def test_what_is_wrong_is_told_with_its_place(text: str, place: str, words: str, hint: str) -> None:
    error = refused(text)
    assert error.message.startswith("c.yaml: ")
    assert place in error.message
    assert words in error.message
    assert hint in (error.hint or "")
    assert "\n" not in error.message


def test_every_place_of_the_schema_is_known_to_the_hints() -> None:
    assert "replicas" in keys()["$.sharing.timeSlicing.resources[]"]
    assert "channelIDs" in keys()["$.imex"]
    assert "uuid" in keys()["$.allotment.devices[].match"]


# ---- anything at all -----------------------------------------------------------------------------


def refusal(text: str) -> UsageError | None:
    try:
        parse(text, source="c.yaml")
    except UsageError as error:
        return error
    return None


WORDS = sorted({name for names in keys().values() for name in names})
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["all", "v1", "soft", "nvidia.com/gpu", "0:1", GPU_UUID, "envvar", "60s"])
)
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(keys()["$"]), DOCUMENTS))
def test_no_document_raises_anything_else(document: dict[str, Any]) -> None:
    for text in (yaml.safe_dump(document), json.dumps(document)):
        error = refusal(text)
        assert error is None or error.message.encode().startswith(b"c.yaml: ")


@given(st.text(max_size=80))
def test_no_text_raises_anything_else(text: str) -> None:
    error = refusal(text)
    assert error is None or error.message.encode().startswith(b"c.yaml: ")


NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z0-9]", fullmatch=True)
RESOURCES = st.builds(
    ReplicatedResource,
    name=NAMES,
    replicas=st.integers(2, 1000),
    devices=st.none()
    | st.just("all")
    | st.integers(1, 16)
    | st.lists(st.integers(0, 9), min_size=1),
    rename=st.none() | NAMES,
)


@given(st.lists(RESOURCES, min_size=1, max_size=3), st.none() | st.booleans())
def test_what_is_right_comes_back(resources: list[ReplicatedResource], rename: bool | None) -> None:  # noqa: FBT001 - hypothesis' argument
    section = {"resources": msgspec.to_builtins(resources), "renameByDefault": rename}
    text = yaml.safe_dump({"version": "v1", "sharing": {"timeSlicing": section}})
    file = parse(text, source="c.yaml")
    assert file.sharing is not None
    assert file.sharing.sliced is not None
    assert file.sharing.sliced.resources == resources

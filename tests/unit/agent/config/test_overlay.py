# SPDX-License-Identifier: Apache-2.0
"""A flag goes before the environment, that before the file, and that before the default."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.agent.config.options import NVIDIA_OPTIONS, Option, OptionKind
from allotment.agent.config.overlay import FLAGS_ALONE, given_value, load, overlay
from allotment.agent.config.schema import (
    Config,
    DeviceListStrategy,
    ReplicatedResource,
    ResourcePattern,
)
from allotment.cost.prices import Prices
from allotment.model.errors import UsageError

# The values of the others are checked alone: nothing depends on them.
LAID = [
    each
    for each in NVIDIA_OPTIONS
    if each.key and not each.no_effect and each.flag != "device-discovery-strategy"
]

# Two values of each kind that differ from the default and from one another.
OTHERS: dict[str, tuple[str, str]] = {
    "mig-strategy": ("single", "mixed"),
    "device-list-strategy": ("envvar,cdi-cri", "volume-mounts"),
    "device-id-strategy": ("index", "uuid"),
    "shared-devices-allocation-policy": ("packed", "distributed"),
    "sleep-interval": ("5s", "infinite"),
    "imex-channel-ids": ("0", ""),
}


def values(option: Option) -> tuple[str, str]:
    if option.kind is OptionKind.BOOL:
        return ("false", "true") if option.default == "true" else ("true", "false")
    return OTHERS.get(option.flag, ("/one", "/two"))


def in_file(option: Option, text: str) -> str:
    assert option.key is not None
    value = f"[{text}]" if option.kind in {OptionKind.LIST, OptionKind.NUMBERS} else text
    for name in reversed(option.key.split(".")):
        value = f"{{{name}: {value}}}"
    return value


def only(option: Option, config: Config) -> Any:  # noqa: ANN401 - of the option's kind
    """All of a configuration that an option can change."""
    fields = (config.plugin, config.gfd, config)
    names = {
        "sleep_interval": "sleep_interval_s",
        "device_list_strategy": "device_list_strategies",
    }
    name = names.get(option.parameter, option.parameter)
    return next(getattr(each, name) for each in fields if hasattr(each, name))


def test_nothing_said_is_the_defaults() -> None:
    assert overlay() == Config(source=FLAGS_ALONE)
    assert load("", source="f") == Config(source="f")


@pytest.mark.parametrize("option", LAID, ids=lambda each: each.flag)
def test_precedence(option: Option) -> None:
    one, two = values(option)
    by_default = only(option, overlay())
    by_flag = only(option, overlay(options={option.parameter: (one,)}))
    assert by_flag != by_default
    assert only(option, load(in_file(option, one), source="f")) == by_flag
    for name in option.env:
        assert only(option, overlay(environment={name: one})) == by_flag
        over_file = load(in_file(option, one), source="f", environment={name: two or "0"})
        over_env = overlay(options={option.parameter: (one,)}, environment={name: two or "0"})
        assert only(option, over_env) == by_flag
        if two:
            assert only(option, over_file) != by_flag


@pytest.mark.parametrize("option", NVIDIA_OPTIONS, ids=lambda each: each.flag)
def test_the_table_has_the_default(option: Option) -> None:
    if option not in LAID:
        value = given_value(option.flag, options={}, environment={})
        assert value == given_value(
            option.flag, options={option.parameter: option.default}, environment={}
        )
    elif option.default:
        said = overlay(options={option.parameter: (option.default,)})
        assert only(option, said) == only(option, overlay())


def test_flags_may_be_of_their_own_types() -> None:
    config = overlay(options={"pass_device_specs": True, "imex_channel_ids": (0,), "oneshot": None})
    assert config.plugin.pass_device_specs
    assert config.imex_channel_ids == (0,)
    assert not config.gfd.oneshot


def test_empty_variables_are_as_urfave_cli_takes_them() -> None:
    environment = {
        "FAIL_ON_INIT_ERROR": "",
        "DEVICE_LIST_STRATEGY": "",
        "GFD_SLEEP_INTERVAL": "",
        "NVIDIA_DEV_ROOT": "",
        "NVIDIA_DRIVER_ROOT": "/run/nvidia/driver",
        "GFD_OUTPUT_FILE": "",
    }
    config = overlay(environment=environment)
    assert not config.fail_on_init_error
    assert config.plugin.device_list_strategies is None
    assert config.gfd.sleep_interval_s == 60
    assert config.nvidia_dev_root == config.nvidia_driver_root == "/run/nvidia/driver"
    assert not config.gfd.output_file


def test_a_strategy_that_is_named_is_told_from_none() -> None:
    assert overlay().plugin.device_list_strategies is None
    named = load("flags: {plugin: {deviceListStrategy: envvar}}", source="f")
    assert named.plugin.device_list_strategies == (DeviceListStrategy.ENVVAR,)


@pytest.mark.parametrize(
    ("options", "environment", "text", "words"),
    [
        ({"mig_strategy": ("x",)}, {}, "", "--mig-strategy: unknown MIG strategy: x"),
        ({}, {"MIG_STRATEGY": ""}, "", "$MIG_STRATEGY: unknown MIG strategy: "),
        ({}, {"GFD_MIG_STRATEGY": "x"}, "", "$GFD_MIG_STRATEGY: unknown MIG strategy: x"),
        ({}, {}, "flags: {migStrategy: x}", "f: $.flags.migStrategy: unknown MIG strategy: x"),
        (
            {},
            {"DEVICE_LIST_STRATEGY": "envvar,cdi"},
            "",
            "$DEVICE_LIST_STRATEGY: invalid --device-list-strategy option: invalid strategy: cdi",
        ),
        (
            {},
            {},
            "flags: {plugin: {deviceListStrategy: []}}",
            "deviceListStrategy: invalid --device-list-strategy option: no device list strategy",
        ),
        (
            {"device_id_strategy": ("name",)},
            {},
            "",
            "--device-id-strategy: invalid --device-id-strategy option: name",
        ),
        (
            {"shared_devices_allocation_policy": ("spread",)},
            {},
            "",
            "invalid --shared-devices-allocation-policy option: spread",
        ),
        (
            {"device_discovery_strategy": ("tegra",)},
            {},
            "",
            "invalid --device-discovery-strategy option tegra",
        ),
        ({}, {"PASS_DEVICE_SPECS": "yes"}, "", "$PASS_DEVICE_SPECS: 'yes' is neither true nor"),
        ({}, {"IMEX_CHANNEL_IDS": "0,1"}, "", "channelIDs must be [] or [0]; found [0 1]"),
        ({}, {}, "imex: {channelIDs: [3]}", "f: $.imex.channelIDs: invalid IMEX channel IDs: "),
        ({}, {}, "flags: {gfd: {sleepInterval: 0s}}", "f: $.flags.gfd.sleepInterval: '0s' is not"),
    ],
    ids=str,
)
def test_what_is_wrong_is_told_with_where_it_came_from(
    options: dict[str, object], environment: dict[str, str], text: str, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load(text, source="f", options=options, environment=environment)
    assert words in caught.value.message


def test_what_a_flag_overrides_is_not_judged() -> None:
    config = load("flags: {migStrategy: x}", source="f", options={"mig_strategy": ("none",)})
    assert config.mig_strategy == "none"


TAKEN = """
resources: {gpus: [{pattern: "*A100*", name: big}], mig: [{pattern: "1g.*", name: small}]}
sharing:
  timeSlicing:
    renameByDefault: true
    resources:
    - {name: gpu, replicas: 4, devices: [0], rename: quarter}
    - {name: big, replicas: 2}
allotment: {honourResources: %s}
"""


def test_names_and_devices_are_dropped_with_nvidias_notices() -> None:
    config = load(TAKEN % "false", source="f")
    assert config.gpu_patterns == (ResourcePattern(pattern="*", name="nvidia.com/gpu"),)
    assert config.time_slicing is not None
    assert config.time_slicing.resources == (
        ReplicatedResource(name="nvidia.com/gpu", replicas=4, rename="nvidia.com/gpu.shared"),
        ReplicatedResource(name="nvidia.com/big", replicas=2, rename="nvidia.com/big.shared"),
    )
    words = ["Customizing the 'resources' field", "Setting the 'rename' field", "the 'devices'"]
    assert len(config.notes) == len(words)
    for note, each in zip(config.notes, words, strict=True):
        assert each in note
        assert "is not yet supported in the config. Ignoring..." in note


def test_names_and_devices_are_honoured_where_asked() -> None:
    config = load(TAKEN % "true", source="f")
    assert [each.name for each in config.gpu_patterns] == ["nvidia.com/big", "nvidia.com/gpu"]
    assert config.time_slicing is not None
    assert config.time_slicing.resources == (
        ReplicatedResource(
            name="nvidia.com/gpu", replicas=4, devices=[0], rename="nvidia.com/quarter"
        ),
        ReplicatedResource(name="nvidia.com/big", replicas=2, rename="nvidia.com/big.shared"),
    )
    assert [each.name for each in config.mig_patterns] == ["nvidia.com/small"]
    assert config.notes == (
        "resources.mig has no effect: migStrategy is none, which offers no MIG devices",
    )
    mixed = load(TAKEN % "true", source="f", options={"mig_strategy": "mixed"})
    assert mixed.notes == ()
    assert load(TAKEN % "false", source="f").mig_patterns == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mps_root": "/mps"}, "--mps-root has no effect: the control daemons of MPS"),
        ({"cdi_feature_flags": ("x",)}, "--cdi-feature-flags has no effect"),
        ({"gds_enabled": True}, "name a --device-list-strategy for it"),
        ({"pass_device_specs": True}, "name a --device-list-strategy for it"),
    ],
    ids=str,
)
def test_what_has_no_effect_is_noted(options: dict[str, object], words: str) -> None:
    (note,) = overlay(options=options).notes
    assert words in note
    assert overlay(options=dict.fromkeys(options)).notes == ()


MPS = "sharing: {mps: {%s resources: [{name: gpu, replicas: 4%s}]}}"


def test_mps_is_as_nvidias_plugin_has_it() -> None:
    plain = load(MPS % ("", ""), source="f")
    assert plain.notes == ()
    assert plain.sharing is plain.mps
    assert plain.mps is not None
    assert plain.mps.fail_requests_greater_than_one
    relaxed = load(MPS % ("failRequestsGreaterThanOne: false,", ""), source="f")
    assert relaxed.mps is not None
    assert not relaxed.mps.fail_requests_greater_than_one
    dropped = load(MPS % ("", ", devices: 1, rename: small"), source="f").notes
    assert [each.partition(" is not yet")[0] for each in dropped] == [
        "Setting the 'rename' field in sharing.mps.resources",
        "Customizing the 'devices' field in sharing.mps.resources",
    ]
    with pytest.raises(UsageError, match="--mig-strategy=mixed is not supported with MPS"):
        load(MPS % ("", ""), source="f", options={"mig_strategy": "mixed"})
    both = load(
        "sharing: {mps: {resources: [{name: gpu, replicas: 4}]},"
        " timeSlicing: {resources: [{name: small, replicas: 2}]}}",
        source="f",
    )
    assert both.sharing is both.mps
    (note,) = both.notes
    assert note == "sharing.timeSlicing has no effect beside sharing.mps"


def test_our_section() -> None:
    config = load(
        """
        allotment:
          sharesPerDevice: 4
          dra: {driverName: gpu.nvidia.com}
          metrics:
            {aliases: [hami, dcgm], perProcess: true, currency: EUR,
             prices: {A100-80gb: 2.5, a100: 1}}
          devices: [{match: {index: [0]}, mode: soft}, {mode: timeslice, timeSlice: long}]
          health:
            {xid: {79: reset-gpu, 13: ignore}, autoRecover: false, evict: never, evictAfter: 5m}
        """,
        source="f",
    ).allotment
    assert [each.mode for each in config.devices] == ["soft", "timeslice"]
    assert config.shares_per_device == 4
    assert config.driver_name == "gpu.nvidia.com"
    assert config.metric_aliases == ("hami", "dcgm")
    assert config.prices == Prices((("a100-80gb", 2_500_000), ("a100", 1_000_000)), "EUR")
    assert load("version: v1", source="f").allotment.metric_aliases == ()
    assert load("version: v1", source="f").allotment.prices == Prices()
    assert config.has_process_metrics
    assert not load("version: v1", source="f").allotment.has_process_metrics
    assert load("version: v1", source="f").allotment.driver_name == "gpu.allotment.dev"
    assert config.health.xid_actions == ((13, "ignore"), (79, "reset-gpu"))
    assert not config.health.auto_recover
    assert (config.health.evict, config.health.evict_after_s) == ("never", 300)


@given(
    st.dictionaries(st.sampled_from([each.parameter for each in NVIDIA_OPTIONS]), st.text()),
    st.dictionaries(
        st.sampled_from([name for each in NVIDIA_OPTIONS for name in each.env]), st.text()
    ),
)
def test_no_texts_raise_anything_else(
    options: dict[str, object], environment: dict[str, str]
) -> None:
    with contextlib.suppress(UsageError):
        overlay(options=options, environment=environment)

# SPDX-License-Identifier: Apache-2.0
"""Flags over environment over file over defaults: what is in force, by NVIDIA's precedence.

Each value is judged where it came from, so that an error names the flag, the variable or the place
of the file to change. Nothing that someone wrote is dropped in silence: what has no effect here is
in the configuration's `notes`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from allotment.agent.config.effective import (
    AllotmentConfig,
    Config,
    DeviceListStrategy,
    GfdConfig,
    HealthConfig,
    PluginConfig,
    Replication,
)
from allotment.agent.config.go_values import (
    parse_bool,
    parse_interval,
    parse_list,
    parse_numbers,
)
from allotment.agent.config.names import GPU, shared_name, whole_name
from allotment.agent.config.options import NVIDIA_OPTIONS, Kind, Option, option_named
from allotment.agent.config.parsing import parse
from allotment.agent.config.schema import (
    AllotmentSection,
    ConfigFile,
    ReplicatedResource,
    ReplicatedResources,
    ResourcePattern,
    Resources,
)
from allotment.model.errors import UsageError

__all__ = ["FLAGS_ALONE", "OptionValue", "given_value", "load", "overlay"]

FLAGS_ALONE: Final = "flags and environment"
"""The source of a configuration without a file."""

OptionValue = None | bool | str | float | tuple[str, ...] | tuple[int, ...]

_NOT_YET: Final = "is not yet supported in the config. Ignoring..."
_HOW: Final = "(`allotment.honourResources: true` honours it)"


@dataclass(frozen=True, slots=True)
class _Given:
    """A value, and where it came from; `origin` None: the default."""

    value: OptionValue
    origin: str | None


def load(
    text: str,
    *,
    source: str,
    options: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Parse a file, and lay the rest over it. Raises `UsageError`."""
    return overlay(
        parse(text, source=source), source=source, options=options, environment=environment
    )


def overlay(
    file: ConfigFile | None = None,
    *,
    source: str = FLAGS_ALONE,
    options: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Lay flags and environment over a file's values, and judge what comes out.

    `options` are by `Option.parameter`: texts, as they were written; None: not given.

    Raises `UsageError`: `--flag: ...`, `$VARIABLE: ...` or `source: $.path: ...`.
    """
    file = file or ConfigFile()
    said = msgspec.to_builtins(file)
    given = {
        each.flag: _given(each, said, source, options or {}, environment or {})
        for each in NVIDIA_OPTIONS
    }
    for option in NVIDIA_OPTIONS:
        _judge(option, given[option.flag])
    value = {flag: each.value for flag, each in given.items()}
    if file.sharing and file.sharing.mps and value["mig-strategy"] == "mixed":
        raise UsageError(
            f"{given['mig-strategy'].origin}: using --mig-strategy=mixed is not supported with MPS",
            hint="leave out sharing.mps, or share parts of GPUs beside MIG devices by"
            " `allotment.devices: [{modes: [mps]}]`",
        )
    return _config(file, source, value, tuple(_notes(file, given)))


def given_value(
    flag: str, *, options: Mapping[str, object], environment: Mapping[str, str]
) -> OptionValue:
    """Return one option that has no place in the file, judged. Raises `UsageError`."""
    option = option_named(flag)
    given = _given(option, {}, FLAGS_ALONE, options, environment)
    _judge(option, given)
    return given.value


# ---- one option ----------------------------------------------------------------------------------


def _given(
    option: Option,
    said: Mapping[str, Any],
    source: str,
    options: Mapping[str, object],
    environment: Mapping[str, str],
) -> _Given:
    """Find the option's value: the flag's, else the environment's, else the file's, else none."""
    if (flag := options.get(option.parameter)) is not None:
        return _parsed(option, _texts(flag), f"--{option.flag}")
    for name in option.env:
        # An empty list or interval says nothing, and an empty bool says false: so urfave/cli.
        if name in environment and (environment[name] or option.kind in {Kind.TEXT, Kind.BOOL}):
            return _parsed(option, (environment[name],), f"${name}")
    if option.key is not None and (value := _in_file(said, option.key)) is not None:
        return _of_file(option, value, f"{source}: $.{option.key}")
    return _Given(_parsed(option, (option.default,), "").value, None)


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ("true" if value else "false",)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(str(each) for each in value)
    return (str(value),)


def _parsed(option: Option, texts: tuple[str, ...], origin: str) -> _Given:
    try:
        return _Given(_value(option.kind, texts), origin)
    except UsageError as error:
        raise type(error)(f"{origin}: {error.message}", hint=error.hint) from error


def _value(kind: Kind, texts: tuple[str, ...]) -> OptionValue:
    # Of a flag that is given twice the last one counts, as in Go.
    match kind:
        case Kind.BOOL:
            return parse_bool(texts[-1])
        case Kind.LIST:
            return parse_list(texts)
        case Kind.NUMBERS:
            return parse_numbers(texts)
        case Kind.INTERVAL:
            return parse_interval(texts[-1])
        case Kind.TEXT:
            return texts[-1]


def _in_file(said: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401 - of the option's kind
    found: Any = said
    for name in key.split("."):
        found = (found or {}).get(name)
    return found


def _of_file(option: Option, value: Any, origin: str) -> _Given:  # noqa: ANN401 - likewise
    """Take a value that the schema has typed already."""
    match option.kind:
        case Kind.INTERVAL:
            return _parsed(option, (value,), origin)
        case Kind.LIST:
            return _Given((value,) if isinstance(value, str) else tuple(value), origin)
        case Kind.NUMBERS:
            return _Given(tuple(value), origin)
        case _:
            return _Given(value, origin)


def _judge(option: Option, given: _Given) -> None:
    """Refuse what is none of the option's choices, with NVIDIA's words."""
    if given.origin is None:
        return
    values = given.value if isinstance(given.value, tuple) else (given.value,)
    for value in values if option.choices else ():
        if value not in option.choices:
            raise UsageError(
                f"{given.origin}: {option.refusal} {value}",
                hint=_OTHERS.get(str(value)) or f"write one of {', '.join(option.choices)}",
            )
    if option.flag == "device-list-strategy" and not values:
        raise UsageError(
            f"{given.origin}: invalid --device-list-strategy option: no device list strategy"
            f" specified; at least one of [{' '.join(option.choices)}] is required",
            hint="leave it out for a CDI device of the share's own",
        )
    if option.flag == "imex-channel-ids" and values not in {(), (0,)}:
        raise UsageError(
            f"{given.origin}: invalid IMEX channel IDs: invalid IMEX config: channelIDs must be []"
            f" or [0]; found [{' '.join(str(value) for value in values)}]"
        )


_OTHERS: Final[Mapping[str, str]] = {
    "tegra": "GPUs of Tegra are not supported: Allotment asks NVML, which Tegra has not",
    "vfio": "GPUs for virtual machines are not supported yet",
}
"""Values of NVIDIA's that Allotment does not have, and why."""


# ---- all of it -----------------------------------------------------------------------------------


def _config(
    file: ConfigFile, source: str, value: Mapping[str, Any], notes: tuple[str, ...]
) -> Config:
    honoured = bool(file.allotment and file.allotment.honour_resources)
    patterns = file.resources if file.resources and honoured else Resources()
    sharing = file.sharing.time_slicing if file.sharing else None
    mps = file.sharing.mps if file.sharing else None
    strategies = value["device-list-strategy"]
    driver_root = value["nvidia-driver-root"]
    return Config(
        source=source,
        mig_strategy=value["mig-strategy"],
        fail_on_init_error=value["fail-on-init-error"],
        mps_root=value["mps-root"],
        nvidia_driver_root=driver_root,
        nvidia_dev_root=value["nvidia-dev-root"] or driver_root,
        gdrcopy_enabled=value["gdrcopy-enabled"],
        gds_enabled=value["gds-enabled"],
        mofed_enabled=value["mofed-enabled"],
        use_node_feature_api=value["use-node-feature-api"],
        device_discovery_strategy=value["device-discovery-strategy"],
        plugin=PluginConfig(
            pass_device_specs=value["pass-device-specs"],
            device_list_strategies=tuple(DeviceListStrategy(each) for each in strategies) or None,
            device_id_strategy=value["device-id-strategy"],
            cdi_annotation_prefix=value["cdi-annotation-prefix"],
            nvidia_ctk_path=value["nvidia-cdi-hook-path"],
            container_driver_root=value["container-driver-root"],
            shared_devices_allocation_policy=value["shared-devices-allocation-policy"],
        ),
        gfd=GfdConfig(
            oneshot=value["oneshot"],
            no_timestamp=value["no-timestamp"],
            sleep_interval_s=value["sleep-interval"],
            output_file=value["output-file"],
            machine_type_file=value["machine-type-file"],
        ),
        gpu_patterns=(
            *_patterns(patterns.gpus),
            # What no pattern matches is a GPU, as in NVIDIA's plugin.
            ResourcePattern(pattern="*", name=GPU),
        ),
        mig_patterns=_patterns(patterns.mig),
        time_slicing=_replication(sharing, honoured=honoured) if sharing else None,
        mps=_replication(mps, honoured=honoured, fails_above_one=True) if mps else None,
        imex_channel_ids=value["imex-channel-ids"],
        imex_required=value["imex-required"],
        allotment=_allotment(file.allotment),
        notes=notes,
    )


def _patterns(patterns: Sequence[ResourcePattern] | None) -> tuple[ResourcePattern, ...]:
    """Name all resources wholly."""
    return tuple(
        ResourcePattern(pattern=each.pattern, name=whole_name(each.name)) for each in patterns or ()
    )


def _replication(
    section: ReplicatedResources, *, honoured: bool, fails_above_one: bool = False
) -> Replication:
    """Name all wholly. `fails_above_one`: what the file means that does not say."""
    said = section.fail_requests_greater_than_one
    return Replication(
        resources=tuple(
            ReplicatedResource(
                name=whole_name(each.name),
                replicas=each.replicas,
                devices=each.devices if honoured else None,
                rename=_rename(each, by_default=bool(section.rename_by_default), kept=honoured),
            )
            for each in section.resources
        ),
        rename_by_default=bool(section.rename_by_default),
        fail_requests_greater_than_one=fails_above_one if said is None else said,
    )


def _rename(resource: ReplicatedResource, *, by_default: bool, kept: bool) -> str | None:
    if resource.rename is not None and kept:
        return whole_name(resource.rename)
    return shared_name(whole_name(resource.name)) if by_default else None


def _allotment(section: AllotmentSection | None) -> AllotmentConfig:
    section = section or AllotmentSection()
    default = AllotmentConfig()
    shares, health = section.shares_per_device, section.health
    recovers = health.auto_recover if health else None
    actions = (health.xid if health else None) or {}
    return AllotmentConfig(
        devices=tuple(section.devices or ()),
        shares_per_device=default.shares_per_device if shares is None else shares,
        honour_resources=bool(section.honour_resources),
        health=HealthConfig(
            xid_actions=tuple(sorted((int(xid), action) for xid, action in actions.items())),
            auto_recover=default.health.auto_recover if recovers is None else recovers,
        ),
    )


def _notes(file: ConfigFile, given: Mapping[str, _Given]) -> Iterator[str]:
    """Say what was written and has no effect."""
    if file.sharing and file.sharing.mps and file.sharing.time_slicing:
        yield "sharing.timeSlicing has no effect: sharing.mps counts where both are there"
    honoured = bool(file.allotment and file.allotment.honour_resources)
    if not honoured:
        yield from _dropped(file)
    elif file.resources and file.resources.mig and given["mig-strategy"].value == "none":
        yield "resources.mig has no effect: migStrategy is none, which offers no MIG devices"
    for option in NVIDIA_OPTIONS:
        each = given[option.flag]
        default = _value(option.kind, (option.default,))
        if each.origin is None or each.value == default:
            continue
        if option.no_effect:
            yield f"{each.origin} has no effect: {option.no_effect}"
        elif option.wants_strategy and not given["device-list-strategy"].value:
            yield (
                f"{each.origin} has no effect where containers get a CDI device of the share's own:"
                " name a --device-list-strategy for it"
            )


def _dropped(file: ConfigFile) -> Iterator[str]:
    """Say with NVIDIA's words what NVIDIA's plugin drops, and how to have it honoured."""
    if file.resources and (file.resources.gpus or file.resources.mig):
        yield f"Customizing the 'resources' field {_NOT_YET} {_HOW}"
    if file.sharing is not None:
        yield from _dropped_of(file.sharing.time_slicing, "timeSlicing")
        yield from _dropped_of(file.sharing.mps, "mps")


def _dropped_of(section: ReplicatedResources | None, name: str) -> Iterator[str]:
    if section is None:
        return
    defaults = {
        each.name: _rename(each, by_default=bool(section.rename_by_default), kept=False)
        for each in section.resources
    }
    if any(
        each.rename is not None and whole_name(each.rename) != defaults[each.name]
        for each in section.resources
    ):
        yield f"Setting the 'rename' field in sharing.{name}.resources {_NOT_YET} {_HOW}"
    if any(each.devices is not None and each.devices != "all" for each in section.resources):
        yield f"Customizing the 'devices' field in sharing.{name}.resources {_NOT_YET} {_HOW}"

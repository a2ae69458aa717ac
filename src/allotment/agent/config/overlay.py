# SPDX-License-Identifier: Apache-2.0
"""Flags over environment over file over defaults: the configuration by NVIDIA's precedence.

Errors name the origin of a value: flag, variable or place in the file. Values without effect are
listed in the configuration's `notes`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from allotment.agent.config.checks import MOST_EVICT_AFTER_S, within
from allotment.agent.config.options import (
    NVIDIA_OPTIONS,
    Option,
    OptionKind,
    option_named,
    parse_bool,
    parse_duration,
    parse_interval,
    parse_list,
    parse_numbers,
)
from allotment.agent.config.parsing import parse
from allotment.agent.config.schema import (
    GPU,
    AllotmentConfig,
    AllotmentSection,
    Config,
    ConfigFile,
    DeviceListStrategy,
    GfdConfig,
    HealthConfig,
    HealthSection,
    MetricsSection,
    PluginConfig,
    ReplicatedResource,
    ReplicatedResources,
    Replication,
    ResourcePattern,
    Resources,
    new_name,
    shared_name,
    whole_name,
)
from allotment.cost.prices import Prices, prices_of
from allotment.model.errors import UsageError

_T = TypeVar("_T", bound=msgspec.Struct)

FLAGS_ALONE: Final = "flags and environment"
"""The source of a configuration without a file."""

OptionValue = None | bool | str | float | tuple[str, ...] | tuple[int, ...]

_NOT_YET: Final = "is not yet supported in the config. Ignoring..."
_HOW: Final = "(`allotment.honourResources: true` honours it)"


class _Given(msgspec.Struct, frozen=True):
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
    """Lay flags and environment over a file's values, and check the result.

    `options` are texts as written, by `Option.parameter`; None: not given.

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
    if file.sharing and file.sharing.mps and given["mig-strategy"].value == "mixed":
        raise UsageError(
            f"{given['mig-strategy'].origin}: using --mig-strategy=mixed is not supported with MPS",
            hint="leave out sharing.mps, or share parts of GPUs beside MIG devices by"
            " `allotment.devices: [{modes: [mps]}]`",
        )
    values = {each.parameter: given[each.flag].value for each in NVIDIA_OPTIONS}
    return _config(file, source, values, tuple(_notes(file, given)))


def given_value(
    flag: str, *, options: Mapping[str, object], environment: Mapping[str, str]
) -> OptionValue:
    """Return the value of an option that is not in the file. Raises `UsageError`."""
    option = option_named(flag)
    given = _given(option, {}, FLAGS_ALONE, options, environment)
    _judge(option, given)
    return given.value


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
        # As in urfave/cli, an empty list or interval is not given, and an empty bool is false.
        if name in environment and (
            environment[name] or option.kind in {OptionKind.TEXT, OptionKind.BOOL}
        ):
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
    with within(origin):
        return _Given(_value(option.kind, texts), origin)


def _value(kind: OptionKind, texts: tuple[str, ...]) -> OptionValue:
    # Of a flag that is given twice the last one counts, as in Go.
    match kind:
        case OptionKind.BOOL:
            return parse_bool(texts[-1])
        case OptionKind.LIST:
            return parse_list(texts)
        case OptionKind.NUMBERS:
            return parse_numbers(texts)
        case OptionKind.INTERVAL:
            return parse_interval(texts[-1])
        case OptionKind.TEXT:
            return texts[-1]


def _in_file(said: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401 - of the option's kind
    found: Any = said
    for name in key.split("."):
        found = (found or {}).get(name)
    return found


def _of_file(option: Option, value: Any, origin: str) -> _Given:  # noqa: ANN401 - likewise
    match option.kind:
        case OptionKind.INTERVAL:
            return _parsed(option, (value,), origin)
        case OptionKind.LIST:
            return _Given((value,) if isinstance(value, str) else tuple(value), origin)
        case OptionKind.NUMBERS:
            return _Given(tuple(value), origin)
        case _:
            return _Given(value, origin)


def _judge(option: Option, given: _Given) -> None:
    """Raise `UsageError` for a value outside the choices, in NVIDIA's words."""
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
    "tegra": "Tegra GPUs are not supported: they have no NVML",
    "vfio": "GPUs for virtual machines are not supported yet",
}
"""NVIDIA's values that Allotment does not support."""


def _config(
    file: ConfigFile, source: str, values: dict[str, Any], notes: tuple[str, ...]
) -> Config:
    honoured = bool(file.allotment and file.allotment.honour_resources)
    patterns = file.resources if file.resources and honoured else Resources()
    sharing = file.sharing.sliced if file.sharing else None
    mps = file.sharing.mps if file.sharing else None
    strategies = values["device_list_strategy"]
    values["nvidia_dev_root"] = values["nvidia_dev_root"] or values["nvidia_driver_root"]
    return _section(
        Config,
        values,
        source=source,
        plugin=_section(
            PluginConfig,
            values,
            device_list_strategies=tuple(DeviceListStrategy(each) for each in strategies) or None,
        ),
        gfd=_section(GfdConfig, values, sleep_interval_s=values["sleep_interval"]),
        gpu_patterns=(
            *_patterns(patterns.gpus),
            # What no pattern matches is a GPU, as in NVIDIA's plugin.
            ResourcePattern(pattern="*", name=GPU),
        ),
        mig_patterns=_patterns(patterns.mig),
        time_slicing=_replication(sharing, honoured=honoured) if sharing else None,
        mps=_replication(mps, honoured=honoured, fails_above_one=True) if mps else None,
        allotment=_allotment(file.allotment),
        notes=notes,
    )


def _section(kind: type[_T], values: Mapping[str, Any], **more: Any) -> _T:  # noqa: ANN401 - fields
    """Build a section of the configuration, whose fields are named as the options are."""
    names = kind.__struct_fields__
    return kind(**{name: each for name, each in values.items() if name in names}, **more)


def _patterns(patterns: Sequence[ResourcePattern] | None) -> tuple[ResourcePattern, ...]:
    return tuple(
        ResourcePattern(pattern=each.pattern, name=whole_name(each.name)) for each in patterns or ()
    )


def _replication(
    section: ReplicatedResources, *, honoured: bool, fails_above_one: bool = False
) -> Replication:
    """`fails_above_one`: the default of `failRequestsGreaterThanOne`."""
    fails = section.fail_requests_greater_than_one
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
        fail_requests_greater_than_one=fails_above_one if fails is None else fails,
    )


def _rename(resource: ReplicatedResource, *, by_default: bool, kept: bool) -> str | None:
    if resource.rename is not None and kept:
        return new_name(resource.rename)
    return shared_name(whole_name(resource.name)) if by_default else None


def _allotment(section: AllotmentSection | None) -> AllotmentConfig:
    section = section or AllotmentSection()
    default = AllotmentConfig()
    shares = section.shares_per_device
    return AllotmentConfig(
        devices=tuple(section.devices or ()),
        shares_per_device=default.shares_per_device if shares is None else shares,
        honour_resources=bool(section.honour_resources),
        driver_name=(section.dra and section.dra.driver_name) or default.driver_name,
        on_excess=section.on_excess or default.on_excess,
        metric_aliases=tuple((section.metrics and section.metrics.aliases) or ()),
        has_process_metrics=bool(section.metrics and section.metrics.per_process),
        prices=_prices(section.metrics or MetricsSection()),
        health=_health(section.health or HealthSection()),
    )


def _prices(section: MetricsSection) -> Prices:
    return prices_of(section.prices or {}, section.currency or "")


def _health(section: HealthSection) -> HealthConfig:
    default = HealthConfig()
    xids = (section.xid or {}).items()
    after = section.evict_after
    return HealthConfig(
        xid_actions=tuple(sorted((int(xid), action) for xid, action in xids)),
        auto_recover=default.auto_recover if section.auto_recover is None else section.auto_recover,
        evict=section.evict or default.evict,
        evict_after_s=default.evict_after_s
        if after is None
        else parse_duration(after, most_s=MOST_EVICT_AFTER_S),
    )


def _notes(file: ConfigFile, given: Mapping[str, _Given]) -> Iterator[str]:
    """Yield the settings without effect."""
    if file.sharing and file.sharing.mps and file.sharing.sliced:
        yield "sharing.timeSlicing has no effect beside sharing.mps"
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
    """Yield the settings that NVIDIA's plugin drops, in its words, and how to honour them."""
    if file.resources and (file.resources.gpus or file.resources.mig):
        yield f"Customizing the 'resources' field {_NOT_YET} {_HOW}"
    if file.sharing is not None:
        yield from _dropped_of(file.sharing.sliced, "timeSlicing")
        yield from _dropped_of(file.sharing.mps, "mps")


def _dropped_of(section: ReplicatedResources | None, name: str) -> Iterator[str]:
    if section is None:
        return
    defaults = {
        each.name: _rename(each, by_default=bool(section.rename_by_default), kept=False)
        for each in section.resources
    }
    if any(
        each.rename is not None and new_name(each.rename) != defaults[each.name]
        for each in section.resources
    ):
        yield f"Setting the 'rename' field in sharing.{name}.resources {_NOT_YET} {_HOW}"
    if any(each.devices is not None and each.devices != "all" for each in section.resources):
        yield f"Customizing the 'devices' field in sharing.{name}.resources {_NOT_YET} {_HOW}"

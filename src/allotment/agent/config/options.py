# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's flags and environment variables in one table, for the command, overlay and docs.

Two programs of NVIDIA are one process here: the device plugin and GPU feature discovery. An option
of both has two variables; the plugin's counts first.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from enum import StrEnum
from typing import Any, Final, TypeVar

import msgspec

from allotment.model.errors import QuantityError, UsageError
from allotment.model.formats import DURATION_UNITS

_F = TypeVar("_F", bound=Callable[..., Any])


class OptionKind(StrEnum):
    """What an option takes."""

    TEXT = "text"
    BOOL = "bool"
    LIST = "list"
    """Texts with commas between them; the flag may be repeated."""
    NUMBERS = "numbers"
    INTERVAL = "interval"
    """A duration of Go's, or `infinite`."""


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One of NVIDIA's options, in all its places."""

    flag: str
    """Without the dashes."""
    help: str
    kind: OptionKind = OptionKind.TEXT
    default: str = ""
    """As written in the file; empty: none."""
    variables: tuple[str, ...] = ()
    """Names of environment variables; empty: the flag's name in capitals."""
    key: str | None = None
    """Its place in the file; None: none."""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    refusal: str = ""
    """NVIDIA's message for a value outside `choices`; the value follows."""
    no_effect: str = ""
    """Why a value has no effect here; empty: it has one."""
    wants_strategy: bool = False
    """It has an effect only with a `deviceListStrategy`."""

    @property
    def parameter(self) -> str:
        """Its name as a function's argument, and in the `options` of `overlay`."""
        return self.flag.replace("-", "_")

    @property
    def env(self) -> tuple[str, ...]:
        """Its environment variables: the first that is set counts."""
        return self.variables or (self.parameter.upper(),)


NVIDIA_OPTIONS: Final[tuple[Option, ...]] = (
    Option(
        flag="mig-strategy",
        variables=("MIG_STRATEGY", "GFD_MIG_STRATEGY"),
        key="flags.migStrategy",
        default="none",
        choices=("none", "single", "mixed"),
        refusal="unknown MIG strategy:",
        help="How MIG devices are offered: none, single or mixed.",
    ),
    Option(
        flag="fail-on-init-error",
        variables=("FAIL_ON_INIT_ERROR", "GFD_FAIL_ON_INIT_ERROR"),
        key="flags.failOnInitError",
        kind=OptionKind.BOOL,
        default="true",
        help="End where there is no GPU or no driver; false: wait for them.",
    ),
    Option(
        flag="mps-root",
        key="flags.mpsRoot",
        help="Where MPS has its files on the host.",
        no_effect="the control daemons of MPS have their files in the agent's state folder",
    ),
    Option(
        flag="nvidia-driver-root",
        aliases=("driver-root",),
        key="flags.nvidiaDriverRoot",
        default="/",
        help="Where the driver is installed on the host.",
    ),
    Option(
        flag="nvidia-dev-root",
        aliases=("dev-root",),
        key="flags.nvidiaDevRoot",
        help="Where the device nodes are on the host; default: the driver root.",
    ),
    Option(
        flag="gdrcopy-enabled",
        key="flags.gdrcopyEnabled",
        kind=OptionKind.BOOL,
        default="false",
        help="Start containers with GDRCopy.",
        wants_strategy=True,
    ),
    Option(
        flag="gds-enabled",
        key="flags.gdsEnabled",
        kind=OptionKind.BOOL,
        default="false",
        help="Start containers with GPUDirect Storage.",
        wants_strategy=True,
    ),
    Option(
        flag="mofed-enabled",
        key="flags.mofedEnabled",
        kind=OptionKind.BOOL,
        default="false",
        help="Start containers with MOFED.",
        wants_strategy=True,
    ),
    Option(
        flag="use-node-feature-api",
        variables=("USE_NODE_FEATURE_API", "GFD_USE_NODE_FEATURE_API"),
        key="flags.useNodeFeatureAPI",
        kind=OptionKind.BOOL,
        default="true",
        help="Publish labels by the API; false: by the feature file alone.",
    ),
    Option(
        flag="device-discovery-strategy",
        key="flags.deviceDiscoveryStrategy",
        default="auto",
        choices=("auto", "nvml"),
        refusal="invalid --device-discovery-strategy option",
        help="How GPUs are found: auto or nvml.",
    ),
    Option(
        flag="pass-device-specs",
        key="flags.plugin.passDeviceSpecs",
        kind=OptionKind.BOOL,
        default="false",
        help="Name the device nodes to the kubelet as well (static CPU manager).",
        wants_strategy=True,
    ),
    Option(
        flag="device-list-strategy",
        key="flags.plugin.deviceListStrategy",
        kind=OptionKind.LIST,
        choices=("envvar", "volume-mounts", "cdi-annotations", "cdi-cri"),
        refusal="invalid --device-list-strategy option: invalid strategy:",
        help="How containers get devices: envvar, volume-mounts, cdi-annotations, cdi-cri;"
        " default: a CDI device of the share's own where the runtime has CDI, else envvar.",
    ),
    Option(
        flag="device-id-strategy",
        key="flags.plugin.deviceIDStrategy",
        default="uuid",
        choices=("uuid", "index"),
        refusal="invalid --device-id-strategy option:",
        help="How devices are named to the runtime: uuid or index.",
        wants_strategy=True,
    ),
    Option(
        flag="cdi-annotation-prefix",
        key="flags.plugin.cdiAnnotationPrefix",
        default="cdi.k8s.io/",
        help="What the keys of CDI annotations begin with.",
        wants_strategy=True,
    ),
    Option(
        flag="nvidia-cdi-hook-path",
        aliases=("nvidia-ctk-path",),
        variables=("NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"),
        key="flags.plugin.nvidiaCTKPath",
        default="/usr/bin/nvidia-ctk",
        help="NVIDIA's hook in CDI specs.",
        no_effect="the CDI devices of Allotment's shares have no hooks of NVIDIA's",
    ),
    Option(
        flag="container-driver-root",
        aliases=("driver-root-ctr-path",),
        variables=("CONTAINER_DRIVER_ROOT", "DRIVER_ROOT_CTR_PATH"),
        key="flags.plugin.containerDriverRoot",
        default="/driver-root",
        help="Where the agent's own container has the driver root.",
        no_effect="the driver's libraries are found by the dynamic loader",
    ),
    Option(
        flag="shared-devices-allocation-policy",
        key="flags.plugin.sharedDevicesAllocationPolicy",
        default="distributed",
        choices=("distributed", "packed"),
        refusal="invalid --shared-devices-allocation-policy option:",
        help="Which replicas a container is given first: distributed or packed.",
    ),
    Option(
        flag="oneshot",
        variables=("GFD_ONESHOT",),
        key="flags.gfd.oneshot",
        kind=OptionKind.BOOL,
        default="false",
        help="Label the node once, and leave the labels at the end.",
    ),
    Option(
        flag="no-timestamp",
        variables=("GFD_NO_TIMESTAMP",),
        key="flags.gfd.noTimestamp",
        kind=OptionKind.BOOL,
        default="false",
        help="Leave the time out of the labels.",
    ),
    Option(
        flag="sleep-interval",
        variables=("GFD_SLEEP_INTERVAL",),
        key="flags.gfd.sleepInterval",
        kind=OptionKind.INTERVAL,
        default="60s",
        help="How often labels are renewed, like 1m30s; infinite: when something changes.",
    ),
    Option(
        flag="output-file",
        variables=("GFD_OUTPUT_FILE",),
        key="flags.gfd.outputFile",
        default="/etc/kubernetes/node-feature-discovery/features.d/gfd",
        help="The feature file; empty: standard output.",
    ),
    Option(
        flag="machine-type-file",
        variables=("GFD_MACHINE_TYPE_FILE",),
        key="flags.gfd.machineTypeFile",
        default="/sys/class/dmi/id/product_name",
        help="Where the machine's model is read.",
    ),
    Option(
        flag="imex-channel-ids",
        key="imex.channelIDs",
        kind=OptionKind.NUMBERS,
        help="IMEX channels that containers get: none, or 0.",
        wants_strategy=True,
    ),
    Option(
        flag="imex-required",
        key="imex.required",
        kind=OptionKind.BOOL,
        default="false",
        help="Refuse containers where the IMEX channel is not there.",
        no_effect="a container whose channel is not there is refused by the runtime",
    ),
    Option(
        flag="cdi-feature-flags",
        kind=OptionKind.LIST,
        help="Features of NVIDIA's CDI specs.",
        no_effect="Allotment writes a CDI spec of its own for each share",
    ),
    Option(
        flag="cdi-disable-hooks",
        kind=OptionKind.LIST,
        help="Hooks that NVIDIA's CDI specs leave out.",
        no_effect="the CDI devices of Allotment's shares have no hooks of NVIDIA's",
    ),
    Option(
        flag="node-label",
        default="nvidia.com/device-plugin.config",
        help="The node's label that names its configuration.",
    ),
    Option(
        flag="fallback-strategies",
        kind=OptionKind.LIST,
        default="named,single",
        choices=("named", "single", "empty"),
        refusal="unknown fallback strategy:",
        help="Which configuration a node has that no label and no default names, in this order:"
        " named (the one called default), single (the only one), empty (none).",
    ),
    Option(
        flag="config-file-srcdir",
        help="A folder with the configurations, instead of a ConfigMap by the API.",
    ),
)
"""In the order of NVIDIA's documentation."""


def option_named(flag: str) -> Option:
    """Return the option of that flag; raise `KeyError`."""
    return _BY_FLAG[flag]


_BY_FLAG: Final[Mapping[str, Option]] = {each.flag: each for each in NVIDIA_OPTIONS}


def nvidia_options(function: _F) -> _F:
    """Add NVIDIA's flags to a command, each as one parameter; None: not given.

    Values are texts as written. `overlay` reads the environment, to name a value's origin.
    """
    import click

    for option in reversed(NVIDIA_OPTIONS):
        # As in Go a flag that is true or false may stand alone, or be given a value after `=`.
        alone: dict[str, Any] = (
            {"is_flag": False, "flag_value": "true"} if option.kind is OptionKind.BOOL else {}
        )
        default = f"; default: {option.default}" if option.default else ""
        text = f"{option.help} No effect here." if option.no_effect else option.help
        function = click.option(
            *(f"--{name}" for name in (option.flag, *option.aliases)),
            option.parameter,
            type=str,
            multiple=True,
            callback=_given_or_none,
            metavar=_METAVARS[option.kind],
            help=f"{text}  [env: {option.env[0]}{default}]",
            **alone,
        )(function)
    return function


def _given_or_none(_context: object, _parameter: object, value: tuple[str, ...]) -> object:
    return value or None


_METAVARS: Final[Mapping[OptionKind, str]] = {
    OptionKind.TEXT: "TEXT",
    OptionKind.BOOL: "[=BOOL]",
    OptionKind.LIST: "A,B",
    OptionKind.NUMBERS: "N,M",
    OptionKind.INTERVAL: "DURATION",
}


INFINITE: Final = "infinite"
"""A value of `gfd.sleepInterval` besides durations."""

# strconv.ParseBool
_BOOLS: Final = {
    **dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True),
    **dict.fromkeys(("0", "f", "F", "FALSE", "false", "False"), False),
}
# time.ParseDuration, with both letters that stand for micro.
_PIECE: Final = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_DURATION: Final = re.compile(rf"(?:{_PIECE.pattern})+", re.ASCII)
_LONGEST_TEXT: Final = 64
_LONGEST_S: Final = (2**63 - 1) / 10**9


def parse_bool(text: str) -> bool:
    """Parse a Go bool; an empty text is false, as in urfave/cli."""
    if not text:
        return False
    if text not in _BOOLS:
        raise UsageError(f"{text!r} is neither true nor false", hint="write true or false")
    return _BOOLS[text]


def parse_list(texts: Sequence[str]) -> tuple[str, ...]:
    """Parse values with commas between them, given once or several times; no value twice."""
    values = (value.strip() for text in texts for value in text.split(","))
    return tuple(dict.fromkeys(value for value in values if value))


def parse_numbers(texts: Sequence[str]) -> tuple[int, ...]:
    """Parse whole numbers with commas between them."""
    values = parse_list(texts)
    for value in values:
        if not re.fullmatch(r"[-+]?[0-9]{1,18}", value, re.ASCII):
            raise UsageError(f"{value!r} is not a whole number")
    return tuple(int(value) for value in values)


def parse_interval(text: str) -> float | None:
    """Parse an interval (`90s`, `1m30s`, `1.5h`) into seconds; `infinite` is None."""
    if text == INFINITE:
        return None
    hint = f"write a duration with units, like 60s or 1m30s, or {INFINITE}"
    seconds = _seconds(text, hint)
    if not 0 < seconds <= _LONGEST_S:
        problem = "it is zero" if not seconds else "it is too long"
        raise QuantityError(f"{text!r} is not an interval: {problem}", hint=hint)
    return seconds


def parse_duration(text: str, *, most_s: float) -> float:
    """Parse a duration (`5m`, `0s`) into seconds, up to `most_s`."""
    hint = "write a duration with units, like 30s or 5m"
    seconds = _seconds(text, hint)
    if seconds > most_s:
        raise QuantityError(f"{text!r} is too long: {most_s / 3600:g}h at most", hint=hint)
    return seconds


def _seconds(text: str, hint: str) -> float:
    if len(text) > _LONGEST_TEXT or not _DURATION.fullmatch(text):
        shown = text[:_LONGEST_TEXT]
        raise QuantityError(f"{shown!r} is not a duration", hint=hint)
    nanoseconds = sum(
        Decimal(number) * DURATION_UNITS[unit.replace("µ", "u").replace("μ", "u")]
        for number, unit in _PIECE.findall(text)
    )
    return float(nanoseconds / 10**9)

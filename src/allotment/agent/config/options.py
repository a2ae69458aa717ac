# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's flags and environment names, as one table: the command, the overlay and the docs use it.

Two programs of NVIDIA's become one process here, the device plugin and GPU feature discovery. What
both take has two environment names; the plugin's is asked first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeVar

__all__ = ["NVIDIA_OPTIONS", "Kind", "Option", "nvidia_options", "option_named"]

_F = TypeVar("_F", bound=Callable[..., Any])


class Kind(StrEnum):
    """What an option takes."""

    TEXT = "text"
    BOOL = "bool"
    LIST = "list"
    """Texts with commas between them; the flag may be repeated."""
    NUMBERS = "numbers"
    INTERVAL = "interval"
    """A duration of Go's, or `infinite`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One of NVIDIA's options, wherever it may be given."""

    flag: str
    """Without the dashes."""
    env: tuple[str, ...]
    """The first that is set counts."""
    kind: Kind = Kind.TEXT
    default: str
    """As one would write it; empty: none."""
    help: str
    key: str | None = None
    """Its place in the file; None: it is only a flag."""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    refusal: str = ""
    """NVIDIA's words for a value that is none of `choices`; the value follows."""
    no_effect: str = ""
    """Why a value has no effect here; empty: it has."""
    wants_strategy: bool = False
    """It has an effect only where someone named a `deviceListStrategy`."""

    @property
    def parameter(self) -> str:
        """Its name as an argument of a function, and in the `options` of `overlay`."""
        return self.flag.replace("-", "_")


NVIDIA_OPTIONS: Final[tuple[Option, ...]] = (
    Option(
        flag="mig-strategy",
        env=("MIG_STRATEGY", "GFD_MIG_STRATEGY"),
        key="flags.migStrategy",
        default="none",
        choices=("none", "single", "mixed"),
        refusal="unknown MIG strategy:",
        help="How MIG devices are offered: none, single or mixed.",
    ),
    Option(
        flag="fail-on-init-error",
        env=("FAIL_ON_INIT_ERROR", "GFD_FAIL_ON_INIT_ERROR"),
        key="flags.failOnInitError",
        kind=Kind.BOOL,
        default="true",
        help="End where there is no GPU or no driver; false: wait for them.",
    ),
    Option(
        flag="mps-root",
        env=("MPS_ROOT",),
        key="flags.mpsRoot",
        default="",
        help="Where MPS has its files on the host.",
        no_effect="the control daemons of MPS have their files in the agent's state folder",
    ),
    Option(
        flag="nvidia-driver-root",
        aliases=("driver-root",),
        env=("NVIDIA_DRIVER_ROOT",),
        key="flags.nvidiaDriverRoot",
        default="/",
        help="Where the driver is installed on the host.",
    ),
    Option(
        flag="nvidia-dev-root",
        aliases=("dev-root",),
        env=("NVIDIA_DEV_ROOT",),
        key="flags.nvidiaDevRoot",
        default="",
        help="Where the device nodes are on the host; default: the driver root.",
    ),
    Option(
        flag="gdrcopy-enabled",
        env=("GDRCOPY_ENABLED",),
        key="flags.gdrcopyEnabled",
        kind=Kind.BOOL,
        default="false",
        help="Start containers with GDRCopy.",
        wants_strategy=True,
    ),
    Option(
        flag="gds-enabled",
        env=("GDS_ENABLED",),
        key="flags.gdsEnabled",
        kind=Kind.BOOL,
        default="false",
        help="Start containers with GPUDirect Storage.",
        wants_strategy=True,
    ),
    Option(
        flag="mofed-enabled",
        env=("MOFED_ENABLED",),
        key="flags.mofedEnabled",
        kind=Kind.BOOL,
        default="false",
        help="Start containers with MOFED.",
        wants_strategy=True,
    ),
    Option(
        flag="use-node-feature-api",
        env=("USE_NODE_FEATURE_API", "GFD_USE_NODE_FEATURE_API"),
        key="flags.useNodeFeatureAPI",
        kind=Kind.BOOL,
        default="true",
        help="Publish labels by the API; false: by the feature file alone.",
    ),
    Option(
        flag="device-discovery-strategy",
        env=("DEVICE_DISCOVERY_STRATEGY",),
        key="flags.deviceDiscoveryStrategy",
        default="auto",
        choices=("auto", "nvml"),
        refusal="invalid --device-discovery-strategy option",
        help="How GPUs are found: auto or nvml.",
    ),
    Option(
        flag="pass-device-specs",
        env=("PASS_DEVICE_SPECS",),
        key="flags.plugin.passDeviceSpecs",
        kind=Kind.BOOL,
        default="false",
        help="Name the device nodes to the kubelet as well (static CPU manager).",
        wants_strategy=True,
    ),
    Option(
        flag="device-list-strategy",
        env=("DEVICE_LIST_STRATEGY",),
        key="flags.plugin.deviceListStrategy",
        kind=Kind.LIST,
        default="",
        choices=("envvar", "volume-mounts", "cdi-annotations", "cdi-cri"),
        refusal="invalid --device-list-strategy option: invalid strategy:",
        help="How containers get devices: envvar, volume-mounts, cdi-annotations, cdi-cri;"
        " default: a CDI device of the share's own where the runtime has CDI, else envvar.",
    ),
    Option(
        flag="device-id-strategy",
        env=("DEVICE_ID_STRATEGY",),
        key="flags.plugin.deviceIDStrategy",
        default="uuid",
        choices=("uuid", "index"),
        refusal="invalid --device-id-strategy option:",
        help="How devices are named to the runtime: uuid or index.",
        wants_strategy=True,
    ),
    Option(
        flag="cdi-annotation-prefix",
        env=("CDI_ANNOTATION_PREFIX",),
        key="flags.plugin.cdiAnnotationPrefix",
        default="cdi.k8s.io/",
        help="What the keys of CDI annotations begin with.",
        wants_strategy=True,
    ),
    Option(
        flag="nvidia-cdi-hook-path",
        aliases=("nvidia-ctk-path",),
        env=("NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"),
        key="flags.plugin.nvidiaCTKPath",
        default="/usr/bin/nvidia-ctk",
        help="NVIDIA's hook in CDI specs.",
        no_effect="the CDI devices of Allotment's shares have no hooks of NVIDIA's",
    ),
    Option(
        flag="container-driver-root",
        aliases=("driver-root-ctr-path",),
        env=("CONTAINER_DRIVER_ROOT", "DRIVER_ROOT_CTR_PATH"),
        key="flags.plugin.containerDriverRoot",
        default="/driver-root",
        help="Where the agent's own container has the driver root.",
        no_effect="the driver's libraries are found by the dynamic loader",
    ),
    Option(
        flag="shared-devices-allocation-policy",
        env=("SHARED_DEVICES_ALLOCATION_POLICY",),
        key="flags.plugin.sharedDevicesAllocationPolicy",
        default="distributed",
        choices=("distributed", "packed"),
        refusal="invalid --shared-devices-allocation-policy option:",
        help="Which replicas a container is given first: distributed or packed.",
    ),
    Option(
        flag="oneshot",
        env=("GFD_ONESHOT",),
        key="flags.gfd.oneshot",
        kind=Kind.BOOL,
        default="false",
        help="Label the node once, and leave the labels at the end.",
    ),
    Option(
        flag="no-timestamp",
        env=("GFD_NO_TIMESTAMP",),
        key="flags.gfd.noTimestamp",
        kind=Kind.BOOL,
        default="false",
        help="Leave the time out of the labels.",
    ),
    Option(
        flag="sleep-interval",
        env=("GFD_SLEEP_INTERVAL",),
        key="flags.gfd.sleepInterval",
        kind=Kind.INTERVAL,
        default="60s",
        help="How often labels are renewed, like 1m30s; infinite: when something changes.",
    ),
    Option(
        flag="output-file",
        env=("GFD_OUTPUT_FILE",),
        key="flags.gfd.outputFile",
        default="/etc/kubernetes/node-feature-discovery/features.d/gfd",
        help="The feature file; empty: standard output.",
    ),
    Option(
        flag="machine-type-file",
        env=("GFD_MACHINE_TYPE_FILE",),
        key="flags.gfd.machineTypeFile",
        default="/sys/class/dmi/id/product_name",
        help="Where the machine's model is read.",
    ),
    Option(
        flag="imex-channel-ids",
        env=("IMEX_CHANNEL_IDS",),
        key="imex.channelIDs",
        kind=Kind.NUMBERS,
        default="",
        help="IMEX channels that containers get: none, or 0.",
        wants_strategy=True,
    ),
    Option(
        flag="imex-required",
        env=("IMEX_REQUIRED",),
        key="imex.required",
        kind=Kind.BOOL,
        default="false",
        help="Refuse containers where the IMEX channel is not there.",
        no_effect="a container whose channel is not there is refused by the runtime",
    ),
    Option(
        flag="cdi-feature-flags",
        env=("CDI_FEATURE_FLAGS",),
        kind=Kind.LIST,
        default="",
        help="Features of NVIDIA's CDI specs.",
        no_effect="Allotment writes a CDI spec of its own for each share",
    ),
    Option(
        flag="cdi-disable-hooks",
        env=("CDI_DISABLE_HOOKS",),
        kind=Kind.LIST,
        default="",
        help="Hooks that NVIDIA's CDI specs leave out.",
        no_effect="the CDI devices of Allotment's shares have no hooks of NVIDIA's",
    ),
    Option(
        flag="node-label",
        env=("NODE_LABEL",),
        default="nvidia.com/device-plugin.config",
        help="The node's label that names its configuration.",
    ),
    Option(
        flag="fallback-strategies",
        env=("FALLBACK_STRATEGIES",),
        kind=Kind.LIST,
        default="named,single",
        choices=("named", "single", "empty"),
        refusal="unknown fallback strategy:",
        help="Which configuration a node has that no label and no default names, in this order:"
        " named (the one called default), single (the only one), empty (none).",
    ),
    Option(
        flag="config-file-srcdir",
        env=("CONFIG_FILE_SRCDIR",),
        default="",
        help="A folder with the configurations, instead of a ConfigMap by the API.",
    ),
)
"""In the order of NVIDIA's documentation."""


def option_named(flag: str) -> Option:
    """Return the option of that flag; raise `KeyError`."""
    return _BY_FLAG[flag]


_BY_FLAG: Final[Mapping[str, Option]] = {each.flag: each for each in NVIDIA_OPTIONS}


def nvidia_options(function: _F) -> _F:
    """Add NVIDIA's flags to a command, each a parameter of its own; None: not given.

    Values are texts as they were written; the environment is left to `overlay`, which knows where
    a value came from.
    """
    import click

    for option in reversed(NVIDIA_OPTIONS):
        # As in Go a flag that is true or false may stand alone, or be given a value after `=`.
        alone: dict[str, Any] = (
            {"is_flag": False, "flag_value": "true"} if option.kind is Kind.BOOL else {}
        )
        default = f"; default: {option.default}" if option.default else ""
        function = click.option(
            *(f"--{name}" for name in (option.flag, *option.aliases)),
            option.parameter,
            type=str,
            multiple=True,
            callback=_given_or_none,
            metavar=_METAVARS[option.kind],
            help=f"{option.help}  [env: {option.env[0]}{default}]",
            **alone,
        )(function)
    return function


def _given_or_none(_context: object, _parameter: object, value: tuple[str, ...]) -> object:
    return value or None


_METAVARS: Final[Mapping[Kind, str]] = {
    Kind.TEXT: "TEXT",
    Kind.BOOL: "[=BOOL]",
    Kind.LIST: "A,B",
    Kind.NUMBERS: "N,M",
    Kind.INTERVAL: "DURATION",
}

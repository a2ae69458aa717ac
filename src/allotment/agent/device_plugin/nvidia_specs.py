# SPDX-License-Identifier: Apache-2.0
"""The CDI specs of NVIDIA's plugin: what its names mean, where a configuration asks for them.

With `deviceListStrategy: cdi-cri` or `cdi-annotations` the answers name devices like
`k8s.device-plugin.nvidia.com/gpu=GPU-...`, and it is the plugin that describes them to the runtime
(k8s-device-plugin v0.20, internal/cdi/cdi.go). A GPU that comes later is described when it comes.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from allotment.agent.config.effective import Config
from allotment.agent.device_plugin.answers import CDI_VENDOR, device_names, uses_nvidia_cdi
from allotment.model.devices import Device
from allotment.model.errors import AllotError, StateError
from allotment.shares.cdi import CDI_VERSION, write_spec

__all__ = ["DeviceEdits", "NvidiaSpecs", "make_specs"]

DeviceEdits = Callable[[Sequence[Device]], Mapping[str, Sequence[Any]]]
"""Returns what makes real devices usable in a container, as CDI's edits (`shares.drivers`)."""

_CLASSES: Final = ("gpu", "imex-channel")
# The runtime of NVIDIA's toolkit then leaves the container alone: CDI has done it all.
_DONE: Final = {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}


def make_specs(
    devices: Sequence[Device], config: Config, edits: DeviceEdits
) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """Return the specs that this configuration needs, by class, and what could not be described.

    None where no CDI strategy is named. A device that cannot be described is left out.
    """
    if not uses_nvidia_cdi(config):
        return {}, ()
    entries: dict[str, list[dict[str, Any]]] = {each: [] for each in _CLASSES}
    problems: list[str] = []
    for device, name in zip(devices, device_names(devices, config), strict=True):
        try:
            found = {key: list(values) for key, values in edits([device]).items() if values}
        except AllotError as error:
            problems.append(f"{device.uuid}: {error.message}")
            continue
        if found:  # the runtimes refuse a device without any
            entries["gpu"].append({"name": name, "containerEdits": found})
    for channel in config.imex_channel_ids:
        node = {"path": f"/dev/nvidia-caps-imex-channels/channel{channel}"}
        edit = {"deviceNodes": [node]}
        entries["imex-channel"].append({"name": str(channel), "containerEdits": edit})
    specs = {
        kind: {
            "cdiVersion": CDI_VERSION,
            "kind": f"{CDI_VENDOR}/{kind}",
            "devices": described,
            "containerEdits": _DONE,
        }
        for kind, described in entries.items()
        if described
    }
    return specs, tuple(problems)


class NvidiaSpecs:
    """The spec files, kept as they should be."""

    __slots__ = ("_edits", "_folder", "_written")

    def __init__(self, folder: Path, edits: DeviceEdits) -> None:
        """Name the folder that the container runtime reads."""
        self._folder = folder
        self._edits = edits
        self._written: dict[str, dict[str, Any] | None] = {}

    def keep(self, devices: Sequence[Device], config: Config) -> tuple[str, ...]:
        """Write what is needed, remove what is not; blocks. Returns what could not be described.

        Files are written only when something changed. Raises `StateError`.
        """
        specs, problems = make_specs(devices, config, self._edits)
        for kind in _CLASSES:
            spec = specs.get(kind)
            if kind in self._written and self._written[kind] == spec:
                continue
            path = self._folder / f"{CDI_VENDOR}-{kind}.json"
            if spec is not None:
                write_spec(path, spec)
            elif self._written.get(kind) is not None:
                # Only what was written here: before that, it is another plugin's.
                _remove(path)
            self._written[kind] = spec
        return problems


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StateError(
            f"cannot remove the CDI spec {path}: {error.strerror}",
            hint=f"let the node agent write into {path.parent} (a hostPath mount, not read-only)",
        ) from error

# SPDX-License-Identifier: Apache-2.0
"""Which GPUs a configuration means: by index, UUID, PCI address or model, and by `devices`."""

from collections.abc import Sequence
from dataclasses import dataclass

from allotment.agent.config.checks import MOST_KEEP_S, PCI_ADDRESS
from allotment.agent.config.go_values import parse_duration
from allotment.agent.config.schema import DeviceMatch, DeviceRule, MigSection
from allotment.model.devices import Device
from allotment.model.errors import UsageError
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import MIG, Request
from allotment.placement import is_selected

__all__ = ["MigUse", "matches", "mig_use", "rule_of", "selected"]

_KEEP_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MigUse:
    """How a GPU is cut for who asks."""

    keep_s: float = _KEEP_S
    """For how many seconds a slice is kept after its container."""
    may_reset: bool = False
    """It may be reset, while idle, to switch its mode."""


def mig_use(rule: DeviceRule) -> MigUse | None:
    """Return what a rule says of slices; None: none are cut for who asks."""
    if MIG not in rule.shared:
        return None
    said = rule.mig or MigSection()
    keep_s = _KEEP_S if said.keep is None else parse_duration(said.keep, most_s=MOST_KEEP_S)
    return MigUse(keep_s=keep_s, may_reset=bool(said.reset))


def rule_of(device: Device, rules: Sequence[DeviceRule]) -> int | None:
    """Return the number of the rule that counts for a device: the first that matches it."""
    numbers = (number for number, rule in enumerate(rules) if matches(device, rule.match))
    return next(numbers, None)


def matches(device: Device, match: DeviceMatch | None) -> bool:
    """Does all hold that `match` names? None names nothing, and holds for every device."""
    if match is None:
        return True
    return (
        (match.index is None or device.index in match.index)
        and (match.uuid is None or any(_begins(device.uuid, each) for each in match.uuid))
        and (match.pci is None or any(_is_at(device, each) for each in match.pci))
        and (match.model is None or any(_is_model(device, each) for each in match.model))
    )


def selected(
    devices: Sequence[Device], wanted: str | int | list[str | int] | None
) -> tuple[Device, ...]:
    """Return those that `sharing.*.resources[].devices` means, of the resource's devices.

    A count takes those of the lowest number, so that the same ones are taken after every start.
    Raises `UsageError` with NVIDIA's words when there are fewer, or none of that index or UUID.
    """
    ordered = sorted(devices, key=lambda device: device.place)
    match wanted:
        case int():
            if wanted > len(ordered):
                raise UsageError(
                    f"requested {wanted} devices to be replicated, but only {len(ordered)} devices"
                    " available"
                )
            return tuple(ordered[:wanted])
        case list():
            chosen = [_referred(ordered, str(each)) for each in wanted]
            return tuple(device for device in ordered if device in chosen)
        case _:
            return tuple(ordered)


def _referred(devices: Sequence[Device], reference: str) -> Device:
    by_index = all(part.isdecimal() for part in reference.split(":"))
    number = ":".join(str(int(each)) for each in reference.split(":")) if by_index else ""
    for device in devices:
        if by_index and device.index_text == number:
            return device
        if not by_index and reference.lower() in {device.uuid.lower(), _by_ids(device).lower()}:
            return device
    if by_index:
        raise UsageError(f"no matching device at index: {reference}")
    raise UsageError(f"no matching device with UUID: {reference}")


def _by_ids(device: Device) -> str:
    """Name a MIG device as drivers before R470 did: by its GPU and the ids of its instances."""
    where = device.slice_of
    if where is None:
        return device.uuid
    return f"MIG-{where.gpu}/{where.gpu_instance}/{where.compute_instance}"


def _begins(uuid: str, beginning: str) -> bool:
    return uuid.lower().startswith(beginning.lower())


def _is_at(device: Device, address: str) -> bool:
    """Compare addresses as numbers: NVML writes the domain with eight digits, lspci with four."""
    here, wanted = _address(device.pci_bus_id), _address(address)
    return here is not None and here == wanted


def _address(text: str) -> tuple[int, ...] | None:
    match = PCI_ADDRESS.fullmatch(text.strip())
    if match is None:
        return None
    parts = (match["domain"] or "0", match["bus"], match["device"], match["function"] or "0")
    return tuple(int(part, 16) for part in parts)


def _is_model(device: Device, model: str) -> bool:
    """Ask as `allot run --gpu` does; how much memory is asked for does not matter to it."""
    return is_selected(device, Request(MemoryAmount("1", size_bytes=1), selectors=(model,)))

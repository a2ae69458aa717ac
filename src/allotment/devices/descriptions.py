# SPDX-License-Identifier: Apache-2.0
"""What a simulated machine is to have: the short form and the YAML form, parsed into one value.

    a100-80gb:2,t4                      two A100-80GB and a T4
    a100-80gb[memory=40Gi],t4:2         with the keys of one entry of the YAML form

    driver: 580.95.05                   what NVML tells; default: what came with `cuda`
    cuda: 13.0                          what cuDriverGetVersion tells; 11.8 to 13.x
    timeslice: 2ms                      the turn of each of several busy processes
    kernel: 20us                        how long a kernel runs that says nothing itself
    gpus:
      - a100-80gb                       short for {model: a100-80gb}
      - {model: t4, count: 4, numa: 1, memory: 8Gi, uuid: GPU-..., ecc: false}
      - {model: h100-80gb, mig: 1g.10gb*3+3g.40gb}     MIG is on, and it is cut so; or true

Anything else, an unknown key above all, is a `UsageError` that names the place and what was
probably meant. Pure: a text goes in, a description comes out; files are `simulated`'s business.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from allotment.devices.cuts import Cut, parse_cuts
from allotment.devices.model_facts import Model
from allotment.devices.models import MODELS
from allotment.model.errors import QuantityError, UsageError
from allotment.model.quantities import parse_bytes, parse_duration_ns

__all__ = [
    "MAX_GPUS",
    "GpuDescription",
    "MachineDescription",
    "parse_short",
    "parse_yaml",
]

MAX_GPUS: Final = 16
"""ALLOT_MACHINE_GPUS of native/simulated/machine.h."""

_MIB: Final = 1 << 20
_MAX_MEMORY: Final = 1 << 42
_MAX_NUMA: Final = 63
_MAX_TEXT: Final = 1 << 20
_DEFAULT_CUDA: Final = 13000
_DEFAULT_TIMESLICE_US: Final = 2000
_DEFAULT_KERNEL_US: Final = 20
_LONGEST_US: Final = 60_000_000

# The driver that came with each CUDA version; a version between two has the older one's.
_DRIVERS: Final[Mapping[int, str]] = {
    11080: "520.61.05",
    12000: "525.60.13",
    12010: "530.30.02",
    12020: "535.104.05",
    12030: "545.23.08",
    12040: "550.54.15",
    12050: "555.42.06",
    12060: "560.35.05",
    12080: "570.86.15",
    12090: "575.57.08",
    13000: "580.95.05",
    13010: "590.44.01",
}
_OLDEST_CUDA: Final = 11080
_NEWEST_CUDA: Final = 13999

_MACHINE_KEYS: Final = ("driver", "cuda", "timeslice", "kernel", "gpus")
_GPU_KEYS: Final = ("model", "count", "memory", "uuid", "numa", "ecc", "mig")
_UUID: Final = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_DRIVER: Final = re.compile(r"[0-9]{3}(?:\.[0-9]{1,3}){1,2}")
_CUDA: Final = re.compile(r"(?P<major>[0-9]{1,2})\.(?P<minor>[0-9])")
_ENTRY: Final = re.compile(
    r"\s*(?P<model>[\w.-]+)\s*(?:\[(?P<keys>[^\[\]]*)\])?\s*(?::\s*(?P<count>[^,\s]*))?\s*"
)
_SWITCHES: Final = {
    "true": True,
    "on": True,
    "yes": True,
    "false": False,
    "off": False,
    "no": False,
}
_HINT: Final = "write GPUs like a100-80gb:2,t4, or name a YAML file (docs/reference/simulated.md)"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDescription:
    """One simulated GPU. What is None follows from the machine: its UUID and its NUMA node."""

    model: Model
    memory_bytes: int
    uuid: str | None = None
    numa_node: int | None = None
    ecc: bool | None = None
    cuts: tuple[Cut, ...] | None = None
    """What it is cut into when the machine is new; None: MIG is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineDescription:
    """A simulated machine: what `cuDriverGetVersion` tells (13000), and its GPUs in PCI order."""

    gpus: tuple[GpuDescription, ...]
    cuda_version: int = _DEFAULT_CUDA
    driver_version: str = _DRIVERS[_DEFAULT_CUDA]
    timeslice_us: int = _DEFAULT_TIMESLICE_US
    kernel_us: int = _DEFAULT_KERNEL_US


def parse_short(text: str) -> MachineDescription:
    """Parse the short form, `a100-80gb:2,t4`; raise `UsageError`."""
    if not text.strip():
        raise UsageError("the list of simulated GPUs is empty", hint=_HINT)
    gpus = [gpu for part in _split_entries(text) for gpu in _short_entry(part)]
    return _machine(gpus, {})


def parse_yaml(text: str, *, source: str) -> MachineDescription:
    """Parse the YAML form; `source` names it in errors. Raises `UsageError`."""
    import yaml  # late: only machines described by a file pay for it

    if len(text) > _MAX_TEXT:
        raise UsageError(f"{source}: {len(text)} characters are too many for a machine")
    try:
        # Every scalar stays the text that was written: 12.10 is not 12.1, and makes no objects.
        document = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 - the least of loaders
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{source} is not YAML: {_first_line(error)}", hint=_HINT) from error
    try:
        return _machine_of(document)
    except UsageError as error:
        raise UsageError(f"{source}: {error.message}", hint=error.hint) from error


# ---- the short form ------------------------------------------------------------------------------


def _split_entries(text: str) -> Iterator[str]:
    """Cut at the commas that are not inside brackets."""
    depth, start = 0, 0
    for at, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character == "," and depth <= 0:
            yield text[start:at]
            start = at + 1
    yield text[start:]


def _short_entry(part: str) -> list[GpuDescription]:
    match = _ENTRY.fullmatch(part)
    if match is None:
        raise UsageError(f"{part.strip()!r} is not a GPU model with a count", hint=_HINT)
    keys: dict[object, object] = {"model": match["model"]}
    for pair in (match["keys"] or "").split(","):
        name, equals, value = (piece.strip() for piece in pair.partition("="))
        if not name and not equals:
            continue
        if not equals:
            raise UsageError(f"{part.strip()!r}: {name!r} has no value; write {name}=...")
        keys[name] = value
    if match["count"] is not None:
        keys["count"] = match["count"]
    return _gpu_entry(keys, repr(part.strip()))


# ---- the YAML form -------------------------------------------------------------------------------


def _machine_of(document: object) -> MachineDescription:
    if not isinstance(document, Mapping):
        raise UsageError("a machine is a mapping with `gpus`", hint=_HINT)
    _refuse_unknown(document, _MACHINE_KEYS, "")
    entries = document.get("gpus")
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise UsageError("gpus: a machine needs a list of at least one GPU", hint=_HINT)
    gpus: list[GpuDescription] = []
    for at, entry in enumerate(entries):
        place = f"gpus[{at}]"
        if isinstance(entry, str):
            entry = {"model": entry}  # noqa: PLW2901 - the short spelling of the same thing
        if not isinstance(entry, Mapping):
            raise UsageError(f"{place}: {_shown(entry)} is not a GPU", hint=_HINT)
        gpus += _gpu_entry(entry, place)
        if len(gpus) > MAX_GPUS:
            break
    return _machine(gpus, document)


def _gpu_entry(entry: Mapping[object, object], place: str) -> list[GpuDescription]:
    _refuse_unknown(entry, _GPU_KEYS, place)
    if "model" not in entry:
        raise UsageError(f"{place}: the model is missing", hint=_HINT)
    model = _model(entry["model"], place)
    count = _whole(entry.get("count", 1), f"{place}.count", least=1, most=MAX_GPUS)
    ecc = entry.get("ecc")
    gpu = GpuDescription(
        model=model,
        memory_bytes=_memory(entry.get("memory"), model, place),
        uuid=_uuid(entry.get("uuid"), count, place),
        numa_node=None
        if entry.get("numa") is None
        else _whole(entry["numa"], f"{place}.numa", least=0, most=_MAX_NUMA),
        ecc=None if ecc is None else _switch(ecc, f"{place}.ecc"),
        cuts=None if entry.get("mig") is None else _cuts(entry["mig"], model, place),
    )
    if gpu.ecc is not None and model.ecc is None:
        raise UsageError(f"{place}.ecc: a {model.name} has no ECC memory")
    return [replace(gpu)] * count


def _machine(gpus: list[GpuDescription], keys: Mapping[object, object]) -> MachineDescription:
    if len(gpus) > MAX_GPUS:
        raise UsageError(f"a simulated machine has at most {MAX_GPUS} GPUs", hint=_HINT)
    uuids = [gpu.uuid for gpu in gpus if gpu.uuid is not None]
    twice = next((uuid for uuid in uuids if uuids.count(uuid) > 1), None)
    if twice is not None:
        raise UsageError(f"two GPUs have the UUID {twice}")
    driver, cuda = _versions(keys.get("driver"), keys.get("cuda"))
    return MachineDescription(
        gpus=tuple(gpus),
        cuda_version=cuda,
        driver_version=driver,
        timeslice_us=_duration(keys.get("timeslice"), "timeslice", _DEFAULT_TIMESLICE_US),
        kernel_us=_duration(keys.get("kernel"), "kernel", _DEFAULT_KERNEL_US),
    )


# ---- values --------------------------------------------------------------------------------------


def _model(value: object, place: str) -> Model:
    text = _text(value, f"{place}.model").lower().replace("_", "-").replace(" ", "-")
    found = MODELS.get(text)
    if found is not None:
        return found
    longer = [key for key in MODELS if key.startswith(f"{text}-")]
    if len(longer) == 1:
        return MODELS[longer[0]]
    begin_so = [key for key in MODELS if text and key.startswith(text)]
    meant = begin_so or _close(text, tuple(MODELS), most=3)
    raise UsageError(
        f"{place}: there is no model {_shown(value)}" + _did_you_mean(meant),
        hint=f"models: {', '.join(MODELS)}",
    )


def _cuts(value: object, model: Model, place: str) -> tuple[Cut, ...] | None:
    """`true`, `false`, or profiles: `1g.10gb*3+3g.40gb`, in YAML also as a list of such."""
    texts = [value] if isinstance(value, (str, int)) else value
    if not isinstance(texts, Sequence):
        raise UsageError(f"{place}.mig: {_shown(value)} is not a list of profiles", hint=_HINT)
    text = "+".join(_text(each, f"{place}.mig") for each in texts)
    is_on = _SWITCHES.get(text.lower())
    if model.mig is None:
        if is_on is False:
            return None
        raise UsageError(f"{place}.mig: a {model.name} has no MIG")
    if is_on is not None:
        return () if is_on else None
    return parse_cuts(text, model.mig, model.memory_mib, place)


def _memory(value: object, model: Model, place: str) -> int:
    if value is None:
        return model.memory_mib * _MIB
    try:
        size = parse_bytes(_text(value, f"{place}.memory"))
    except QuantityError as error:
        raise UsageError(f"{place}.memory: {error.message}", hint=error.hint) from error
    least = (model.reserved_mib + model.context_mib) * _MIB
    if not least < size <= _MAX_MEMORY:
        raise UsageError(
            f"{place}.memory: a {model.name} needs more than {least >> 20}Mi (what its driver"
            f" reserves, and one context) and at most {_MAX_MEMORY >> 40}Ti"
        )
    return size // _MIB * _MIB


def _uuid(value: object, count: int, place: str) -> str | None:
    if value is None:
        return None
    text = _text(value, f"{place}.uuid")
    if not _UUID.fullmatch(text):
        raise UsageError(
            f"{place}.uuid: {_shown(value)} is not a GPU's UUID",
            hint="write GPU- and a UUID in small hexadecimal digits, or leave it out",
        )
    if count > 1:
        raise UsageError(f"{place}.uuid: one UUID cannot name {count} GPUs")
    return text


def _versions(driver: object, cuda: object) -> tuple[str, int]:
    if cuda is None and driver is None:
        return _DRIVERS[_DEFAULT_CUDA], _DEFAULT_CUDA
    name = None if driver is None else _text(driver, "driver")
    if name is not None and not _DRIVER.fullmatch(name):
        raise UsageError(f"driver: {_shown(driver)} is not a driver version, like 580.95.05")
    if cuda is None:
        branch = int(str(name).partition(".")[0])
        fitting = [key for key, old in _DRIVERS.items() if int(old.partition(".")[0]) <= branch]
        return str(name), max(fitting, default=_OLDEST_CUDA)
    match = _CUDA.fullmatch(_text(cuda, "cuda"))
    number = int(match["major"]) * 1000 + int(match["minor"]) * 10 if match else 0
    if not _OLDEST_CUDA <= number <= _NEWEST_CUDA:
        raise UsageError(f"cuda: {_shown(cuda)} is not a CUDA version from 11.8 to 13.x")
    if name is not None:
        return name, number
    return _DRIVERS[max(key for key in _DRIVERS if key <= number)], number


def _duration(value: object, place: str, default_us: int) -> int:
    if value is None:
        return default_us
    try:
        nanoseconds = parse_duration_ns(_text(value, place))
    except QuantityError as error:
        raise UsageError(f"{place}: {error.message}", hint=error.hint) from error
    microseconds = nanoseconds // 1000
    if not 1 <= microseconds <= _LONGEST_US:
        raise UsageError(f"{place}: {_shown(value)} is not between 1us and 60s")
    return microseconds


def _whole(value: object, place: str, *, least: int, most: int) -> int:
    text = _text(value, place)
    hint = f"write a whole number from {least} to {most}, or leave it out"
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise UsageError(f"{place}: {_shown(value)} is not a whole number", hint=hint)
    number = int(text)
    if not least <= number <= most:
        raise UsageError(f"{place}: {number} is not between {least} and {most}", hint=hint)
    return number


def _switch(value: object, place: str) -> bool:
    found = _SWITCHES.get(_text(value, place).lower())
    if found is None:
        raise UsageError(f"{place}: {_shown(value)} is neither true nor false")
    return found


def _refuse_unknown(keys: Mapping[object, object], known: Sequence[str], place: str) -> None:
    for key in keys:
        if key not in known:
            meant = _close(_shown(key), known, most=1)
            raise UsageError(
                f"{f'{place}: ' if place else ''}unknown key {_shown(key)}" + _did_you_mean(meant),
                hint=f"keys: {', '.join(known)}",
            )


def _close(text: str, known: Sequence[str], *, most: int) -> list[str]:
    import difflib  # late: only mistakes need it

    return difflib.get_close_matches(text, known, n=most, cutoff=0.5)


def _did_you_mean(meant: Sequence[str]) -> str:
    return f" (did you mean {' or '.join(meant)}?)" if meant else ""


def _text(value: object, place: str) -> str:
    """A scalar as it was written."""
    if not isinstance(value, (str, int)):
        raise UsageError(f"{place}: {_shown(value)} is not a value for it", hint=_HINT)
    return str(value).strip()


def _shown(value: object) -> str:
    """A value in an error, never more than a line."""
    text = repr(value) if isinstance(value, str) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 - most of a line


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__

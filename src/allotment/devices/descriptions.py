# SPDX-License-Identifier: Apache-2.0
"""Parses descriptions of simulated machines, in a short form and in YAML.

    a100-80gb:2,t4                      two A100-80GB and a T4
    a100-80gb[memory=40Gi],t4:2         with the keys of one entry of the YAML form

    driver: 580.95.05                   NVML's driver version; default: that of `cuda`
    cuda: 13.0                          result of cuDriverGetVersion; 11.8 to 13.x
    timeslice: 2ms                      the turn of each of several busy processes
    kernel: 20us                        duration of a kernel without a given one
    gpus:
      - a100-80gb                       short for {model: a100-80gb}
      - {model: t4, count: 4, numa: 1, memory: 8Gi, uuid: GPU-..., ecc: false}
      - {model: h100-80gb, mig: 1g.10gb*3+3g.40gb}     MIG is on, with these slices; or true

Any other content, above all an unknown key, is a `UsageError` with its place and the likely
intention. Pure: `simulated` reads the files.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from allotment.devices.geometries import Geometry, Shape
from allotment.devices.model_facts import Model
from allotment.devices.models import MODELS
from allotment.model.errors import QuantityError, UsageError
from allotment.model.quantities import parse_bytes, parse_duration_ns

_ITEM: Final = re.compile(
    r"(?P<profile>[0-9]+g\.[0-9]+gb(?:[+-][a-z.]+)?)(?:\*(?P<count>[1-8]))?(?:@(?P<start>[0-7]))?"
)
# The driver's order of preference, on eight slots (cuts.c, driver_choice).
_DRIVER_STARTS: Final = (6, 4, 5, 0, 1, 2, 3, 7)
_WHOLE: Final = 8


class Cut(msgspec.Struct, frozen=True):
    """A GPU instance with one compute instance of all its slices."""

    shape: Shape
    start: int


def parse_cuts(text: str, geometry: Geometry, memory_mib: int, place: str) -> tuple[Cut, ...]:
    """Parse profiles joined by `+`, each with `*COUNT` or `@START`; `place` is for errors.

    Profiles without a start get one that leaves room for all. Raises `UsageError`.
    """
    names = {shape.name_on(memory_mib): shape for shape in geometry.shapes}
    fixed: list[Cut] = []
    free: list[Shape] = []
    for part in re.split(r"\+(?=[0-9])", text):
        item = _ITEM.fullmatch(part.strip())
        shape = names.get(item["profile"]) if item else None
        if item is None or shape is None:
            raise UsageError(
                f"{place}.mig: {part.strip()!r} is not a MIG profile of this GPU",
                hint=(
                    f"write profiles from {', '.join(names)}, joined by +, with *COUNT or @START"
                ),
            )
        if item["start"] is None:
            free += [shape] * int(item["count"] or 1)
        elif item["count"] is None and int(item["start"]) in shape.starts:
            fixed.append(Cut(shape, int(item["start"])))
        else:
            starts = ", ".join(map(str, shape.starts))
            raise UsageError(
                f"{place}.mig: {part.strip()!r} cannot start there",
                hint=f"{item['profile']} can start at {starts}",
            )
    free.sort(key=lambda shape: -shape.size)
    placed = _place((), [*fixed, *free], geometry)
    if placed is None:
        raise UsageError(f"{place}.mig: {text!r} does not fit on one GPU")
    return placed


def _place(
    made: tuple[Cut, ...], left: Sequence[Cut | Shape], geometry: Geometry
) -> tuple[Cut, ...] | None:
    """Places for the rest, or None. Depth first: there are eight slots."""
    if not left:
        return made
    first, *others = left
    shape = first if isinstance(first, Shape) else first.shape
    order = _DRIVER_STARTS if geometry.slots == _WHOLE else range(geometry.slots)
    starts = [start for start in order if start in shape.starts]
    for start in starts if isinstance(first, Shape) else [first.start]:
        cut = Cut(shape, start)
        if all(_go_together(cut, other) for other in made) and _count(made, shape) < shape.most:
            placed = _place((*made, cut), others, geometry)
            if placed is not None:
                return placed
    return None


def _count(made: Sequence[Cut], shape: Shape) -> int:
    return sum(cut.shape is shape for cut in made)


def _go_together(one: Cut, other: Cut) -> bool:
    if one.shape.has_media and other.shape.has_media:
        return False
    return one.start + one.shape.size <= other.start or other.start + other.shape.size <= one.start


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

# The driver of each CUDA version; a version in between has the older one's.
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


class GpuDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated GPU. None: follows from the machine (UUID and NUMA node)."""

    model: Model
    memory_bytes: int
    uuid: str | None = None
    numa_node: int | None = None
    ecc: bool | None = None
    cuts: tuple[Cut, ...] | None = None
    """Slices of a new machine; None: MIG is off."""


class MachineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated machine: the result of `cuDriverGetVersion` (13000), its GPUs in PCI order."""

    gpus: tuple[GpuDescription, ...]
    cuda_version: int = _DEFAULT_CUDA
    driver_version: str = _DRIVERS[_DEFAULT_CUDA]
    timeslice_us: int = _DEFAULT_TIMESLICE_US
    kernel_us: int = _DEFAULT_KERNEL_US


def parse_short(text: str) -> MachineDescription:
    if not text.strip():
        raise UsageError("the list of simulated GPUs is empty", hint=_HINT)
    gpus = [gpu for part in _split_entries(text) for gpu in _short_entry(part)]
    return _machine(gpus, {})


def parse_yaml(text: str, *, source: str) -> MachineDescription:
    import yaml  # late: only machines described by a file need it

    if len(text) > _MAX_TEXT:
        raise UsageError(f"{source}: {len(text)} characters are too many for a machine")
    try:
        # Scalars stay text: 12.10 is not 12.1, and no objects are created.
        document = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 - the least of loaders
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{source} is not YAML: {_first_line(error)}", hint=_HINT) from error
    try:
        return _machine_of(document)
    except UsageError as error:
        raise UsageError(f"{source}: {error.message}", hint=error.hint) from error


# ---- the short form ------------------------------------------------------------------------------


def _split_entries(text: str) -> Iterator[str]:
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
    count = 1
    if "count" in entry:
        count = _whole(entry["count"], f"{place}.count", least=1, most=MAX_GPUS)
    memory, uuid, numa = entry.get("memory"), entry.get("uuid"), entry.get("numa")
    ecc = entry.get("ecc")
    gpu = GpuDescription(
        model=model,
        memory_bytes=model.memory_mib * _MIB if memory is None else _memory(memory, model, place),
        uuid=None if uuid is None else _uuid(uuid, count, place),
        numa_node=None if numa is None else _whole(numa, f"{place}.numa", least=0, most=_MAX_NUMA),
        ecc=None if ecc is None else _switch(ecc, f"{place}.ecc"),
        cuts=None if entry.get("mig") is None else _cuts(entry["mig"], model, place),
    )
    if gpu.ecc is not None and model.ecc is None:
        raise UsageError(f"{place}.ecc: a {model.name} has no ECC memory")
    return [gpu] * count


def _machine(gpus: list[GpuDescription], keys: Mapping[object, object]) -> MachineDescription:
    if len(gpus) > MAX_GPUS:
        raise UsageError(f"a simulated machine has at most {MAX_GPUS} GPUs", hint=_HINT)
    uuids = [gpu.uuid for gpu in gpus if gpu.uuid is not None]
    twice = next((uuid for uuid in uuids if uuids.count(uuid) > 1), None)
    if twice is not None:
        raise UsageError(f"two GPUs have the UUID {twice}")
    driver, cuda = _DRIVERS[_DEFAULT_CUDA], _DEFAULT_CUDA
    if keys.get("driver") is not None or keys.get("cuda") is not None:
        driver, cuda = _versions(keys.get("driver"), keys.get("cuda"))
    timeslice, kernel = keys.get("timeslice"), keys.get("kernel")
    return MachineDescription(
        gpus=tuple(gpus),
        cuda_version=cuda,
        driver_version=driver,
        timeslice_us=_DEFAULT_TIMESLICE_US
        if timeslice is None
        else _duration(timeslice, "timeslice"),
        kernel_us=_DEFAULT_KERNEL_US if kernel is None else _duration(kernel, "kernel"),
    )


# ---- values --------------------------------------------------------------------------------------


def _model(value: object, place: str) -> Model:
    text = _text(value, f"{place}.model").lower().replace("_", "-").replace(" ", "-")
    if text in MODELS:
        return MODELS[text]
    longer = [key for key in MODELS if key.startswith(f"{text}-")]
    if len(longer) == 1:
        return MODELS[longer[0]]
    with_prefix = [key for key in MODELS if text and key.startswith(text)]
    meant = with_prefix or _close(text, tuple(MODELS), most=3)
    raise UsageError(
        f"{place}: unknown model {_shown(value)}" + _did_you_mean(meant),
        hint=f"models: {', '.join(MODELS)}",
    )


def _cuts(value: object, model: Model, place: str) -> tuple[Cut, ...] | None:
    """`true`, `false`, or profiles: `1g.10gb*3+3g.40gb`, in YAML also as a list."""
    texts = [value] if isinstance(value, (str, int)) else value
    if not isinstance(texts, Sequence):
        raise UsageError(f"{place}.mig: {_shown(value)} is not a list of profiles", hint=_HINT)
    text = "+".join(_text(profile, f"{place}.mig") for profile in texts)
    is_on = _SWITCHES.get(text.lower())
    if model.mig is None:
        if is_on is False:
            return None
        raise UsageError(f"{place}.mig: a {model.name} has no MIG")
    if is_on is not None:
        return () if is_on else None
    return parse_cuts(text, model.mig, model.memory_mib, place)


def _memory(value: object, model: Model, place: str) -> int:
    try:
        size = parse_bytes(_text(value, f"{place}.memory"))
    except QuantityError as error:
        raise UsageError(f"{place}.memory: {error.message}", hint=error.hint) from error
    least = (model.reserved_mib + model.context_mib) * _MIB
    if not least < size <= _MAX_MEMORY:
        raise UsageError(
            f"{place}.memory: a {model.name} needs more than {least >> 20}Mi (its driver's "
            f"reserve and one context) and at most {_MAX_MEMORY >> 40}Ti"
        )
    return size // _MIB * _MIB


def _uuid(value: object, count: int, place: str) -> str:
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


def _duration(value: object, place: str) -> int:
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
    is_on = _SWITCHES.get(_text(value, place).lower())
    if is_on is None:
        raise UsageError(f"{place}: {_shown(value)} is neither true nor false")
    return is_on


def _refuse_unknown(keys: Mapping[object, object], allowed: Sequence[str], place: str) -> None:
    for key in keys:
        if key not in allowed:
            meant = _close(_shown(key), allowed, most=1)
            raise UsageError(
                f"{f'{place}: ' if place else ''}unknown key {_shown(key)}" + _did_you_mean(meant),
                hint=f"keys: {', '.join(allowed)}",
            )


def _close(text: str, allowed: Sequence[str], *, most: int) -> list[str]:
    import difflib  # late: only mistakes need it

    return difflib.get_close_matches(text, allowed, n=most, cutoff=0.5)


def _did_you_mean(meant: Sequence[str]) -> str:
    return f" (did you mean {' or '.join(meant)}?)" if meant else ""


def _text(value: object, place: str) -> str:
    if not isinstance(value, (str, int)):
        raise UsageError(f"{place}: {_shown(value)} is not a value for it", hint=_HINT)
    return str(value).strip()


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 - most of a line


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__

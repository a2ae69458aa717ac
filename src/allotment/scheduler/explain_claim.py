# SPDX-License-Identifier: Apache-2.0
"""Why a ResourceClaim waits, or what it has: by the API server's data alone.

kube-scheduler allocates claims. Its checks of amounts, taints, counters and other claims are
repeated here, each request by itself. Of selectors in CEL, comparisons with fixed values are
evaluated; the others, and constraints between requests, are named as not evaluated.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from allotment.dialects.own.resource_claims import (
    COMPUTE_CAPACITY,
    MEMORY_CAPACITY,
    SEATS_CAPACITY,
    Capacity,
)
from allotment.kube.clients import Api, find
from allotment.kube.errors import ObjectMissingError
from allotment.kube.live import listed
from allotment.kube.objects import Metadata, Narrow
from allotment.kube.resource_claims import (
    API,
    CLAIMS,
    DRIVERS,
    SLICES,
    ClaimObject,
    RequestedDevices,
    Selector,
    Toleration,
)
from allotment.model.errors import QuantityError
from allotment.model.formats import format_bytes, format_percent
from allotment.model.quantities import parse_whole
from allotment.model.structs import replace
from allotment.placement.explain import Reason, Refusal, RefusalGroup, grouped, refuse

_EFFECTS: Final = frozenset(("NoSchedule", "NoExecute"))
_TRUTHS: Final = {"true": True, "false": False}


# ---- what the API server has ---------------------------------------------------------------------


class _Taint(Narrow):
    key: str = ""
    value: str = ""
    effect: str = ""


class _Consumed(Narrow):
    counter_set: str = ""
    counters: dict[str, Capacity] | None = None


class _Device(Narrow):
    name: str = ""
    attributes: dict[str, dict[str, Any]] | None = None
    capacity: dict[str, Capacity] | None = None
    consumes_counters: list[_Consumed] | None = None
    taints: list[_Taint] | None = None
    allow_multiple_allocations: bool | None = None

    def text(self, name: str) -> str:
        """Return an attribute that is a text; empty: it has none."""
        return str((self.attributes or {}).get(name, {}).get("string", ""))


class _CounterSet(Narrow):
    name: str = ""
    counters: dict[str, Capacity] | None = None


class _Pool(Narrow):
    name: str = ""
    generation: int = 0


class _SliceSpec(Narrow):
    driver: str = ""
    pool: _Pool = msgspec.field(default_factory=_Pool)
    devices: list[_Device] | None = None
    shared_counters: list[_CounterSet] | None = None


class SliceObject(Narrow):
    """A ResourceSlice."""

    metadata: Metadata
    spec: _SliceSpec = msgspec.field(default_factory=_SliceSpec)


class _ClassSpec(Narrow):
    selectors: list[Selector] | None = None


class ClassObject(Narrow):
    """A DeviceClass."""

    metadata: Metadata
    spec: _ClassSpec = msgspec.field(default_factory=_ClassSpec)


class ClaimEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What was read."""

    claim: ClaimObject
    claims: Sequence[ClaimObject]
    """All claims of the cluster."""
    slices: Sequence[SliceObject]
    classes: Mapping[str, ClassObject]
    """By name, as far as they exist."""


async def read_claim_evidence(api: Api, namespace: str, name: str) -> ClaimEvidence:
    """Read a claim, and what decides about it. Raises `KubeError`."""
    claims = f"{API}/namespaces/{namespace}/resourceclaims"
    if await find(api, API, _ANY, asked=f"look for {API}") is None:
        raise ObjectMissingError(
            f"the API server has no {API.removeprefix('/apis/')}",
            hint="ResourceClaims need Kubernetes 1.36 or later",
        )
    claim = await find(api, f"{claims}/{name}", _CLAIM, asked=f"read claim {namespace}/{name}")
    if claim is None:
        raise ObjectMissingError(
            f"there is no ResourceClaim {namespace}/{name}",
            hint=f"`kubectl get resourceclaims --namespace {namespace}` lists those there",
        )
    classes = {}
    for wanted in {each.device_class_name for _, each in claim.requests()}:
        path, asked = f"{API}/deviceclasses/{wanted}", f"read device class {wanted}"
        found = await find(api, path, _CLASS, asked=asked)
        if found is not None:
            classes[wanted] = found
    return ClaimEvidence(
        claim=claim,
        claims=await listed(api, CLAIMS, ClaimObject, asked="list resourceclaims"),
        slices=await listed(api, SLICES, SliceObject, asked="list resourceslices"),
        classes=classes,
    )


_ANY: Final = msgspec.json.Decoder(dict[str, Any])
_CLAIM: Final = msgspec.json.Decoder(ClaimObject)
_CLASS: Final = msgspec.json.Decoder(ClassObject)


# ---- the explanation -----------------------------------------------------------------------------


class ClaimState(StrEnum):
    """A claim's progress."""

    PENDING = "pending"
    """No scheduler has allocated it."""
    ALLOCATED = "allocated"
    """It has devices, and no node has reported them as prepared."""
    PREPARED = "prepared"


class ClaimedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """An allocated device."""

    request: str
    driver: str
    node: str
    """The pool: ours has its node's name."""
    device: str
    uuid: str
    """Of the GPU; empty: no slice has the device now."""
    consumed: Mapping[str, str]
    is_admin: bool
    data: Mapping[str, Any]
    """From the claim's status, once it is prepared: share, mode, limits, enforced."""


class ExplainedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request, and where it fits on its own."""

    name: str
    device_class: str
    count: int | None
    """None: all devices that match."""
    amounts: Mapping[str, str]
    selectors: tuple[str, ...] = ()
    fitting: tuple[str, ...] = ()
    """Nodes with enough such devices."""
    refused: tuple[RefusalGroup, ...] = ()
    not_evaluated: tuple[str, ...] = ()
    """CEL expressions that may exclude more."""
    problem: str = ""


class ClaimExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """All facts about a claim."""

    namespace: str
    name: str
    uid: str
    state: ClaimState
    pods: tuple[str, ...] = ()
    """It is reserved for these."""
    devices: tuple[ClaimedDevice, ...] = ()
    requests: tuple[ExplainedRequest, ...] = ()
    fitting: tuple[str, ...] = ()
    """Of a pending claim: nodes where each request fits on its own."""
    has_constraints: bool = False
    """It has constraints between its devices, which are not evaluated."""
    nodes: int = 0
    """Nodes with devices of Allotment."""


def explained_claim(evidence: ClaimEvidence) -> ClaimExplanation:
    """Explain what a claim has, or why it waits."""
    claim = evidence.claim
    pools = _pools(evidence.slices)
    devices = tuple(_claimed(claim, pools))
    is_pending = claim.status is None or claim.status.allocation is None
    requests = []
    for name, asked in claim.requests():
        request = ExplainedRequest(
            name=name,
            device_class=asked.device_class_name,
            count=None if asked.allocation_mode == "All" else asked.count or 1,
            amounts=asked.amounts,
            selectors=tuple(_expressions(asked.selectors)),
        )
        requests.append(_judged(request, asked, evidence, pools) if is_pending else request)
    reserved = (claim.status.reserved_for if claim.status else None) or ()
    is_prepared = bool(devices) and all(each.data or each.is_admin for each in devices)
    state = ClaimState.PREPARED if is_prepared else ClaimState.ALLOCATED
    return ClaimExplanation(
        namespace=claim.metadata.namespace,
        name=claim.metadata.name,
        uid=claim.metadata.uid,
        state=ClaimState.PENDING if is_pending else state,
        pods=tuple(each.name for each in reserved if each.resource == "pods"),
        devices=devices,
        requests=tuple(requests),
        fitting=tuple(_together(requests)) if is_pending else (),
        has_constraints=bool(claim.spec and claim.spec.devices and claim.spec.devices.constraints),
        nodes=len({each.name for each in pools}),
    )


def _together(requests: Sequence[ExplainedRequest]) -> Iterator[str]:
    """Yield the nodes where each request fits, by one of its alternatives."""
    places: dict[str, set[str]] = {}
    for each in requests:
        places.setdefault(each.name.partition("/")[0], set()).update(each.fitting)
    if places:
        yield from sorted(set.intersection(*places.values()))


class _NodePool(msgspec.Struct, frozen=True):
    """The devices of one driver of ours on a node."""

    driver: str
    name: str
    devices: dict[str, _Device]
    counters: dict[str, dict[str, int]]


def _pools(slices: Sequence[SliceObject]) -> Sequence[_NodePool]:
    """Return the pools of our drivers, each of its latest generation."""
    latest: dict[tuple[str, str], int] = {}
    ours = [each.spec for each in slices if each.spec.driver in DRIVERS]
    for spec in ours:
        key = spec.driver, spec.pool.name
        latest[key] = max(latest.get(key, 0), spec.pool.generation)
    pools = {key: _NodePool(*key, {}, {}) for key in sorted(latest)}
    for spec in ours:
        key = spec.driver, spec.pool.name
        if spec.pool.generation != latest[key]:
            continue
        pool = pools[key]
        pool.devices.update({each.name: each for each in spec.devices or ()})
        for each in spec.shared_counters or ():
            pool.counters[each.name] = _numbers(each.counters)
    return tuple(pools.values())


def _numbers(amounts: Mapping[str, Capacity] | None) -> dict[str, int]:
    return {name: _whole(each.value) for name, each in (amounts or {}).items()}


def _whole(text: str) -> int:
    """Return a quantity; one that is no whole number counts as nothing."""
    try:
        return parse_whole(text)
    except QuantityError:
        return 0


def _claimed(claim: ClaimObject, pools: Sequence[_NodePool]) -> Iterator[ClaimedDevice]:
    reported = (claim.status.devices if claim.status else None) or ()
    by_key = {
        (each.get("driver"), each.get("pool"), each.get("device"), each.get("shareID") or None): (
            each.get("data") or {}
        )
        for each in reported
    }
    known = {
        (pool.driver, pool.name, name): device
        for pool in pools
        for name, device in pool.devices.items()
    }
    for each in claim.results():
        device = known.get((each.driver, each.pool, each.device))
        yield ClaimedDevice(
            request=each.request,
            driver=each.driver,
            node=each.pool,
            device=each.device,
            uuid=(device.text("uuid") or device.text("parentUUID")) if device else "",
            consumed=each.consumed_capacity or {},
            is_admin=bool(each.admin_access),
            data=by_key.get((each.driver, each.pool, each.device, each.share_id or None), {}),
        )


# ---- one request ---------------------------------------------------------------------------------


def _judged(
    request: ExplainedRequest,
    asked: RequestedDevices,
    evidence: ClaimEvidence,
    pools: Sequence[_NodePool],
) -> ExplainedRequest:
    """Add where a request fits, and why it does not elsewhere."""
    found = evidence.classes.get(asked.device_class_name)
    if found is None:
        problem = f"there is no device class {asked.device_class_name}"
        return replace(request, problem=problem)
    expressions = [*_expressions(found.spec.selectors), *request.selectors]
    unknown: dict[str, None] = {}
    used = _used(evidence)
    fitting: dict[str, None] = {}
    refused: dict[str, Refusal] = {}
    for pool in pools:
        verdicts = []
        for device in pool.devices.values():
            answers = {
                each: is_selected(each, device.attributes or {}, pool.driver)
                for each in expressions
            }
            if False in answers.values():
                continue
            unknown.update(dict.fromkeys(each for each, it in answers.items() if it is None))
            verdicts.append(_refusal(asked, device, pool, used))
        fits = verdicts.count(None)
        needed = len(verdicts) if request.count is None else request.count
        if verdicts and fits >= needed:
            fitting[pool.name] = None
        elif pool.name not in fitting:
            why = [each for each in verdicts if each is not None]
            refused[pool.name] = _closest(why, fits, needed)
    for name in fitting:
        refused.pop(name, None)
    return replace(
        request,
        fitting=tuple(fitting),
        refused=tuple(grouped(refused)) if refused else (),
        not_evaluated=tuple(unknown),
    )


_NO_DEVICE: Final = refuse(Reason.NO_GPU, "no device that its class and selectors select")
_RANKS: Final = (Reason.PROBLEM, Reason.COMPANY, Reason.GPU_COMPUTE, Reason.GPU_MEMORY)
"""The most telling one about a node comes last."""


def _closest(why: Sequence[Refusal], fits: int, needed: int) -> Refusal:
    if not why:
        return _NO_DEVICE
    if fits:
        return refuse(Reason.TOO_FEW_GPUS, f"need {needed} devices, have {{have}}", fits)
    return max(why, key=lambda each: (_RANKS.index(Reason(each.reason)), each.have))


class _Used(msgspec.Struct, frozen=True):
    """What claims have of one device."""

    claims: list[str]
    consumed: dict[str, int]


_Key = tuple[str, str, str]
"""Driver, pool, device."""


def _used(evidence: ClaimEvidence) -> Mapping[_Key, _Used]:
    used: dict[_Key, _Used] = {}
    for claim in evidence.claims:
        for each in claim.results():
            if each.admin_access:
                continue
            entry = used.setdefault((each.driver, each.pool, each.device), _Used([], {}))
            entry.claims.append(f"{claim.metadata.namespace}/{claim.metadata.name}")
            for name, amount in (each.consumed_capacity or {}).items():
                entry.consumed[name] = entry.consumed.get(name, 0) + _whole(amount)
    return used


def _refusal(
    asked: RequestedDevices, device: _Device, pool: _NodePool, used: Mapping[_Key, _Used]
) -> Refusal | None:
    """Return why a device does not fit; None: it does."""
    refusal = _of_taints(asked, device)
    if refusal is not None or asked.admin_access:
        return refusal
    here = used.get((pool.driver, pool.name, device.name))
    is_shared = bool(device.allow_multiple_allocations)
    if here is not None and not is_shared:
        return refuse(Reason.COMPANY, "devices that other claims have")
    refusals = [None if here is not None else _of_counters(device, pool, used)]
    refusals += [
        _of_capacity(asked, name, amount, here if is_shared else None)
        for name, amount in (device.capacity or {}).items()
    ]
    missing = asked.amounts.keys() - (device.capacity or {}).keys()
    if missing:
        text = f"devices without {' and '.join(sorted(missing))}"
        refusals.append(refuse(Reason.COMPANY, text))
    return next((each for each in refusals if each is not None), None)


def _of_taints(asked: RequestedDevices, device: _Device) -> Refusal | None:
    for taint in device.taints or ():
        tolerated = (_tolerates(each, taint) for each in asked.tolerations or ())
        if taint.effect in _EFFECTS and not any(tolerated):
            return refuse(Reason.PROBLEM, f"devices with the taint {taint.key}={taint.value}")
    return None


def _tolerates(toleration: Toleration, taint: _Taint) -> bool:
    if toleration.effect not in {"", taint.effect} or toleration.key not in {"", taint.key}:
        return False
    return toleration.operator == "Exists" or toleration.value == taint.value


def _of_counters(device: _Device, pool: _NodePool, used: Mapping[_Key, _Used]) -> Refusal | None:
    """Return whether other ways of giving the same GPU are in use."""
    for need in device.consumes_counters or ():
        left = dict(pool.counters.get(need.counter_set, {}))
        for name, other in pool.devices.items():
            if (pool.driver, pool.name, name) not in used:
                continue
            for each in other.consumes_counters or ():
                if each.counter_set == need.counter_set:
                    for counter, amount in _numbers(each.counters).items():
                        left[counter] = left.get(counter, 0) - amount
        if any(amount > left.get(name, 0) for name, amount in _numbers(need.counters).items()):
            return refuse(Reason.COMPANY, "devices of GPUs that claims have in another way")
    return None


def _of_capacity(
    asked: RequestedDevices, name: str, capacity: Capacity, here: _Used | None
) -> Refusal | None:
    text = asked.amounts.get(name)
    try:
        rule = capacity.consumption()
        wanted = None if text is None else parse_whole(text)
    except QuantityError:
        return None  # not checked: of another driver's devices, in fractions
    needed = rule.of(wanted)
    left = rule.total - (here.consumed.get(name, 0) if here is not None else 0)
    if needed is None:
        needed, left = wanted or 0, min(left, rule.most)
    elif needed <= left:
        return None
    if name == MEMORY_CAPACITY:
        stem = f"need {format_bytes(needed)} of memory on a device, have at most {{have}}"
        return refuse(Reason.GPU_MEMORY, stem, max(0, left))
    if name == COMPUTE_CAPACITY:
        stem = (
            f"need {format_percent(needed * 100)} % of compute on a device, have at most {{have}}"
        )
        return refuse(Reason.GPU_COMPUTE, stem, max(0, left) * 100)
    if name == SEATS_CAPACITY:
        return refuse(Reason.COMPANY, "devices that serve no more shares at a time")
    return refuse(Reason.COMPANY, f"devices with less than {text or needed} {name}")


# ---- selectors -----------------------------------------------------------------------------------

_TEXT: Final = r"'(?P<single>[^'\\]*)'|\"(?P<double>[^\"\\]*)\"|(?P<bare>true|false|\d+)"
_TERM: Final = re.compile(
    r"device\.(?:driver|attributes\[(?:'(?P<domain>[^']+)'|\"(?P<other>[^\"]+)\")\]"
    rf"\.(?P<name>\w+))\s*==\s*(?:{_TEXT})"
)


def _expressions(selectors: Sequence[Selector] | None) -> Iterator[str]:
    for each in selectors or ():
        if each.cel is not None:
            yield " ".join(each.cel.get("expression", "").split())


def is_selected(
    expression: str, attributes: Mapping[str, Mapping[str, Any]], driver: str
) -> bool | None:
    """Return whether comparisons with fixed values, joined by `&&`, hold for a device.

    None: it has other terms, and no comparison fails.
    """
    answers = [_holds(each.strip(), attributes, driver) for each in expression.split("&&")]
    return False if False in answers else None if None in answers else True


def _holds(term: str, attributes: Mapping[str, Mapping[str, Any]], driver: str) -> bool | None:
    found = _TERM.fullmatch(term)
    if found is None:
        return None
    bare = found["bare"]
    text = found["single"] if found["single"] is not None else found["double"]
    wanted: object = text if bare is None else _TRUTHS[bare] if bare in _TRUTHS else int(bare)
    if found["name"] is None:
        return driver == wanted
    domain, name = found["domain"] or found["other"], found["name"]
    key = name if domain == driver else f"{domain}/{name}"
    value = attributes.get(key) or attributes.get(f"{domain}/{name}")
    if value is None:
        return False  # an error in CEL: the device is not selected
    (content,) = value.values()
    return bool(content == wanted)

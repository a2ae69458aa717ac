# SPDX-License-Identifier: Apache-2.0
"""kube-scheduler's JSON (k8s.io/kube-scheduler/extender/v1), as Go writes it.

Keys are Go's field names: these types have no tags. Absent fields are null. Node objects are not
decoded beyond their name; their bytes are returned as they came.
"""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import Annotated, Final, NamedTuple, TypeVar

import msgspec

from allotment.kube.objects import PodObject
from allotment.model.errors import UsageError

T = TypeVar("T")


class _Wire(msgspec.Struct, kw_only=True, rename="pascal"):
    """A part of kube-scheduler's JSON."""


class _Items(msgspec.Struct, kw_only=True):
    """A list of nodes; keys of API objects are in camel case."""

    items: list[msgspec.Raw] | None = None


class _Name(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]


class _Named(msgspec.Struct):
    """A node; only its name is read."""

    metadata: _Name


_NULL: Final = msgspec.Raw(b"null")


class _FilterArguments(_Wire):
    """`ExtenderArgs`, of filter and prioritize."""

    pod: PodObject
    nodes: _Items | None = None
    node_names: msgspec.Raw = _NULL
    """An undecoded list of strings: see `NamesAsked`."""


class NamesAsked(AbstractSet[str]):
    """The node names of a request, decoded only for iteration.

    A search in the bytes is faster: node names have no character that JSON escapes, so a quoted
    name is found as it is.
    """

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    @cached_property
    def _names(self) -> dict[str, None]:
        names: list[str] = _read(_names, self.raw, "ExtenderArgs")
        return dict.fromkeys(names)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and b'"%s"' % name.encode() in self.raw

    def __iter__(self) -> Iterator[str]:
        """Raises `UsageError` for anything but a list of names."""
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __bool__(self) -> bool:
        return b'"' in self.raw


class FilterRequest(NamedTuple):
    """A pod, and the nodes that kube-scheduler names, with their objects if sent."""

    pod: PodObject
    nodes: NamesAsked | dict[str, msgspec.Raw]


class FilterResult(_Wire, omit_defaults=True):
    """`ExtenderFilterResult`."""

    nodes: dict[str, list[msgspec.Raw]] | None = None
    node_names: list[str] | None = None
    failed_nodes: dict[str, str] | None = None
    failed_and_unresolvable_nodes: dict[str, str] | None = None
    error: str = ""


class HostPriority(_Wire):
    """A node and its score."""

    host: str
    score: int


class BindingArguments(_Wire):
    """`ExtenderBindingArgs`."""

    pod_name: str
    pod_namespace: str
    pod_uid: str = msgspec.field(name="PodUID")
    node: str


class BindingResult(_Wire):
    """`ExtenderBindingResult`."""

    error: str = ""


class MetaPod(_Wire):
    """A pod by its uid."""

    uid: str = msgspec.field(name="UID")


class MetaVictims(_Wire):
    """The victims on a node, and how many of them violate a budget."""

    pods: list[MetaPod] | None = None
    num_pdb_violations: int | float = msgspec.field(name="NumPDBViolations", default=0)


class Victims(_Wire):
    """The same with whole pods."""

    pods: list[PodObject] | None = None
    num_pdb_violations: int | float = msgspec.field(name="NumPDBViolations", default=0)


class PreemptionArguments(_Wire):
    """`ExtenderPreemptionArgs`."""

    pod: PodObject
    node_name_to_victims: dict[str, Victims] | None = None
    node_name_to_meta_victims: dict[str, MetaVictims] | None = None


class PreemptionResult(_Wire):
    """`ExtenderPreemptionResult`."""

    node_name_to_meta_victims: dict[str, MetaVictims]


encode: Final = msgspec.json.Encoder().encode
_filter: Final = msgspec.json.Decoder(_FilterArguments)
_binding: Final = msgspec.json.Decoder(BindingArguments)
_preemption: Final = msgspec.json.Decoder(PreemptionArguments)
_named: Final = msgspec.json.Decoder(_Named)
_names: Final = msgspec.json.Decoder(list[str])


def read_filter(body: bytes) -> FilterRequest:
    """Read the arguments of filter or prioritize. Raises `UsageError`."""
    arguments = _read(_filter, body, "ExtenderArgs")
    if not arguments.pod.metadata.uid:
        raise UsageError(
            "the pod has no uid", hint="kube-scheduler sends pods as the API server stores them"
        )
    raw = bytes(arguments.node_names)
    if raw != b"null":
        if not raw.startswith(b"["):
            _read(_names, raw, "ExtenderArgs")
        return FilterRequest(arguments.pod, NamesAsked(raw))
    items = arguments.nodes.items if arguments.nodes is not None else None
    nodes = {_read(_named, node, "Node").metadata.name: node for node in items or ()}
    return FilterRequest(arguments.pod, nodes)


def read_binding(body: bytes) -> BindingArguments:
    return _read(_binding, body, "ExtenderBindingArgs")


def read_preemption(body: bytes) -> PreemptionArguments:
    return _read(_preemption, body, "ExtenderPreemptionArgs")


def some_nodes(
    chosen: Iterable[str], asked: NamesAsked | Mapping[str, msgspec.Raw]
) -> FilterResult:
    """Answer with some of the nodes, in the form of the request."""
    if isinstance(asked, NamesAsked):
        return FilterResult(node_names=list(chosen))
    return FilterResult(nodes={"items": [asked[name] for name in chosen]})


def no_nodes(asked: NamesAsked | Mapping[str, msgspec.Raw], why: str) -> FilterResult:
    result = some_nodes((), asked)
    result.failed_and_unresolvable_nodes = dict.fromkeys(asked, why)
    return result


def _read(decoder: "msgspec.json.Decoder[T]", body: bytes | msgspec.Raw, what: str) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise UsageError(
            f"the body is not {what} of kube-scheduler: {error}",
            hint="keys are spelled as in k8s.io/kube-scheduler/extender/v1: Pod, NodeNames, PodUID",
        ) from error

# SPDX-License-Identifier: Apache-2.0
"""kube-scheduler's JSON (k8s.io/kube-scheduler/extender/v1): narrow, and as Go writes it.

Keys are the names of Go's fields: these types have no tags. What is absent arrives as null. Node
objects, which come where an extender has no view of its own, are not decoded: their name is read,
and the bytes are handed back.
"""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import Annotated, Final, TypeVar

import msgspec

from allotment.kube.objects import PodObject
from allotment.model.errors import UsageError

__all__ = [
    "BindingArguments",
    "BindingResult",
    "FilterArguments",
    "FilterResult",
    "HostPriority",
    "MetaPod",
    "MetaVictims",
    "NamesAsked",
    "PreemptionArguments",
    "PreemptionResult",
    "Victims",
    "encode",
    "no_nodes",
    "node_names",
    "read_binding",
    "read_filter",
    "read_preemption",
    "some_nodes",
]

T = TypeVar("T")


class _Wire(msgspec.Struct, kw_only=True, rename="pascal"):
    """A part of kube-scheduler's JSON."""


class _Items(msgspec.Struct, kw_only=True):
    """A list of nodes; keys of API objects are as usual."""

    items: list[msgspec.Raw] | None = None


class _Name(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]


class _Named(msgspec.Struct):
    """A node, of which the name alone counts."""

    metadata: _Name


_NULL: Final = msgspec.Raw(b"null")


class FilterArguments(_Wire):
    """`ExtenderArgs`, of filter and prioritize."""

    pod: PodObject
    nodes: _Items | None = None
    node_names: msgspec.Raw = _NULL
    """A list of text, as it came: `NamesAsked`."""


class NamesAsked(AbstractSet[str]):
    """The names of the nodes that are asked about, read when one has to go through them.

    That takes longer than to look for the few that matter: names of nodes have no character that is
    written in another way in JSON, so that such a name is there where it stands between quotes.
    """

    def __init__(self, raw: bytes) -> None:
        """Take the list as it came."""
        self._raw = raw

    @cached_property
    def _names(self) -> dict[str, None]:
        names: list[str] = _read(_names, self._raw, "ExtenderArgs")
        return dict.fromkeys(names)

    def __contains__(self, name: object) -> bool:
        """Tell whether the node is asked about."""
        return isinstance(name, str) and b'"%s"' % name.encode() in self._raw

    def __iter__(self) -> Iterator[str]:
        """Go through them, as they came. Raises `UsageError` where they are no list of names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._names)

    def __bool__(self) -> bool:
        """Tell whether there is any."""
        return b'"' in self._raw


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
    """Pods of a node that would have to go, and how many of them go against a budget."""

    pods: list[MetaPod] | None = None
    num_pdb_violations: int | float = msgspec.field(name="NumPDBViolations", default=0)


class Victims(_Wire):
    """Likewise, as objects."""

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


_encoder: Final = msgspec.json.Encoder()
_filter: Final = msgspec.json.Decoder(FilterArguments)
_binding: Final = msgspec.json.Decoder(BindingArguments)
_preemption: Final = msgspec.json.Decoder(PreemptionArguments)
_named: Final = msgspec.json.Decoder(_Named)
_names: Final = msgspec.json.Decoder(list[str])


def encode(answer: object) -> bytes:
    """Write an answer."""
    return _encoder.encode(answer)


def read_filter(body: bytes) -> FilterArguments:
    """Read the arguments of filter or prioritize. Raises `UsageError`."""
    return _read(_filter, body, "ExtenderArgs")


def read_binding(body: bytes) -> BindingArguments:
    """Read the arguments of bind. Raises `UsageError`."""
    return _read(_binding, body, "ExtenderBindingArgs")


def read_preemption(body: bytes) -> PreemptionArguments:
    """Read the arguments of preempt. Raises `UsageError`."""
    return _read(_preemption, body, "ExtenderPreemptionArgs")


def node_names(arguments: FilterArguments) -> NamesAsked | dict[str, msgspec.Raw]:
    """Return the nodes that are asked about, each with its object where that came.

    Raises `UsageError` for what is no list, and for an object without a name.
    """
    raw = bytes(arguments.node_names)
    if raw != b"null":
        if not raw.startswith(b"["):
            _read(_names, raw, "ExtenderArgs")
        return NamesAsked(raw)
    items = arguments.nodes.items if arguments.nodes is not None else None
    return {_read(_named, each, "Node").metadata.name: each for each in items or ()}


def some_nodes(
    chosen: Iterable[str], asked: NamesAsked | Mapping[str, msgspec.Raw]
) -> FilterResult:
    """Answer with some of the nodes, in the form in which they came."""
    if isinstance(asked, NamesAsked):
        return FilterResult(node_names=list(chosen))
    return FilterResult(nodes={"items": [asked[name] for name in chosen]})


def no_nodes(asked: NamesAsked | Mapping[str, msgspec.Raw], why: str) -> FilterResult:
    """Answer that none of the nodes will ever do, and why."""
    result = some_nodes((), asked)
    result.failed_and_unresolvable_nodes = dict.fromkeys(asked, why)
    return result


def _read(decoder: "msgspec.json.Decoder[T]", body: bytes | msgspec.Raw, what: str) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise UsageError(
            f"the body is no {what} of kube-scheduler: {error}",
            hint="keys are spelled as in k8s.io/kube-scheduler/extender/v1: Pod, NodeNames, PodUID",
        ) from error

# SPDX-License-Identifier: Apache-2.0
"""Options and value types that several commands share."""

import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from allotment.kube.clients import Api
    from allotment.model.allowances import Allowance
    from allotment.model.compute import Compute

_F = TypeVar("_F", bound=Callable[..., Any])


class ParsedType(click.ParamType[Any]):
    """A value that a function of a module of `allotment.model` parses, imported on use."""

    def __init__(self, name: str, module: str, function: str) -> None:
        self.name = name
        self._module, self._function = module, function

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's signature
        param: click.Parameter | None,
        ctx: click.Context | None,  # noqa: ARG002
    ) -> Any:  # noqa: ANN401
        if not isinstance(value, str):
            return value
        from allotment.model.errors import UsageError

        parse = getattr(import_module(f"allotment.model.{self._module}"), self._function)
        try:
            return parse(value)
        except UsageError as error:
            name = param.opts[-1] if isinstance(param, click.Option) else ""
            raise UsageError(f"{name}: {error}" if name else str(error), hint=error.hint) from error


BYTES = ParsedType("size", "quantities", "parse_bytes")
DURATION_NS = ParsedType("duration", "quantities", "parse_duration_ns")
COMPUTE = ParsedType("compute", "compute", "parse_compute")
MEMORY = ParsedType("size", "quantities", "parse_memory")
WEIGHT = ParsedType("weight", "compute", "parse_weight")


def options(*decorators: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Several options as one decorator; --help lists them in this order."""

    def add(function: _F) -> _F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return add


def complete_share(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001
    """Complete the name of a share; an unreadable state folder completes nothing.

    A shell takes the name as it is. In a folder for all users a record can have any name: one with
    a meaning for the shell is left out.
    """
    import shlex

    from allotment.model.errors import AllotError
    from allotment.shares.folders import StateFolder
    from allotment.shares.recovery import list_shares

    try:
        shares = list_shares(StateFolder.at(ctx.params.get("state")))
    except AllotError:
        return []
    names = (share.name for share in shares if share.name == shlex.quote(share.name))
    return [name for name in names if name.startswith(incomplete) and name[0] != "-"]


def _only_one(
    ctx: click.Context,
    param: click.Parameter,
    value: "tuple[Compute, ...]",
) -> "Compute | None":
    """Refuse a repeated option: click would silently use the last value."""
    if len(value) > 1:
        raise click.UsageError(
            f"{param.opts[0]} is given {len(value)} times; one value applies to all GPUs", ctx
        )
    return value[0] if value else None


def _compute_options(*, kind: str, weight: str) -> Callable[[_F], _F]:
    """The options; `kind` and `weight` end their help texts."""
    return options(
        click.option(
            "--compute",
            metavar="PERCENT[:PERCENT]",
            type=COMPUTE,
            multiple=True,  # so that `_only_one` sees a repetition
            callback=_only_one,
            help="Percent of each GPU's compute. 30: guarantee and ceiling. 30:80: guarantee 30,"
            " ceiling 80. 0:100: no guarantee, only time that others leave. :80: the same, up to"
            " 80.",
        ),
        click.option(
            "--class",
            "kind",
            type=click.Choice(["latency", "normal", "besteffort"]),
            help="Priority: latency runs as soon as another share's kernel ends; besteffort gets"
            " only the time that all others leave." + kind,
        ),
        click.option(
            "--weight",
            metavar="N",
            type=WEIGHT,
            help="Relative weight for sharing spare time: 1 to 10000." + weight,
        ),
    )


compute_options = _compute_options(kind="  [default: normal]", weight="  [default: 100]")
changed_compute_options = _compute_options(kind="", weight="")
"""The same options without defaults: an omitted option keeps its value."""


def requested_compute(compute: "Compute | None", kind: str | None, weight: int | None) -> "Compute":
    from allotment.model.compute import Compute, ComputeClass, revised

    asked = ComputeClass(kind) if kind else None
    return revised(Compute(), compute=compute, kind=asked, weight=weight)


def allowance_of_user(user: str | None = None) -> "Allowance | None":
    """Return what a user may have on this machine; None: the machine has no configuration.

    `user` is of `--user`; None: this process's.
    """
    from allotment.shares.folders import CONFIG_FILE

    if not os.path.exists(CONFIG_FILE):  # noqa: PTH110 - start-up time
        return None
    from allotment.shares.allowances import allowance_of
    from allotment.shares.run.child_process import find_user

    return allowance_of(find_user(user).pw_uid if user else os.geteuid())


def allowance_in(
    state: Path | None, simulated: str | None, user: str | None = None
) -> "Allowance | None":
    """Return what a user may have in a new share; raise `StateError` for a folder of its own."""
    allowance = allowance_of_user(user)
    if allowance is not None:
        from allotment.shares.allowances import check_folder
        from allotment.shares.folders import StateFolder

        check_folder(allowance, StateFolder.at(state), is_simulated=bool(simulated))
    return allowance


host_memory_option = click.option(
    "--host-memory",
    type=BYTES,
    envvar="ALLOTMENT_HOST_MEMORY",
    help="Host memory that all shares together may use in place of GPU memory [env:"
    " ALLOTMENT_HOST_MEMORY; default: half of the machine's].",
)
oversubscribe_options = options(
    click.option(
        "--oversubscribe",
        is_flag=True,
        help="Memory of the share may move to the host while its programs do not compute. The"
        " limits of a GPU's shares may then exceed its memory.",
    ),
    host_memory_option,
)
count_option = click.option(
    "--count",
    metavar="N",
    type=click.IntRange(1, 16),
    default=1,
    help="Number of different GPUs.",
)
kubeconfig_option = click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="KUBECONFIG",
    help="Kubeconfig for the API server.  [env: KUBECONFIG; default: the pod's service account]",
)
log_options = options(
    click.option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        help="Format of the log on standard error.",
    ),
    click.option("--verbose", "-v", is_flag=True, help="Log every step."),
)
otlp_option = click.option(
    "--otlp-endpoint",
    metavar="URL",
    help="Collector for traces of pods' starts, by OTLP over HTTP: http://collector:4318."
    " OpenTelemetry's variables are honoured.  [env: OTEL_EXPORTER_OTLP_ENDPOINT; default: no"
    " traces]",
)
cdi_dir_option = click.option(
    "--cdi-dir",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("/var/run/cdi"),
    help="Folder of CDI specs that the container runtime reads.",
)
kubelet_socket_option = click.option(
    "--kubelet-socket",
    metavar="PATH",
    type=click.Path(path_type=Path),
    default=Path("/var/lib/kubelet/device-plugins/kubelet.sock"),
    envvar="KUBELET_SOCKET",
    help="Registration socket of the kubelet; the plugins' sockets are created beside it."
    "  [env: KUBELET_SOCKET]",
)
state_option = click.option(
    "--state",
    metavar="DIR",
    type=click.Path(path_type=Path),
    envvar="ALLOTMENT_STATE",
    help="State folder [env: ALLOTMENT_STATE; default: /run/allotment, or a user's folder].",
)
simulated_option = click.option(
    "--simulated",
    metavar="SPEC",
    envvar="ALLOTMENT_SIMULATED",
    help="Simulated GPUs, like a100-80gb:2,t4, or a YAML file [env: ALLOTMENT_SIMULATED].",
)


@contextmanager
def installed(command: str, *, extra: str) -> Iterator[None]:
    """Import optional dependencies; a missing one becomes a `PrerequisiteError` with the fix.

    A missing module of Allotment itself stays a `ModuleNotFoundError`.
    """
    try:
        with _without_rich():
            yield
    except ModuleNotFoundError as error:
        from allotment.model.errors import PrerequisiteError

        if (error.name or "").startswith("allotment"):
            raise
        raise PrerequisiteError(
            f"`{command}` needs {error.name}, which is not installed",
            hint=f"install Allotment with them, from its wheel: pip install 'WHEEL[{extra}]'",
        ) from error


@contextmanager
def _without_rich() -> Iterator[None]:
    """Import as if rich were not installed, unless it is loaded; later imports find it.

    structlog loads it for tracebacks that no daemon prints: 5 MiB of memory.
    """
    name = "rich"
    if is_absent := name not in sys.modules:
        sys.modules[name] = None  # type: ignore[assignment] # as the import system documents it
    try:
        yield
    finally:
        if is_absent:
            del sys.modules[name]


TABLES: Final = ("table", "wide")


def output_option(*kinds: str) -> Callable[[_F], _F]:
    """Add `-o/--output`; the first kind is the default."""
    words = "Format; JSON and YAML are stable (docs/reference/json.md)."
    if "yaml" not in kinds:
        words = "Format; JSON is stable."
    if "wide" in kinds:
        words += " wide: the whole table on any terminal, with whole UUIDs."
    if "name" in kinds:
        words += " name: names alone."
    return click.option("-o", "--output", type=click.Choice(kinds), default=kinds[0], help=words)


def usual_kubeconfig() -> Path | None:
    """Return the file that kubectl would read; None: in a pod, or if there is no such file.

    Of several files in `KUBECONFIG`, which kubectl merges, the first existing one.
    """
    named = [Path(path) for path in os.environ.get("KUBECONFIG", "").split(os.pathsep) if path]
    if named:
        return next((path for path in named if path.exists()), named[0])
    usual = Path.home() / ".kube" / "config"
    return usual if "KUBERNETES_SERVICE_HOST" not in os.environ and usual.exists() else None


# ---- commands that read a cluster ----------------------------------------------------------------

_NAME: Final = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_SPACE: Final = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"


cluster_options = options(
    click.option(
        "--kubeconfig",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Kubeconfig for the API server.  [default: $KUBECONFIG, or the pod's service"
        " account, or ~/.kube/config]",
    ),
    click.option(
        "--context",
        metavar="NAME",
        help="Context of the kubeconfig.  [default: the current one]",
    ),
)
"""The options that say which cluster."""
of_cluster = options(
    click.option(
        *("--namespace", "-n"),
        metavar="NAMESPACE",
        help="Namespace, if the name has none.  [default: the context's]",
    ),
    cluster_options,
)
"""The same, and the namespace of an object."""
system_namespace_option = click.option(
    "--system-namespace",
    metavar="NAMESPACE",
    default="allotment-system",
    help="Namespace of the agents and the scheduler.",
)


def is_kubectl() -> bool:
    """Return whether this is `kubectl allot`: what it names is in a cluster."""
    return Path(sys.argv[0]).name.startswith("kubectl")


def cluster_option(thing: str) -> Callable[[_F], _F]:
    """Add --cluster: the command is about the cluster, not about this machine."""
    return click.option(
        "--cluster",
        "is_cluster",
        is_flag=True,
        help=f"{thing} `kubectl allot` always means the cluster.",
    )


def pod_names(text: str, namespace: str | None, *, kind: str = "pod") -> tuple[str, str]:
    """Return the namespace (empty: the context's) and the name. Raises `UsageError`."""
    import re

    from allotment.model.errors import UsageError

    space, slash, name = text.rpartition("/")
    if namespace is not None:
        if slash and space != namespace:
            raise UsageError(
                f"{text!r} is in namespace {space!r}, but --namespace is {namespace!r}",
                hint="give the namespace once",
            )
        space, slash = namespace, "/"
    if not re.fullmatch(_NAME, name) or (slash and not re.fullmatch(_SPACE, space)):
        raise UsageError(
            f"{text!r} is not a {kind} name",
            hint=f"write NAMESPACE/NAME, for example: allot explain {kind} ml/train",
        )
    return space, name


_Evidence = TypeVar("_Evidence")


def read_of_cluster(
    kubeconfig: Path | None,
    context: str | None,
    read: "Callable[[Api], Awaitable[_Evidence]]",
    *,
    rights: str,
    check: str,
) -> _Evidence:
    """Read from the API server, with hints for a command in place of a daemon."""
    import asyncio

    from allotment.kube.clients import connect
    from allotment.kube.errors import DeniedError, ObjectMissingError, UnreachableError
    from allotment.model.errors import NotFoundError

    found: list[_Evidence] = []

    async def connected() -> None:
        async with connect(kubeconfig or usual_kubeconfig(), context=context) as api:
            # Not returned: `asyncio.run` formats a task with its whole result as a text, for an
            # error message of `signal.signal` that nobody sees. A large cluster takes a second.
            found.append(await read(api))

    try:
        with _without_collection():
            asyncio.run(connected())
    except ObjectMissingError as error:
        raise NotFoundError(error.message, hint=error.hint) from error
    except UnreachableError as error:
        hint = "check that `kubectl get nodes` works with this kubeconfig"
        raise UnreachableError(error.message, hint=hint) from error
    except DeniedError as error:
        rule = lacking(error.message) or f"check: kubectl auth can-i {check}"
        hint = f"this needs the rights to {rights}; {rule}"
        raise DeniedError(error.message, hint=hint, status=error.status) from error
    return found[0]


@contextmanager
def _without_collection() -> Iterator[None]:
    """Collect no garbage: all that is read stays, and looking through it takes a fifth of the time.

    What was read is not looked through later either.
    """
    import gc

    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


_FORBIDDEN: Final = (
    r'cannot (?P<verb>[a-z]+) resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]+)")?'
)


def lacking(message: str) -> str | None:
    """Return the RBAC rule that a refusal of the API server asks for; None: it is no refusal."""
    import re

    found = re.search(_FORBIDDEN, message)
    if found is None:
        return None
    space = found["namespace"]
    kind = f"Role in namespace {space}" if space else "ClusterRole"
    rule = f'apiGroups: ["{found["group"]}"], resources: [{found["resource"]}]'
    return f"add this rule to a {kind} of this user: {{{rule}, verbs: [{found['verb']}]}}"

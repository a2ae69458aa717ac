# SPDX-License-Identifier: Apache-2.0
"""The cluster: its parts in order, whole or not at all.

with Cluster() as cluster:
    cluster.api.items("/api/v1/nodes")
    cluster.node.run(["ls", "/var/run/cdi"])
    cluster.restart("kubelet", signal.SIGKILL)
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from podresources import POD_RESOURCES_SOCKET, PodResources

from allotment.agent.configuring import PLUGIN_FOLDER
from allotment.agent.plugin.front import OFFER
from allotment.model.errors import StateError
from testbed import control_plane, dns, fakes, images, node, proxy
from testbed.api import Api, ApiError, Json
from testbed.build import CACHE, ROOT, build
from testbed.certificates import SERVICE_ADDRESS, Credentials, make_credentials
from testbed.components import Component
from testbed.node import NodeSettings
from testbed.sandbox import Process, Sandbox, processes_of, remove_stale_control_groups
from testbed.waiting import PATIENCE_S, TestbedError, tail, wait_until

__all__ = ["Cluster", "NodeSettings"]

# In order of dependence.
_CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager")
_NODE = ("containerd", "kubelet")
_MANIFEST = ROOT / "deploy" / "manifests" / "agent.yaml"

DESCRIPTION = "cluster.json"
"""In the state folder of a cluster that `python -m testbed up` holds: what others need to know."""

POD = "pod.yaml"
"""There as well: a pod to try."""

# All of a state folder but its logs. By name: it may be anybody's folder.
_OF_ONE_RUN = (
    *("etcd", "containerd", "kubelet", "credentials", "volume-plugins", "dns", "helm"),
    *("kubelet.json", POD, DESCRIPTION),
)


class Cluster:
    """A Kubernetes of its own on this machine, from `start` to `stop`. A context manager.

    Args:
        state: Its folder; a fresh one under the machine's folder for temporary files if not given,
            which goes with the cluster.
        settings: The node; None for a control plane without kubelet and containerd, where
            `add_fake_nodes` makes nodes for a scheduler to choose from.
        scheduler_config: A KubeSchedulerConfiguration in YAML; `{kubeconfig}` in it is replaced.
        feature_gates: `Name=true,...` for every component.
        api_server_flags: More flags of kube-apiserver.
        keep_state: Whether a folder that was not given outlives the cluster, for its logs.
    """

    def __init__(
        self,
        *,
        state: Path | None = None,
        settings: NodeSettings | None = NodeSettings(),  # noqa: B008 - frozen
        scheduler_config: str | None = None,
        feature_gates: str = "",
        api_server_flags: tuple[str, ...] = (),
        keep_state: bool = False,
    ) -> None:
        self._is_temporary = state is None and not keep_state
        self.state = Path(state or tempfile.mkdtemp(prefix="testbed-")).absolute()
        self.settings = settings
        self.binaries = build()
        self._scheduler_config = scheduler_config
        self._feature_gates = feature_gates
        self._api_server_flags = api_server_flags
        self._sandbox = Sandbox(self.state, hostname=settings.name if settings else "control-plane")
        self._components: dict[str, Component] = {}
        self._credentials: Credentials | None = None
        self._apis: dict[str, Api] = {}

    # ---- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop_all()

    def start_all(self) -> None:
        """Starts everything; returns when the node is Ready and pods can be created.

        Raises:
            TestbedError: a part did not come up; with its log's tail. Nothing is left running.
        """
        self.state.mkdir(parents=True, exist_ok=True)
        self.clean_up(self.state)
        try:
            self._sandbox.start()
            self._start_components()
            self._wait_usable()
        except BaseException:
            self.stop_all()
            raise

    def stop_all(self) -> None:
        """Ends everything: processes, mounts, interfaces, control groups. Repeatable."""
        for api in self._apis.values():
            api.close()
        self._sandbox.stop()
        self._components.clear()
        if self._is_temporary:
            shutil.rmtree(self.state, ignore_errors=True)
            return
        # The logs are for whoever looks into what happened; the rest is only large.
        self.clean_up(self.state)

    def _start_components(self) -> None:
        link = self._sandbox.link
        name = self.settings.name if self.settings else "none"
        self._credentials = make_credentials(
            self.state / "credentials", address=link.inner, node=name
        )
        plan = self._plan()
        node.prepare_network(self._sandbox, SERVICE_ADDRESS)
        self._add(control_plane.etcd(plan)).launch()
        if self.settings is not None:
            # Needs no API server: its images are unpacked while that one comes up.
            self._add(node.containerd(plan, self.settings)).launch()
        self._components["etcd"].wait_ready()
        self._add(control_plane.api_server(plan)).launch()
        if self.settings is not None:
            self._components["containerd"].wait_ready()
            node.import_images(plan, images.build_images())
        self._components["kube-apiserver"].wait_ready()
        self._add(control_plane.scheduler(plan)).launch()
        self._add(control_plane.controller_manager(plan)).launch()
        if self.settings is not None:
            self._add(node.kubelet(plan, self.settings)).launch()
        for component in self._components.values():
            component.wait_ready()

    def _plan(self) -> control_plane.Plan:
        return control_plane.Plan(
            binaries=self.binaries,
            sandbox=self._sandbox,
            credentials=self.credentials,
            has_fake_nodes=self.settings is None,
            scheduler_config=self._scheduler_config,
            feature_gates=self._feature_gates,
            api_server_flags=self._api_server_flags,
        )

    def _add(self, component: Component) -> Component:
        self._components[component.name] = component
        return component

    def _wait_usable(self) -> None:
        if self.settings is not None:
            self.wait_node_ready()
        # Pods are refused until their namespace has its service account.
        self.wait_namespace("default")

    def wait_node_ready(self, *, timeout_s: float = PATIENCE_S) -> Json:
        """Waits until the node is Ready and untainted, and returns it."""

        def ready() -> Json | None:
            found = self.api.find(self.node_path)
            if found is None or found["spec"].get("taints"):
                return None
            conditions = found.get("status", {}).get("conditions", ())
            states = {each["type"]: each["status"] for each in conditions}
            return found if states.get("Ready") == "True" else None

        return wait_until(
            ready, "Ready node", timeout_s=timeout_s, explain=lambda: tail(self.log("kubelet"))
        )

    def wait_namespace(self, name: str, *, timeout_s: float = PATIENCE_S) -> None:
        """Waits until pods can be created in a namespace."""
        path = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        wait_until(
            lambda: self.api.find(path),
            f"service account of namespace {name}",
            timeout_s=timeout_s,
            explain=lambda: tail(self.log("kube-controller-manager")),
        )

    # ---- access ----------------------------------------------------------------------------------

    @property
    def credentials(self) -> Credentials:
        """Keys and kubeconfigs."""
        if self._credentials is None:
            raise TestbedError("the cluster is not running")
        return self._credentials

    @property
    def kubeconfig(self) -> Path:
        """The administrator's; it works on the machine and on the node."""
        return self.credentials.kubeconfig("admin")

    @property
    def kubectl(self) -> Path:
        """The program; give it `--kubeconfig`."""
        return self.binaries / "kubectl"

    @property
    def address(self) -> str:
        """Where the API server and the node's ports are."""
        return self._sandbox.link.inner

    @property
    def api(self) -> Api:
        """The API with every right."""
        return self.api_as("admin")

    def api_as(self, user: str) -> Api:
        """The API as one of `certificates.users`."""
        if user not in self._apis:
            self._apis[user] = Api(self.credentials.kubeconfig(user))
        return self._apis[user]

    @property
    def node(self) -> Sandbox:
        """Where programs of the node run: `node.run([...])`, `node.popen`, `node.path`."""
        return self._sandbox

    @property
    def node_name(self) -> str:
        """The real node's."""
        if self.settings is None:
            raise TestbedError("this cluster has no real node")
        return self.settings.name

    @property
    def node_path(self) -> str:
        """The real node in the API."""
        return f"/api/v1/nodes/{self.node_name}"

    # ---- components ------------------------------------------------------------------------------

    @property
    def components(self) -> Mapping[str, Component]:
        """By name, as of their programs: `etcd`, `kube-apiserver`, `containerd`, `kubelet`..."""
        return self._components

    def stop(self, component: str, number: int = signal.SIGTERM) -> None:
        """Ends one component by a signal and waits for its end."""
        self._components[component].stop(number=number)

    def start(self, component: str) -> None:
        """Starts one that was stopped and waits until it answers."""
        self._components[component].start()

    def restart(self, component: str, number: int = signal.SIGTERM) -> None:
        """Ends one by a signal, starts it again and waits until it answers."""
        self._components[component].restart(number=number)

    def configure_scheduler(self, config: str | None) -> None:
        """Starts kube-scheduler again with another configuration; None: with Kubernetes' own."""
        self._scheduler_config = config
        self.stop("kube-scheduler")
        self._add(control_plane.scheduler(self._plan())).start()

    @contextmanager
    def without(self, component: str, number: int = signal.SIGTERM) -> Iterator[None]:
        """Stops one for the length of a `with`."""
        self.stop(component, number)
        try:
            yield
        finally:
            self.start(component)

    def reboot_node(self, at_boot: Callable[[], object] = lambda: None) -> None:
        """What a reboot of the node comes to; returns when it is Ready again.

        `at_boot` starts what the node's services are to start before the kubelet.
        Every process but the control plane's ends at once, and /run is empty. Disks and the API
        keep what they have.
        """
        keep = {self.node.pid, *(self._components[name].process.pid for name in _CONTROL_PLANE)}
        for name in reversed(_NODE):
            self.stop(name, signal.SIGKILL)
        wait_until(lambda: not _kill(processes_of(self.node.pid) - keep), "end of the node")
        node.forget_boot(self.node)
        at_boot()
        for name in _NODE:
            self.start(name)
        self.wait_node_ready()

    def log(self, component: str) -> Path:
        """What a component wrote."""
        return self.state / "logs" / f"{component}.log"

    def start_proxy(self) -> None:
        """Starts kube-proxy, which most tests do without: Services lead to their pods then."""
        proxy.tell_of_api_server(self.api, self.address)
        self._add(proxy.kube_proxy(self._plan(), node=self.node_name)).start()

    def start_dns(self) -> None:
        """Starts the server of Services' names, which most tests do without."""
        self._add(dns.dnsmasq(self._plan())).start()
        self.name_services()

    def name_services(self) -> None:
        """Lets pods find the Services that are there now by their names."""
        dns.name_services(self.api, self.state)

    def import_image(self, image: Path) -> None:
        """Makes one more image known to the node's containerd."""
        node.import_images(self._plan(), [image])

    def helm(self, *arguments: str, timeout_s: float = 120) -> str:
        """Runs helm as the administrator and returns its standard output.

        Raises:
            TestbedError: it failed; with what it said.
        """
        command = [str(self.binaries / "helm"), "--kubeconfig", str(self.kubeconfig), *arguments]
        # No settings, caches or plugins of this machine's user.
        own = {"HOME": str(self.state / "helm")}
        return self.node.run(command, environment=own, timeout_s=timeout_s).stdout

    # ---- what runs on it -------------------------------------------------------------------------

    def make_namespace(self, name: str) -> str:
        """Makes a namespace and waits until pods can be created in it; its name."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        self.api.post("/api/v1/namespaces", body)
        self.wait_namespace(name)
        return name

    def add_fake_nodes(
        self,
        count: int,
        *,
        capacity: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        prefix: str = "fake",
    ) -> list[str]:
        """Makes nodes that are Ready for ever and run nothing; their names.

        Raises:
            TestbedError: this cluster has a kubelet, and so controllers that miss the others'.
        """
        if self.settings is not None:
            raise TestbedError(
                "fake nodes want a cluster without a kubelet: Cluster(settings=None)"
            )
        return fakes.add_nodes(
            self.api, count, capacity=capacity or {}, labels=labels or {}, prefix=prefix
        )

    def kubectl_run(self, *arguments: str, timeout_s: float = 60) -> str:
        """Runs kubectl as the administrator and returns its standard output.

        Raises:
            TestbedError: it failed; with what it said.
        """
        command = [str(self.kubectl), "--kubeconfig", str(self.kubeconfig), *arguments]
        return self.node.run(command, timeout_s=timeout_s).stdout

    def allow_agent(self) -> None:
        """Gives the user `agent` what the project's manifest gives the agent's service account.

        Raises:
            TestbedError: the manifest has no role for it.
        """
        from testbed import roles

        roles.bind_agent(self.api, _MANIFEST)

    def apply_config(self) -> str:
        """Makes the project's manifest's ConfigMap, after `allow_agent`; its NAMESPACE/NAME.

        Raises:
            TestbedError: the manifest has none.
        """
        from testbed import roles

        return roles.apply_config(self.api, _MANIFEST)

    def start_agent(
        self,
        *flags: str,
        simulated: str = "a100-80gb:2",
        environment: Mapping[str, str] | None = None,
        log: str = "agent",
    ) -> Process:
        """Starts `allot agent` of this working tree on the node, as the user `agent`."""
        command = [
            *(sys.executable, "-m", "allotment", "agent"),
            *("--node-name", self.node_name),
            *("--kubeconfig", str(self.credentials.kubeconfig("agent"))),
            *(["--simulated", simulated] if simulated else []),
            *flags,
        ]
        return self._start(command, log, environment)

    def start_front(self, *, environment: Mapping[str, str] | None = None) -> Process:
        """Starts `allot front`, as a service of the node."""
        return self._start([sys.executable, "-m", "allotment", "front"], "front", environment)

    def _start(
        self, command: list[str], log: str, environment: Mapping[str, str] | None = None
    ) -> Process:
        with self.log(log).open("a", encoding="utf-8") as file:
            return self.node.popen(
                command, environment=environment, folder=Path("/"), stdout=file, stderr=file
            )

    def wait_allocatable(
        self, resource: str, amount: int | str | None = None, *, timeout_s: float = PATIENCE_S
    ) -> str:
        """Waits until the node offers this much of a resource (any but 0 if not given)."""

        def offered() -> str | None:
            value = self._allocatable().get(resource, "0")
            matches = value != "0" if amount is None else value == str(amount)
            if not matches:
                self._report_devices()
            return value if matches else None

        return wait_until(
            offered,
            f"{resource}{'' if amount is None else f' = {amount}'} on {self.node_name}",
            timeout_s=timeout_s,
            explain=self._explain_resources,
        )

    def _allocatable(self) -> dict[str, str]:
        status = self.api.get(self.node_path)["status"]
        return {name: str(value) for name, value in status.get("allocatable", {}).items()}

    def _report_devices(self) -> None:
        """Writes into the node's status how many devices the kubelet has to give out.

        The kubelet writes the same within its ten seconds, which tests would only wait for. Its own
        report is seen by `test_the_node_follows_what_is_offered`.
        """
        try:
            with PodResources(self.node.path(POD_RESOURCES_SOCKET)) as kubelet:
                devices = kubelet.allocatable()
        except StateError:  # it is away, and says it itself when it is back
            return
        told = {name: value for name, value in self._allocatable().items() if _is_devices(name)}
        known = dict.fromkeys(told, "0") | {
            name: str(count) for name, count in devices.items() if _is_devices(name)
        }
        if known != told:
            self._write_allocatable(known)

    def _write_allocatable(self, amounts: Mapping[str, str]) -> None:
        self.api.patch(f"{self.node_path}/status", {"status": {"allocatable": dict(amounts)}})

    def _explain_resources(self) -> str:
        try:
            status = self.api.get(self.node_path)["status"]
            has = json.dumps(status.get("allocatable"))
        except (ApiError, OSError) as error:
            has = str(error)
        return f"allocatable: {has}\n{tail(self.log('agent'))}"

    def wait_agent(self, agent: Process, *, timeout_s: float = PATIENCE_S) -> None:
        """Waits until the agent has some resource taken on by the kubelet.

        Raises:
            TestbedError: it ended, or in time it has not; with its log's tail.
        """

        def offers() -> bool:
            if not agent.is_running:
                raise TestbedError(f"the agent ended with {agent.wait(1)}")
            has = self._allocatable().items()
            is_offered = any(value != "0" for name, value in has if _is_devices(name))
            if not is_offered:
                self._report_devices()
            return is_offered

        try:
            wait_until(offers, "resources of the agent", timeout_s=timeout_s)
        except TestbedError as error:
            raise TestbedError(f"{error}\n{self._explain_resources()}") from None

    def stop_agent(self, agent: Process) -> None:
        """Ends the agent and forgets what it kept: the next one finds a fresh node."""
        agent.stop()
        self.forget_agent()

    @property
    def front_pid(self) -> int | None:
        """The process of the agent's that the kubelet knows, seen from the node; None: none."""
        try:
            found = self.node.path("/run/allotment/front.json").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        pid = int(json.loads(found)["pid"])
        return pid if self.node.path(f"/proc/{pid}").exists() else None

    def end_front(self, number: int = signal.SIGTERM) -> None:
        """Ends the front, which outlives its agent, and waits for its end."""
        pid = self.front_pid
        if pid is not None:
            self.node.run(["kill", f"-{int(number)}", str(pid)], check=False)
            wait_until(lambda: self.front_pid != pid, "end of the front", every_s=0.02)

    def forget_agent(self) -> None:
        """Lets the node offer nothing of an agent that has ended; removes what it kept."""
        self.end_front()
        # As the kubelet will within ten seconds.
        self._write_allocatable({name: "0" for name in self._allocatable() if _is_devices(name)})
        self._remove_agents_files()

    def _remove_agents_files(self) -> None:
        self.node.path(PLUGIN_FOLDER / OFFER).unlink(missing_ok=True)
        for folder in ("/run/allotment", "/run/cdi"):
            inside = self.node.path(folder)
            for entry in inside.iterdir() if inside.is_dir() else ():
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)

    # ---- a cluster that another process holds ----------------------------------------------------

    @staticmethod
    def clean_up(state: Path) -> None:
        """Removes what is left of a cluster, also of one whose holder was killed: all but its logs.

        Processes, mounts and interfaces go with the holder; the control groups of earlier
        sandboxes are removed by whoever comes next.
        """
        remove_stale_control_groups()
        for path in (state / name for name in _OF_ONE_RUN):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def describe(self) -> Json:
        """What `down` and people need to know of a running cluster."""
        return {
            "pid": os.getpid(),
            "first_process": self._sandbox.pid,
            "interface": self._sandbox.link.name,
            "address": self.address,
            "kubeconfig": str(self.kubeconfig),
            "kubectl": str(self.kubectl),
        }


def _kill(pids: set[int]) -> set[int]:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids


def _is_devices(resource: str) -> bool:
    """Whether a resource is a device plugin's, and no quantity that is patched into the status."""
    if resource in {"allotment.dev/gpu-memory", "allotment.dev/gpu-compute"}:
        return False
    return resource.startswith(("nvidia.com/", "allotment.dev/", "tests.allotment.dev/"))


def default_state() -> Path:
    """Where `python -m testbed up` keeps its cluster."""
    return CACHE / "state"

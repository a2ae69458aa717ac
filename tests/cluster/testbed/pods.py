# SPDX-License-Identifier: Apache-2.0
"""Pods as tests write them: make one, wait for what becomes of it, read what it said."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from testbed.api import ApiError, Json
from testbed.cluster import Cluster
from testbed.images import TOOLS
from testbed.waiting import PATIENCE_S, TestbedError, wait_until

ALLOTMENT = "allotment.dev"


def container(
    command: Sequence[str],
    *,
    name: str = "main",
    image: str = TOOLS,
    limits: Mapping[str, str | int] | None = None,
    environment: Mapping[str, str] | None = None,
    **fields: Any,  # noqa: ANN401 - any other field of a container, as the API spells it
) -> Json:
    """A container of an image of the testbed: `container(["allot", "burn"], limits={...})`."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "Never",
        "command": list(command),
        "resources": {"limits": {key: str(value) for key, value in (limits or {}).items()}},
        "env": [{"name": key, "value": value} for key, value in (environment or {}).items()],
        **fields,
    }


def pod(
    name: str,
    *containers: Json,
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    restart: str = "Never",
    **fields: Any,  # noqa: ANN401 - any other field of a pod's spec, as the API spells it
) -> Json:
    """A pod that ends within a second of being deleted."""
    metadata = {"name": name, "annotations": dict(annotations or {}), "labels": dict(labels or {})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            "restartPolicy": restart,
            "terminationGracePeriodSeconds": 1,
            # Nothing here speaks to the API server, and each token is another mount.
            "automountServiceAccountToken": False,
            "containers": list(containers),
            **fields,
        },
    }


class Pods:
    """The pods of one namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self._path = f"/api/v1/namespaces/{namespace}/pods"

    def create(self, body: Json) -> Json:
        """Creates a pod from its description, as of `pod()`, and returns it."""
        return self.cluster.api.post(self._path, body)

    def get(self, name: str) -> Json:
        """The pod as the API has it."""
        return self.cluster.api.get(f"{self._path}/{name}")

    def names(self) -> list[str]:
        """Of all pods that are there."""
        return [item["metadata"]["name"] for item in self.cluster.api.items(self._path)]

    def wait(
        self,
        name: str,
        condition: Callable[[Json], Any],
        what: str,
        *,
        timeout_s: float = PATIENCE_S,
    ) -> Json:
        """Waits until `condition` holds for the pod and returns the pod.

        Raises:
            TestbedError: in time it does not; with the pod's state and events.
        """

        def check() -> Json | None:
            found = self.get(name)
            return found if condition(found) else None

        return wait_until(
            check, f"{what} of pod {name}", timeout_s=timeout_s, explain=lambda: self.explain(name)
        )

    def wait_phase(self, name: str, *phases: str, timeout_s: float = PATIENCE_S) -> Json:
        """Waits for one of these phases. Where it ends in another, that is said at once."""

        def check(found: Json) -> bool:
            phase = found["status"]["phase"]
            if phase in {"Succeeded", "Failed"} and phase not in phases:
                raise TestbedError(f"pod {name} is {phase}\n{self.explain(name)}")
            return phase in phases

        return self.wait(name, check, f"phase {' or '.join(phases)}", timeout_s=timeout_s)

    def wait_ready(self, name: str, *, timeout_s: float = PATIENCE_S) -> Json:
        """Waits until all of its containers run."""

        def check(found: Json) -> bool:
            conditions = found["status"].get("conditions", ())
            return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

        return self.wait(name, check, "readiness", timeout_s=timeout_s)

    def wait_waiting(self, name: str, reason: str, *, timeout_s: float = PATIENCE_S) -> str:
        """Waits until a container waits for this reason, as CreateContainerConfigError; why."""

        def waiting(found: Json) -> str | None:
            states = self._statuses(found)
            for state in (status.get("state", {}).get("waiting") for status in states):
                if state and state.get("reason") == reason:
                    return str(state.get("message", "")) or reason
            return None

        return str(waiting(self.wait(name, waiting, f"reason {reason}", timeout_s=timeout_s)))

    def restarts(self, name: str, container_name: str = "main") -> int:
        """How often a container was started again."""
        for status in self._statuses(self.get(name)):
            if status["name"] == container_name:
                return int(status["restartCount"])
        return 0

    def wait_restarted(
        self,
        name: str,
        *,
        more_than: int = 0,
        container_name: str = "main",
        timeout_s: float = PATIENCE_S,
    ) -> None:
        """Waits until a container was started again and runs."""

        def check(found: Json) -> bool:
            for status in self._statuses(found):
                if status["name"] == container_name:
                    return status["restartCount"] > more_than and "running" in status["state"]
            return False

        self.wait(name, check, "restart", timeout_s=timeout_s)

    def logs(self, name: str, container_name: str = "main", *, previous: bool = False) -> str:
        """What a container wrote; of its run before the last restart with `previous`."""
        query = {"container": container_name, "previous": str(previous).lower()}
        return self.cluster.api.text(f"{self._path}/{name}/log", **query)

    def wait_logs(self, name: str, container_name: str = "main", *, lines: int = 1) -> str:
        """Waits until a container has written so many lines, and returns all that it wrote.

        One that runs, or is ready, may not have come to its first word.
        """

        def said() -> str | None:
            with contextlib.suppress(ApiError):  # it has not started
                text = self.logs(name, container_name)
                return text if text.count("\n") >= lines else None
            return None

        return wait_until(
            said, f"words of {name}/{container_name}", explain=lambda: self.explain(name)
        )

    def exec(
        self,
        name: str,
        command: Sequence[str],
        container_name: str = "main",
        *,
        timeout_s: float = PATIENCE_S,
    ) -> str:
        """Runs a command in a container and returns its standard output.

        Raises:
            TestbedError: it failed; with what it said.
        """
        where = ["--namespace", self.namespace, name, "--container", container_name]
        return self.cluster.kubectl_run("exec", *where, "--", *command, timeout_s=timeout_s)

    def events(self, name: str) -> list[Json]:
        """The events on a pod, oldest first."""
        found = self.cluster.api.items(
            f"/api/v1/namespaces/{self.namespace}/events",
            fieldSelector=f"involvedObject.kind=Pod,involvedObject.name={name}",
        )
        return sorted(found, key=lambda event: str(event["metadata"]["creationTimestamp"]))

    def wait_event(
        self, name: str, *, reason: str, contains: str = "", timeout_s: float = PATIENCE_S
    ) -> Json:
        """Waits for an event on a pod and returns it."""

        def check() -> Json | None:
            for event in self.events(name):
                if event["reason"] == reason and contains in event.get("message", ""):
                    return event
            return None

        return wait_until(
            check,
            f"event {reason} {contains!r} on pod {name}",
            timeout_s=timeout_s,
            explain=lambda: self.explain(name),
        )

    def delete(self, *names: str, wait: bool = True, timeout_s: float = PATIENCE_S) -> None:
        """Deletes pods, all without names; unless told otherwise, waits until they are gone."""
        if not names:
            self.cluster.api.delete(self._path)
        for name in names:
            self.cluster.api.delete(f"{self._path}/{name}")
        if wait:
            wait_until(
                lambda: not set(self.names()) & set(names or self.names()),
                f"end of pods {', '.join(names) or 'of ' + self.namespace}",
                timeout_s=timeout_s,
                explain=lambda: ", ".join(self.names()),
            )

    def explain(self, name: str) -> str:
        """A pod's state and events, for an error's message."""
        try:
            status = self.get(name)["status"]
            lines = [f"phase {status.get('phase')} {status.get('reason', '')}"]
            for each in self._statuses({"status": status}):
                lines.append(f"container {each['name']}: {json.dumps(each.get('state'))}")
                lines += self._last_words(name, each["name"])
            for event in self.events(name):
                lines.append(f"event {event['reason']}: {event.get('message', '')}")
        except (ApiError, OSError) as error:
            return str(error)
        return "\n".join(lines)

    def _last_words(self, name: str, container_name: str) -> list[str]:
        try:
            return [f"  | {line}" for line in self.logs(name, container_name).splitlines()[-10:]]
        except (ApiError, OSError):  # it has not started
            return []

    @staticmethod
    def _statuses(found: Json) -> list[Json]:
        status = found["status"]
        kinds = ("initContainerStatuses", "containerStatuses")
        return [each for kind in kinds for each in status.get(kind, ())]

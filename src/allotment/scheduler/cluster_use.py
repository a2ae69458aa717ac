# SPDX-License-Identifier: Apache-2.0
"""What the shares of a cluster use now: each agent's metrics, with the rights of the reader.

Some agents at a time, each within a time limit. One without an answer is a problem of its node.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from allotment.kube.clients import Api
from allotment.kube.components import AGENT, SYSTEM, ComponentPod, read_components, read_metrics
from allotment.kube.errors import DeniedError, KubeError
from allotment.metrics.reading import read_use
from allotment.metrics.use import Use

MOST_AT_ONCE: Final = 32
AGENT_S: Final = 5.0
"""The longest wait for one agent: a scrape takes 50 ms, and up to 2 s with a GPU that hangs."""
ALL_S: Final = 20.0

NO_AGENT: Final = "it has no agent"


class NodeUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one node's agent reports, or why it does not."""

    node: str
    agent: ComponentPod | None = None
    use: Use | None = None
    problem: str = ""
    """Why `use` is missing."""
    is_denied: bool = False
    """The reader lacks the right to ask it."""


async def read_cluster_use(
    api: Api,
    *,
    nodes: Collection[str] = (),
    namespace: str = SYSTEM,
    most_at_once: int = MOST_AT_ONCE,
    agent_s: float = AGENT_S,
    all_s: float = ALL_S,
) -> tuple[NodeUse, ...]:
    """Return the use of all nodes with agents, and of `nodes`, which have none perhaps.

    Raises `KubeError` if the agents cannot be listed; else every node has an entry.
    """
    agents = agents_of(await read_components(api, namespace=namespace, component=AGENT))
    wanted = sorted({*agents, *nodes})
    reader = _Reader(api, most_at_once=most_at_once, agent_s=agent_s)
    tasks = {
        name: asyncio.create_task(reader.read(name, agents[name]))
        for name in wanted
        if name in agents
    }
    if tasks:
        try:
            await asyncio.wait(tasks.values(), timeout=all_s)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
    return tuple(_outcome(name, agents.get(name), tasks.get(name), all_s=all_s) for name in wanted)


def agents_of(pods: Iterable[ComponentPod]) -> Mapping[str, ComponentPod]:
    """Return each node's agent: of two, during an update, a ready one, then the newer."""
    found: dict[str, ComponentPod] = {}
    for pod in sorted(pods, key=lambda pod: (pod.is_ready, pod.created)):
        if pod.node:
            found[pod.node] = pod
    return found


def _outcome(
    name: str, agent: ComponentPod | None, task: asyncio.Task[NodeUse] | None, *, all_s: float
) -> NodeUse:
    if task is None:
        return NodeUse(node=name, problem=NO_AGENT)
    if task.cancelled():
        return NodeUse(node=name, agent=agent, problem=f"no answer within {all_s:g} s")
    return task.result()


class _Reader:
    def __init__(self, api: Api, *, most_at_once: int, agent_s: float) -> None:
        self._api = api
        self._turns = asyncio.Semaphore(most_at_once)
        self._agent_s = agent_s
        self._denied: DeniedError | None = None
        """The first refusal: it holds for all agents; none of them is asked again."""

    async def read(self, node: str, agent: ComponentPod) -> NodeUse:
        async with self._turns:
            if self._denied is not None:
                return _denied(node, agent, self._denied)
            try:
                async with asyncio.timeout(self._agent_s):
                    text = await read_metrics(self._api, agent)
            except TimeoutError:
                problem = f"no answer within {self._agent_s:g} s"
                return NodeUse(node=node, agent=agent, problem=problem)
            except DeniedError as error:
                self._denied = error
                return _denied(node, agent, error)
            except KubeError as error:
                problem = agent.problem or error.message
                return NodeUse(node=node, agent=agent, problem=problem)
        use = read_use(text)
        if use is None:
            problem = f"the answer of pod {agent} has no metrics of use"
            return NodeUse(node=node, agent=agent, problem=problem)
        return NodeUse(node=node, agent=agent, use=use)


def _denied(node: str, agent: ComponentPod, error: DeniedError) -> NodeUse:
    return NodeUse(node=node, agent=agent, problem=error.message, is_denied=True)

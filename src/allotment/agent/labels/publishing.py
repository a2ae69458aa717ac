# SPDX-License-Identifier: Apache-2.0
"""Keeps a node's labels as its GPUs and configuration are.

Two ways, by NVIDIA's flag `useNodeFeatureAPI`: on (the default), the agent labels its node through
the API server; off, it writes the feature file of Node Feature Discovery, which labels the node.
Where the way changes, what the agent said the other way is taken back.

Labels that went to the node stay there when the agent ends: an upgrade must not make a node look
as if it had no GPUs. A feature file goes, as NVIDIA's does, unless `oneshot` asked for it alone.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from allotment.agent.config.effective import Config, GfdConfig
from allotment.agent.labels.features import OWNED_PREFIXES, Features, node_features
from allotment.agent.labels.files import (
    read_machine_type,
    remove_feature_file,
    write_feature_file,
)
from allotment.agent.protocols import Reports
from allotment.agent.resources import Offer
from allotment.devices.facts import NodeFacts
from allotment.model.errors import AllotError

__all__ = ["Inputs", "NodeLabels", "Publisher"]

_ROUND_S: Final = 60.0
"""How long one round may take: NVML's patience, and an API server that is slow."""
_FIRST_RETRY_S: Final = 2.0
_LAST_RETRY_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What labels are made of."""

    facts: NodeFacts
    offer: Offer
    config: Config


class NodeLabels(Protocol):
    """The labels of this node in the API server."""

    async def set_labels(self, labels: Mapping[str, str], *, owned_prefixes: Sequence[str]) -> None:
        """Set these labels; remove those that were set by it before and are not among them.

        Never touches a label that somebody else has set. Does nothing where nothing changed.
        Raises `AllotError` where the API server refuses or cannot be reached.
        """
        ...


class Publisher:
    """Makes the labels and publishes them, in rounds.

    `inputs` is asked once a round and may raise `AllotError`: then the labels stay as they are.
    `node` None: there is no API server, and the feature file is written whatever the flag says.
    """

    def __init__(
        self,
        *,
        inputs: Callable[[], Awaitable[Inputs]],
        node: NodeLabels | None,
        reports: Reports,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._inputs = inputs
        self._node = node
        self._reports = reports
        self._clock = clock
        self._changed = asyncio.Event()
        self._config: Config | None = None
        self._timestamp_s = 0
        self._file: str | None = None  # what this process has written
        self._is_node_clear = False  # the node has no label of the agent's, as far as is known
        self._told: tuple[str, ...] = ()
        self._features = Features({})

    @property
    def features(self) -> Features:
        """The labels that were published last."""
        return self._features

    def wake(self) -> None:
        """Say that GPUs, offer or configuration changed: the next round begins at once."""
        self._changed.set()

    async def run(self) -> None:
        """Publish until cancelled; with `oneshot`, until it has been done once."""
        failures = 0
        try:
            while True:
                self._changed.clear()
                if await self.publish():
                    failures = 0
                    if self._gfd.oneshot:
                        return
                    await self._sleep(self._gfd.sleep_interval_s)
                else:
                    failures += 1
                    await self._sleep(min(_LAST_RETRY_S, _FIRST_RETRY_S * 2 ** min(failures, 8)))
        finally:
            if self._file is not None and not self._gfd.oneshot:
                remove_feature_file(self._file)

    async def publish(self) -> bool:
        """Do one round; return whether it went well. What went wrong has been reported."""
        try:
            async with asyncio.timeout(_ROUND_S):
                await self._round()
        except TimeoutError:
            self._tell((f"the labels were not made and published in {_ROUND_S:g} s",))
        except AllotError as error:
            self._tell((error.message if error.hint is None else f"{error}; {error.hint}",))
        else:
            return True
        self._reports.count("label_failures")
        return False

    @property
    def _gfd(self) -> GfdConfig:
        return GfdConfig() if self._config is None else self._config.gfd

    async def _sleep(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass  # as often as was asked for, also when nothing has changed

    async def _round(self) -> None:
        inputs = await self._inputs()
        config = inputs.config
        if config != self._config:
            # As NVIDIA's: the time is that of the start or of the last configuration, so that a
            # round in which nothing changed writes nothing.
            self._config, self._timestamp_s = config, int(self._clock())
        machine_type = await asyncio.to_thread(read_machine_type, config.gfd.machine_type_file)
        features = node_features(
            inputs.facts,
            offer=inputs.offer,
            config=config,
            machine_type=machine_type,
            timestamp_s=None if config.gfd.no_timestamp else self._timestamp_s,
        )
        if self._node is not None and config.use_node_feature_api:
            await self._to_node(self._node, features)
        else:
            await self._to_file(config.gfd.output_file, features)
        self._features = features
        self._tell(features.notes)

    async def _to_node(self, node: NodeLabels, features: Features) -> None:
        self._is_node_clear = False
        await node.set_labels(features.labels, owned_prefixes=OWNED_PREFIXES)
        await self._drop_file(unless="")

    async def _to_file(self, path: str, features: Features) -> None:
        await self._drop_file(unless=path)
        await asyncio.to_thread(write_feature_file, path, features.labels)
        self._file = path
        if self._node is not None and not self._is_node_clear:
            # An agent before this one may have labelled the node.
            await self._node.set_labels({}, owned_prefixes=OWNED_PREFIXES)
            self._is_node_clear = True

    async def _drop_file(self, *, unless: str) -> None:
        if self._file is not None and self._file != unless:
            await asyncio.to_thread(remove_feature_file, self._file)
            self._file = None

    def _tell(self, notes: tuple[str, ...]) -> None:
        """Report what is new among the notes; what was told last time is known already."""
        for note in notes:
            if note not in self._told:
                self._reports.node("Labels", note, is_warning=True)
        self._told = notes

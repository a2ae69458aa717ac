# SPDX-License-Identifier: Apache-2.0
"""Writes a node's labels to the node's object, or to Node Feature Discovery's file.

NVIDIA's flag `useNodeFeatureAPI` chooses: on (the default) the API server, off the feature file. A
change of the flag removes the labels of the other way. Labels of the node outlive the agent, so
that an upgrade does not hide GPUs. The feature file does not, except with `oneshot`.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from allotment.agent.config.schema import Config, GfdConfig
from allotment.agent.labels.features import OWNED_PREFIXES, UNKNOWN_MACHINE, Features, node_features
from allotment.agent.protocols import Reports
from allotment.agent.resources import Offer
from allotment.devices.facts import NodeFacts
from allotment.files import atomic_write
from allotment.model.errors import AllotError, StateError
from allotment.model.reported import Reported

_ROUND_S: Final = 60.0
"""The time limit of a round: NVML or the API server may be slow."""
_FIRST_RETRY_S: Final = 2.0
_LAST_RETRY_S: Final = 60.0


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """The sources of labels."""

    facts: NodeFacts
    offer: Offer
    config: Config


class NodeLabels(Protocol):
    """The labels of this node in the API server."""

    async def set_labels(self, labels: Mapping[str, str], *, owned_prefixes: Sequence[str]) -> None:
        """Set these labels, and remove our earlier others. Foreign labels stay.

        Raises `AllotError` if the API server refuses or cannot be reached.
        """
        ...


class Publisher:
    """Makes the labels and publishes them, in rounds.

    `inputs` may raise `AllotError`: then the labels stay as they are. `node` None: no API server;
    the feature file is written whatever the flag.
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
        self._reported = Reported[str]()
        self._features = Features({})

    @property
    def features(self) -> Features:
        """The labels as last published."""
        return self._features

    def wake(self) -> None:
        """Begin the next round at once."""
        self._changed.set()

    async def run(self) -> None:
        """Publish until cancelled; with `oneshot`, once."""
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
        """Do one round; return whether it succeeded. Failures are reported."""
        try:
            async with asyncio.timeout(_ROUND_S):
                await self._round()
        except TimeoutError:
            self._report((f"the labels were not published within {_ROUND_S:g} s",))
        except AllotError as error:
            self._report((error.one_line(),))
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
            pass  # the interval is over

    async def _round(self) -> None:
        inputs = await self._inputs()
        config = inputs.config
        if config != self._config:
            # As in NVIDIA's: the time of the start or of the configuration, so that a round
            # without changes writes nothing.
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
        self._report(features.notes)

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

    def _report(self, notes: tuple[str, ...]) -> None:
        for note in self._reported.new_of(notes):
            self._reports.node("Labels", note, is_warning=True)


_MODE = 0o644


def read_machine_type(path: str) -> str:
    """Return the text of a machine type file; `unknown` if it cannot be read."""
    if not path:
        return UNKNOWN_MACHINE
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return UNKNOWN_MACHINE


def written(labels: Mapping[str, str]) -> str:
    """Return the text of a feature file: one `key=value` per line."""
    return "".join(f"{key}={value}\n" for key, value in sorted(labels.items()))


def write_feature_file(path: str, labels: Mapping[str, str]) -> bool:
    """Write the feature file if it changed; return whether it did. Raises `StateError`.

    An empty path is standard output, as in NVIDIA's. NFD reads the file again after each write.
    """
    text = written(labels)
    if not path:
        sys.stdout.write(text)
        sys.stdout.flush()
        return True
    target = Path(path)
    try:
        if target.read_text(encoding="utf-8", errors="replace") == text:
            return False
    except OSError:
        pass  # missing; the write reports other problems
    try:
        atomic_write(target, text, mode=_MODE)
    except OSError as error:
        raise StateError(
            f"cannot write the feature file {path}: {error.strerror}",
            hint="mount Node Feature Discovery's folder features.d there, name another file with"
            " GFD_OUTPUT_FILE, or set USE_NODE_FEATURE_API=true to label the node by the API",
        ) from error
    return True


def remove_feature_file(path: str) -> None:
    """Remove the file; NFD then removes its labels."""
    if path:
        with contextlib.suppress(OSError):  # the agent ends
            Path(path).unlink(missing_ok=True)

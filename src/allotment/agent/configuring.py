# SPDX-License-Identifier: Apache-2.0
"""Brings configurations into force as they change: a file's, or one that the node's label chooses.

What was in force last is kept in the state folder. An agent that starts while the API server is
away goes by that: whole GPUs must not be handed out of a node whose owner shares them.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final, Protocol

import structlog

from allotment.agent.config.choosing import choice_rules
from allotment.agent.config.effective import Config
from allotment.agent.config.holding import ConfigHolder, Outcome
from allotment.agent.config.overlay import given_value
from allotment.agent.config.watching import watch_file, watch_folder
from allotment.agent.inventory import Bells
from allotment.agent.protocols import Reports
from allotment.agent.settings import AgentSettings
from allotment.model.errors import AllotError

__all__ = ["Configuring", "NamedConfigs", "NodeLabelSource"]

_log = structlog.get_logger("allotment.agent")

_KEPT: Final = "config.yaml"
"""The text that was in force last, in the state folder."""
_API_WAIT_S: Final = 5.0
"""How long the API server may take to tell of the ConfigMap before the kept text counts."""


class Labelled(Protocol):
    """An object of the API server (`kube.nodes.Node`)."""

    @property
    def labels(self) -> Mapping[str, str]:
        """Its labels."""
        ...


class NodeLabelSource(Protocol):
    """This node's labels (`kube.nodes.OwnNode`)."""

    @property
    def is_synced(self) -> bool:
        """Whether there is such a node is known."""
        ...

    @property
    def current(self) -> Labelled | None:
        """What it says; None: there is no such node, or it has not been heard of."""
        ...

    def changes(self) -> AsyncIterator[None]:
        """Yield at once, and whenever the node says something else."""
        ...


class NamedConfigs(Protocol):
    """A ConfigMap's data (`kube.configmaps.FollowedConfigMap`)."""

    def values(self) -> AsyncIterator[Mapping[str, str] | None]:
        """Yield them as soon as they are known, and whenever they are others."""
        ...


class Configuring:
    """The configuration in force, for as long as `run` runs."""

    def __init__(
        self,
        settings: AgentSettings,
        *,
        state: Path,
        reports: Reports,
        node: NodeLabelSource,
        config_map: NamedConfigs | None,
    ) -> None:
        """Take where it comes from. Raises `UsageError` for flags that cannot be meant."""
        options, environment = settings.options, settings.environment
        self._settings = settings
        self._kept = state / _KEPT
        self._reports = reports
        self._node = node
        self._config_map = config_map
        self._folder = str(
            given_value("config-file-srcdir", options=options, environment=environment) or ""
        )
        self._rules = choice_rules(
            default=settings.default_config, options=options, environment=environment
        )
        self._holder = ConfigHolder(
            options=options,
            environment=environment,
            rules=self._rules,
            source=f"ConfigMap {settings.config_map}" if settings.config_map else self._folder,
        )
        self._bells = Bells()
        self._was_invalid = False

    @property
    def current(self) -> Config | None:
        """What is in force; None: nothing yet."""
        return self._holder.config

    @property
    def problem(self) -> AllotError | None:
        """What is wrong with what was heard last."""
        return self._holder.problem

    async def changes(self) -> AsyncIterator[Config]:
        """Yield what is in force, as soon as there is something, and each time that it changes."""
        last = None
        with self._bells.hung() as bell:
            while True:
                bell.clear()
                if self.current is not None and self.current is not last:
                    last = self.current
                    yield last
                else:
                    await bell.wait()

    async def run(self) -> None:
        """Follow the sources until cancelled.

        Raises `AllotError` where flags alone are the configuration and contradict themselves.
        """
        if self._settings.config_file is not None:
            await self._follow_file(self._settings.config_file)
        elif self._config_map is not None or self._folder:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_data())
                group.create_task(self._follow_label())
                group.create_task(self._fall_back())
        else:
            outcome = self._holder.start()
            if outcome.problem is not None:
                raise outcome.problem
            self._take(outcome)

    async def _follow_file(self, path: Path) -> None:
        async for text in watch_file(path):
            if isinstance(text, AllotError):
                self._take(self._holder.failed(text))
            else:
                self._take(self._holder.file_changed(text, path=str(path)))

    async def _follow_data(self) -> None:
        if self._config_map is not None:
            async for data in self._config_map.values():
                self._take(self._holder.data_changed(data))
        else:
            async for found in watch_folder(Path(self._folder)):
                if isinstance(found, AllotError):
                    self._take(self._holder.failed(found))
                else:
                    self._take(self._holder.data_changed(found))

    async def _follow_label(self) -> None:
        async for _ in self._node.changes():
            if self._node.is_synced:
                node = self._node.current
                label = node.labels.get(self._rules.label) if node is not None else None
                self._take(self._holder.label_changed(label))

    async def _fall_back(self) -> None:
        """Go by what was in force last, where nobody tells what is to be."""
        await asyncio.sleep(_API_WAIT_S)
        if self.current is not None or self.problem is not None:
            return
        try:
            text = await asyncio.to_thread(self._kept.read_text, "utf-8")
        except OSError:
            return
        self._take(self._holder.file_changed(text, path=f"{self._kept} (in force before)"))

    # ---- one outcome ----

    def _take(self, outcome: Outcome) -> None:
        if outcome.config is not None:
            self._reports.count("config_loads", result="applied")
            _log.info("configuration in force", source=outcome.config.source)
            if self._was_invalid:
                self._was_invalid = False
                self._reports.node(
                    "ConfigApplied", f"{outcome.config.source} is in force", is_warning=False
                )
            for note in outcome.config.notes:
                _log.warning("configuration", note=note)
            self._keep()
            self._bells.ring()
        if outcome.problem is not None and outcome.is_new_problem:
            self._reports.count("config_loads", result="invalid")
            self._was_invalid = True
            stays = (
                "; what was in force stays so"
                if self.current
                else "; no GPU is offered until it is mended"
            )
            hint = f" ({outcome.problem.hint})" if outcome.problem.hint else ""
            self._reports.node(
                "ConfigInvalid", f"{outcome.problem.message}{hint}{stays}", is_warning=True
            )
        self._reports.gauge("config_valid", 0.0 if self.problem else 1.0)

    def _keep(self) -> None:
        """Write down what came into force; where that fails the agent works all the same."""
        if self._config_map is None:
            return  # what is on this machine is found again
        draft = self._kept.with_name(f".{_KEPT}.new")
        with contextlib.suppress(OSError):
            draft.write_text(self._holder.text, "utf-8")
            draft.replace(self._kept)

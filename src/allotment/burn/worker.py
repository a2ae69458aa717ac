# SPDX-License-Identifier: Apache-2.0
"""One process of a burn: allocates memory, keeps the GPU busy, frees everything.

The loop is closed: each stream has one launch outstanding, and launches again when it ends, so a
latency never includes a queue. With a rate, launches arrive like requests. Blocking events keep
the processor idle. Each kernel fills the device, so two never run at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from ctypes import POINTER, c_float, c_uint64, c_void_p
from typing import TYPE_CHECKING, Final

import msgspec

from allotment.burn.allocations import APIS, write_all
from allotment.burn.drivers import (
    OUT_OF_MEMORY,
    SPIN_ENTRY,
    SPIN_PTX,
    CudaContext,
    CudaError,
    Driver,
    KernelNode,
)
from allotment.burn.reports import BurnDevice, BurnError, ProcessReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from allotment.burn.allocations import Allocator, Piece
    from allotment.burn.reports import BurnPlan

_EVENT_BLOCKING: Final = 1
_STREAM_NON_BLOCKING: Final = 1
_HOLDING_STEP_SECONDS: Final = 0.05
_BLOCK_THREADS: Final = 1024
_ORIGIN_LASTS_MS: Final = 10_000.0


def work(
    driver: Driver,
    plan: BurnPlan,
    *,
    is_stopping: Callable[[], bool],
    meet: Callable[[], None] | None = None,
) -> ProcessReport:
    """Do one process's part of the plan and report it.

    Driver errors go into the report, except for a failure to open the device: CudaError.
    `is_stopping` is called between driver calls. `meet` returns when all processes of the burn have
    their memory.
    """
    report = ProcessReport(pid=os.getpid(), asked_bytes=plan.memory_bytes)
    try:
        context = CudaContext.open(driver, plan.device)
    except CudaError as error:
        if error.code != OUT_OF_MEMORY:
            raise
        _record(report, error)  # even the context did not fit
        return report
    burn = _Burn(context=context, plan=plan, report=report, is_stopping=is_stopping, meet=meet)
    with burn.recording():
        report.device = BurnDevice(
            ordinal=context.ordinal,
            uuid=context.uuid,
            name=context.name,
            total_bytes=context.total_bytes,
            multiprocessors=context.multiprocessors(),
        )
        if plan.memory_fraction and not plan.memory_bytes:
            report.asked_bytes = int(context.total_bytes * plan.memory_fraction)
        report.memory_before = context.memory()
        with APIS[plan.api](context) as allocator:
            burn.run(allocator)
    with burn.recording():
        context.close()
    report.interrupted = is_stopping()
    return report


def _record(report: ProcessReport, error: CudaError) -> None:
    report.errors.append(
        BurnError(code=error.code, name=error.name, call=error.call, at_bytes=report.got_bytes)
    )


class _Burn(msgspec.Struct, kw_only=True):
    context: CudaContext
    plan: BurnPlan
    report: ProcessReport
    is_stopping: Callable[[], bool]
    meet: Callable[[], None] | None
    pieces: list[Piece] = msgspec.field(default_factory=list)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record a driver error in the report instead of raising it."""
        try:
            yield
        except CudaError as error:
            _record(self.report, error)

    def run(self, allocator: Allocator) -> None:
        try:
            with self.recording():
                self.allocate(allocator)
                self.report.memory_after = self.context.memory()
                if self.meet is not None:
                    self.meet()
                if not self.report.errors:
                    self.occupy()
                elif self.meet is not None:
                    # Hold it, so that the sum over processes is memory held at one time.
                    self._hold(time.monotonic() + self.plan.seconds)
        finally:
            # After a sticky error every release fails alike: record only the first.
            with self.recording():
                while self.pieces:
                    allocator.release(self.pieces.pop())

    def allocate(self, allocator: Allocator) -> None:
        report, plan = self.report, self.plan
        while report.got_bytes < report.asked_bytes and not self.is_stopping():
            size = min(plan.chunk_bytes, report.asked_bytes - report.got_bytes)
            try:
                piece = allocator.allocate(size)
            except CudaError as error:
                if error.code != OUT_OF_MEMORY:
                    raise
                _record(self.report, error)
                return
            self.pieces.append(piece)
            report.got_bytes += piece.size_bytes
            if plan.touch and piece.address is not None:
                write_all(self.context, piece.address, piece.size_bytes)

    def occupy(self) -> None:
        """Launch kernels, or only hold the memory, until the time is over."""
        started = time.monotonic()
        deadline = started + self.plan.seconds
        try:
            if self.plan.kernel_ns == 0:
                self._hold(deadline)
            else:
                with _Lanes.opened(self.context, self.plan) as lanes:
                    if self.plan.rate:
                        self._answer(lanes, deadline)
                    else:
                        self._launch(lanes, deadline)
        finally:
            self.report.wall_seconds = time.monotonic() - started

    def _hold(self, deadline: float) -> None:
        while not self.is_stopping() and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _HOLDING_STEP_SECONDS))

    def _launch(self, lanes: _Lanes, deadline: float) -> None:
        for lane in lanes.lanes:
            lanes.launch(lane)
        # At least one launch per lane, even if the time is short.
        waiting = list(lanes.lanes)
        while waiting:
            lane = waiting.pop(0)
            self._finish(lanes, lane)
            if self._goes_on(deadline, outstanding=len(waiting)):
                lanes.launch(lane)
                waiting.append(lane)

    def _answer(self, lanes: _Lanes, deadline: float) -> None:
        (lane,) = lanes.lanes
        began_ns, period_ns = time.monotonic_ns(), 1e9 / self.plan.rate
        number = 0
        while self._goes_on(deadline, outstanding=0):
            due_ns = began_ns + int(number * period_ns)
            number += 1
            free_ns = time.monotonic_ns()
            if due_ns > free_ns:
                time.sleep((due_ns - free_ns) / 1e9)
            lanes.launch(lane)
            # A request that was due during the one before has waited since then.
            if due_ns < free_ns:
                lane.launched_ns = due_ns
            self._finish(lanes, lane)

    def _finish(self, lanes: _Lanes, lane: _Lane) -> None:
        self.report.latencies.add(lanes.finish(lane))
        self.report.event_seconds += lanes.busy_seconds(lane)
        self.report.launches += 1
        self.report.kernels += self.plan.kernels_per_launch

    def _goes_on(self, deadline: float, *, outstanding: int) -> bool:
        if self.is_stopping():
            return False
        if self.plan.launches:
            return self.report.launches + outstanding < self.plan.launches
        return time.monotonic() < deadline


class _Lane(msgspec.Struct):
    """A stream and its outstanding launch."""

    stream: c_void_p
    before: c_void_p
    after: c_void_p
    graph: c_void_p | None = None
    launched_ns: int = 0


class _Lanes(msgspec.Struct):
    """The streams of a burn, and what they launch."""

    driver: Driver
    function: c_void_p
    parameters: ctypes.Array[c_void_p]
    duration: c_uint64
    origin: c_void_p
    """Event from which GPU times are counted."""
    blocks: int
    lanes: list[_Lane] = msgspec.field(default_factory=list)
    counted_ms: float = 0.0

    @classmethod
    @contextlib.contextmanager
    def opened(cls, context: CudaContext, plan: BurnPlan) -> Iterator[_Lanes]:
        """Load the kernel, build the graphs and create the streams; undo all at the end."""
        driver = context.driver
        with contextlib.ExitStack() as undo:
            module, function = c_void_p(), c_void_p()
            driver.call("cuModuleLoadData", ctypes.byref(module), SPIN_PTX)
            undo.callback(driver.call, "cuModuleUnload", module)
            driver.call("cuModuleGetFunction", ctypes.byref(function), module, SPIN_ENTRY)
            duration = c_uint64(plan.kernel_ns)
            parameters = (c_void_p * 1)(ctypes.addressof(duration))
            origin = _open_event(driver, undo)
            driver.call("cuEventRecord", origin, None)
            blocks = context.blocks_that_fill_it(_BLOCK_THREADS)
            lanes = cls(driver, function, parameters, duration, origin, blocks)
            lanes_wanted = min(plan.streams, plan.launches or plan.streams)
            for _ in range(lanes_wanted):
                lane = _open_lane(driver, undo)
                if plan.graph_nodes:
                    # One per lane: launches of one executable graph wait for each other.
                    lane.graph = lanes.build_graph(plan.graph_nodes, undo)
                lanes.lanes.append(lane)
            yield lanes

    def build_graph(self, nodes: int, undo: contextlib.ExitStack) -> c_void_p:
        """Create an executable graph of `nodes` kernels in a row."""
        driver, graph, executable = self.driver, c_void_p(), c_void_p()
        driver.call("cuGraphCreate", ctypes.byref(graph), 0)
        undo.callback(driver.call, "cuGraphDestroy", graph)
        node_parameters = KernelNode()
        node_parameters.function = self.function
        node_parameters.grid[:] = (self.blocks, 1, 1)
        node_parameters.block[:] = (_BLOCK_THREADS, 1, 1)
        node_parameters.parameters = ctypes.cast(self.parameters, POINTER(c_void_p))
        previous: c_void_p | None = None
        for _ in range(nodes):
            node = c_void_p()
            driver.call(
                "cuGraphAddKernelNode",
                ctypes.byref(node),
                graph,
                None if previous is None else ctypes.byref(previous),
                0 if previous is None else 1,
                ctypes.byref(node_parameters),
            )
            previous = node
        driver.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, 0)
        undo.callback(driver.call, "cuGraphExecDestroy", executable)
        return executable

    def launch(self, lane: _Lane) -> None:
        lane.launched_ns = time.monotonic_ns()
        self.driver.call("cuEventRecord", lane.before, lane.stream)
        if lane.graph is None:
            self.driver.call(
                "cuLaunchKernel",
                self.function,
                *(self.blocks, 1, 1),
                *(_BLOCK_THREADS, 1, 1),
                0,
                lane.stream,
                self.parameters,
                None,
            )
        else:
            self.driver.call("cuGraphLaunch", lane.graph, lane.stream)
        self.driver.call("cuEventRecord", lane.after, lane.stream)

    def finish(self, lane: _Lane) -> int:
        """Wait for a lane; return its latency in nanoseconds."""
        self.driver.call("cuEventSynchronize", lane.after)
        return time.monotonic_ns() - lane.launched_ns

    def busy_seconds(self, lane: _Lane) -> float:
        """Return the GPU time of a finished lane that no earlier lane covered.

        Lanes that wait for each other overlap: the sum of their spans would exceed the GPU's time.
        Only
        the part after the end of all counted spans is added.
        """
        begin = max(self._elapsed_ms(self.origin, lane.before), self.counted_ms)
        end = self._elapsed_ms(self.origin, lane.after)
        self.counted_ms = max(self.counted_ms, end)
        if end > _ORIGIN_LASTS_MS:
            # Milliseconds are 32-bit floats, which are coarse far from the origin. Earlier work of
            # other lanes is counted already, or will be cut off at the new origin.
            self.origin, lane.after = lane.after, self.origin
            self.counted_ms = 0.0
        return max(0.0, end - begin) / 1000

    def _elapsed_ms(self, start: c_void_p, end: c_void_p) -> float:
        milliseconds = c_float()
        self.driver.call("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
        return milliseconds.value


def _open_lane(driver: Driver, undo: contextlib.ExitStack) -> _Lane:
    stream = c_void_p()
    driver.call("cuStreamCreate", ctypes.byref(stream), _STREAM_NON_BLOCKING)
    undo.callback(driver.call, "cuStreamDestroy", stream)
    return _Lane(stream, _open_event(driver, undo), _open_event(driver, undo))


def _open_event(driver: Driver, undo: contextlib.ExitStack) -> c_void_p:
    event = c_void_p()
    driver.call("cuEventCreate", ctypes.byref(event), _EVENT_BLOCKING)
    undo.callback(driver.call, "cuEventDestroy", event)
    return event

# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics, and the daemons' log: one line for each event.

agent      metrics of the node agent
scheduler  metrics of the scheduler
serving    /metrics, /healthz and /readyz over HTTP
"""

import logging
import sys

import structlog

__all__ = ["start_log"]


def start_log(*, as_json: bool, is_verbose: bool) -> None:
    """Write the log to standard error, each line at once."""
    level = logging.DEBUG if is_verbose else logging.INFO
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )

# SPDX-License-Identifier: Apache-2.0
"""Parts that begin anew when they fail: what one of them has is no reason to end all others.

The process ends with the parts without which nothing it says is true: what follows pods and nodes,
and what leads. Of all others a failure would come again after each start, in every replica, and no
pod would be placed until somebody has found out why.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

import structlog

from allotment.kube.backoff import Backoff

__all__ = ["lasting"]

_STEADY_S: Final = 60.0
"""Who lasted so long begins anew at once."""
_log = structlog.get_logger(__name__)


async def lasting(
    part: Callable[[], Awaitable[object]],
    name: str,
    *,
    on_failure: Callable[[str], None],
    backoff: Backoff | None = None,
) -> NoReturn:
    """Run a part until it is cancelled: a failure is logged and told, and it begins anew.

    `on_failure` is told the part's name.
    """
    loop = asyncio.get_running_loop()
    waits = backoff or Backoff(first_s=0.5, most_s=30.0)
    while True:
        began = loop.time()
        try:
            await part()
            raise AssertionError("it does not end")  # noqa: TRY301 - a failure like any other
        except Exception:  # noqa: BLE001 - whatever it is
            _log.exception("a part of the scheduler has failed; it begins anew", part=name)
            on_failure(name)
        if loop.time() - began >= _STEADY_S:
            waits.reset()
        await asyncio.sleep(waits.next())

# SPDX-License-Identifier: Apache-2.0
"""Requests that leave open how they are enforced: one for each mode, the one liked best first."""

from dataclasses import replace

from allotment.model.requests import Request

__all__ = ["in_each_mode", "is_open"]


def in_each_mode(request: Request) -> tuple[Request, ...]:
    """Return what is asked for in each of the modes that would do, in order of preference."""
    if not request.other_modes:
        return (request,)
    modes = dict.fromkeys((request.mode, *request.other_modes))
    return tuple(replace(request, mode=mode, other_modes=()) for mode in modes)


def is_open(request: Request) -> bool:
    """Would more than one mode do?"""
    return any(mode != request.mode for mode in request.other_modes)

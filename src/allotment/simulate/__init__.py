# SPDX-License-Identifier: Apache-2.0
"""Replays of traces and live clusters through `placement`.

Uses the same policies and arrays as the scheduler; makes no placement decisions of its own.
"""

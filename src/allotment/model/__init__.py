# SPDX-License-Identifier: Apache-2.0
"""Frozen values that every room uses: devices, requests, placements, shares, quantities.

No I/O, no clock, no import of another room.
"""

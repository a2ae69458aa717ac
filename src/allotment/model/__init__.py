# SPDX-License-Identifier: Apache-2.0
"""The words of Allotment as frozen values: devices, requests, placements, shares, quantities.

Nothing in this room does I/O, reads a clock or knows another room; every other room speaks in it.
"""

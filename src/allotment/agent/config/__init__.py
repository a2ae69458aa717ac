# SPDX-License-Identifier: Apache-2.0
"""The agent's configuration: NVIDIA's file, flags and environment, and our additions.

    text ── parsing ──► ConfigFile ── overlay ──► Config ── holder ──► NodeState.config

All of this is pure; `configuring` follows the sources.
"""

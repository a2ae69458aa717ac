# SPDX-License-Identifier: Apache-2.0
"""The agent's configuration: NVIDIA's file, flags and environment, and our additions.

    text ── parsing ──► ConfigFile ── overlay ──► Config ── holding ──► the one in force

From here to `holding` all is pure; `watching` alone reads files. The ConfigMap and the node's label
come from `kube`, through whoever wires them.
"""

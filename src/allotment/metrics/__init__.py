# SPDX-License-Identifier: Apache-2.0
"""Figures for Prometheus.

agent      what the node agent counts
scheduler  what the scheduler counts
serving    /metrics, /healthz and /readyz over HTTP
"""

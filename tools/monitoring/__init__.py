# SPDX-License-Identifier: Apache-2.0
"""The one source of deploy/monitoring: dashboards for Grafana and rules for Prometheus.

panels      what a dashboard consists of, and its form in Grafana's own schema
fleet       the dashboard of all GPUs
nodes       of one node
devices     of one GPU, and of shares
tenants     of namespaces and their cost
scheduling  of the scheduler
alerts      the alerts, with what to do next

`tools/generate_monitoring.py` writes the files; a test compares them.
"""

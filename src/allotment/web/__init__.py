# SPDX-License-Identifier: Apache-2.0
"""The page: who uses what of each GPU, for a browser; of one machine or of a cluster.

Rendered on the server, without a build step. Read-only: no request changes shares, pods or nodes.
docs/designs/web.md gives the reasons.

* `fleet`: the values that pages show: nodes, GPUs, holders. `watching`: reads them at a pace, and
  keeps an hour of figures.
* `application`: routes and pages. `tables`: each table as HTML, CSV and JSON. `drawing`: the heat
  map. `guarding`: headers, sessions, rate limits.
* `archive`: longer charts and cost, from Prometheus.
* `cluster`: the cluster as a fleet. `rights`: what Kubernetes lets a user see.
"""

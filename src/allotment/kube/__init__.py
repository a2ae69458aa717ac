# SPDX-License-Identifier: Apache-2.0
"""The only package that talks to the API server; it returns types of `model`.

clients       requests: bytes in, bytes out; backoff
credentials   kubeconfigs and service accounts
errors        errors of the API server
watching      list, watch, resume
objects       the objects' types
nodes         one node and its pods
cluster_feed  all nodes and pods
inventories   a node's published devices
quotas        quotas, budgets, config maps
sharepods     KubeShare's SharePods
leases        leader election
bindings      bind and place in one request
webhooks      the webhook's objects
events        Kubernetes events
live          a cluster's state at one moment
"""

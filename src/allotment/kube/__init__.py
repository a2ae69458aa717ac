# SPDX-License-Identifier: Apache-2.0
"""The only place that talks to the API server. What it says to us are `model`'s words.

clients       requests: bytes in, bytes out, errors that say what to do
errors        those errors
objects       the objects, as narrow as they are needed, and what they mean
amounts       CPU and memory, as kube-scheduler counts them
watching      following a list: list, watch, resume; backoff, signals
pods          the pods of one node
nodes         one node: read, and what we write into it
inventories   what a node's devices are, as its agent publishes it
cluster_feed  all pods and nodes of a cluster
bindings      a pod gets its node and its placement, in one request
leases        which of several processes leads
configmaps    one config map
quotas        what namespaces may have
webhooks      the secret and the configuration of the webhook
events        telling people what happened

Imported late, by what needs Kubernetes: one machine does without its libraries.
"""

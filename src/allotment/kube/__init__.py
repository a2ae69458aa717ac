# SPDX-License-Identifier: Apache-2.0
"""The only place that talks to the API server. What it says to us are `model`'s words.

clients      requests: bytes in, bytes out, errors that say what to do
errors       those errors
objects      the objects, as narrow as they are needed, and what they mean
watching     following a list: list, watch, resume; backoff, signals
pods         the pods of one node
nodes        one node: read, and what we write into it
configmaps   one config map
events       telling people what happened

Imported late, by what needs Kubernetes: one machine does without its libraries.
"""

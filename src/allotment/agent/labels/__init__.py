# SPDX-License-Identifier: Apache-2.0
"""GPU feature discovery: what a node's labels tell schedulers and people about its GPUs.

`features` makes the labels, `gpus` those of one resource of it, `values` keeps them to what
Kubernetes takes; all pure. `publishing` brings them to the node. Keys and values are those of
NVIDIA's gpu-feature-discovery to the byte, so that what selects nodes by them need not change.
"""

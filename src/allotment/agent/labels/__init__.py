# SPDX-License-Identifier: Apache-2.0
"""GPU feature discovery: the node's labels about its GPUs.

`features` makes the labels, pure; `publisher` writes them to the node. Keys and values are those of
NVIDIA's gpu-feature-discovery, byte for byte, so that node selectors still work.
"""

# SPDX-License-Identifier: Apache-2.0
"""The node agent: offers a Kubernetes node's GPUs, and gives each container exactly its share.

config/        NVIDIA's configuration file, flags and environment; what is in force
plugin/        the kubelet's device plugin API: registration, device lists, Allocate
allocation/    from the kubelet's device ids to the shares of a pod's containers
kubelet/       the kubelet's gRPC services and its checkpoint file
health/        which GPUs may be used
labels/        the node's labels, as NVIDIA's GPU feature discovery writes them
mig/           MIG on the node: state, strategy, slices for pods, conflicts
node_state     the values that all parts share
inventory      the node's GPUs, watched; `inventory_publisher` writes them on the node
resources      devices, health and configuration in, resources and quantities out
offering       joins these and informs all parts
running        starts and connects the parts; `shutdown` ends the process in time
"""

import os

# gRPC looks at this once, when it is imported. Its newer way of listening hands each call through
# more threads: 14 waits in a call of the kubelet's in place of 8 (gRPC 1.85), each of which takes
# milliseconds on a node whose processors are busy.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")

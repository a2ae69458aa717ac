# SPDX-License-Identifier: Apache-2.0
"""The node agent: offers a Kubernetes node's GPUs, and gives each container exactly its share.

settings       how it was started
config/        NVIDIA's configuration file, flags and environment; what is in force
configuring    where configurations come from, and which one is in force now
inventory      the node's GPUs, watched
health/        which of them may be used
resources      devices, health and configuration in, resources and quantities out
offering       joins these, and tells everyone
kubelet/       the kubelet's protocols and its checkpoint
announcing     what schedulers are told of the devices
device_modes   which modes GPUs are for, as the node's object says
slices         what GPUs are cut into for pods (cut_gpus), and who else cuts them (mig_fights)
mps_keeping    the control daemons of MPS
answering      how this node answers: CDI devices, or mounts
upkeep         time slices, NVIDIA's CDI specs, order
device_plugin/ the kubelet's side: registration, lists, preferred ids, answers
tenancy/       who has what: from the kubelet's ids to the shares of a pod's containers
labels/        the node's labels, as NVIDIA's GPU feature discovery has them
reports        events, log and figures in one call
promptness     being answered at once on a busy node
ending         ends the process in time, whatever hangs
running        puts it all together
"""

import os

# gRPC looks at this once, when it is imported. Its newer way of listening hands each call through
# more threads: 14 waits in a call of the kubelet's in place of 8 (gRPC 1.85), each of which takes
# milliseconds on a node whose processors are busy.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")

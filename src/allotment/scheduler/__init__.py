# SPDX-License-Identifier: Apache-2.0
"""The scheduler's service: what kube-scheduler asks about pods with GPUs, and the webhook.

book        who has what, who is about to: states and events, no I/O
needs       what a pod asks for, out of its own annotations and resources
wire        kube-scheduler's JSON
extender    filter, prioritize, bind: bytes in, bytes out
preempting  preempt: which pods are to end for another one
nominations what they leave, kept for that one
binding     carries a binding out, until its outcome is known
leading     which of several replicas answers
serving     HTTP
sharepods   KubeShare's SharePods, each of which gets its pod
running     puts all of it together
"""

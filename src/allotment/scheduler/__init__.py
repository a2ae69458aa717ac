# SPDX-License-Identifier: Apache-2.0
"""The scheduler service: an extender for kube-scheduler, and the admission webhook.

core/        devices of each pod: states and events, no I/O
extender/    filter, prioritize, preempt, bind
admission/   the webhook that translates pods, and the API server's rules
tls/         certificates: issue, rotate, reload
explain      why a pod is on its node or waits
leader       election and endpoint
feed         quotas and unconfirmed pods
serving      HTTP
sharepods    KubeShare's SharePods
running      starts the parts
"""

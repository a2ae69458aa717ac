# SPDX-License-Identifier: Apache-2.0
"""What the scheduler extender costs beside a real kube-scheduler."""

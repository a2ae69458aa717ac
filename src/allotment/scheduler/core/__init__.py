# SPDX-License-Identifier: Apache-2.0
"""The scheduler's books: which pod has or will get which GPUs. No I/O and no Kubernetes client."""

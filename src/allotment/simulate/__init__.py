# SPDX-License-Identifier: Apache-2.0
"""What a policy would make of a cluster: traces, and live clusters, replayed through `placement`.

The same policies on the same arrays as the scheduler's; nothing here decides where a pod goes.
"""

# SPDX-License-Identifier: Apache-2.0
"""The admission webhook: translates pods, and the API server's rules that call it."""

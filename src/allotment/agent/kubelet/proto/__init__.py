# SPDX-License-Identifier: Apache-2.0
"""The kubelet's own interfaces: its .proto files as they are, and the messages made of them.

Written by tools/generate_protos.py; a test makes them again and compares.
"""

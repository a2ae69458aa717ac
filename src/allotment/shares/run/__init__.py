# SPDX-License-Identifier: Apache-2.0
"""`allot run`: a command in a share, as if started by the shell."""

# SPDX-License-Identifier: Apache-2.0
"""`python -m allotment` is `allot`."""

from allotment.cli import main

if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What tests of the API server's clients have in common."""

import pytest
from api_server_twin import Server


@pytest.fixture
def server() -> Server:
    """A scripted API server."""
    return Server()

"""The hospital of the MCP tests, and its server over HTTP, once for each file."""

import pytest


@pytest.fixture(scope="module")
def hospital(tmp_path_factory):
    """Images, scans, runs and an audit with canaries in the place of patients."""
    from tests.integrations.mcp_hospital import build_hospital

    return build_hospital(tmp_path_factory)


@pytest.fixture(scope="module")
def http_server(hospital):
    """The address of a server over HTTP."""
    from tests.integrations.mcp_hospital import run_http_server

    with run_http_server(hospital) as address:
        yield address

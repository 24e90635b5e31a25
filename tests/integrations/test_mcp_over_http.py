"""`camscope mcp` over HTTP: every tool, files that it saves, and requests that it refuses."""

import anyio
import pytest

pytest.importorskip("mcp")
pytest.importorskip("pydicom")
pytest.importorskip("httpx2")

import httpx2

from camscope import GradCAM, load_model
from tests.integrations.mcp_hospital import (
    TOKEN,
    call_every_tool,
    call_what_must_be_refused,
    call_with_scans,
    connect_over_http,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def test_over_http(hospital, http_server):
    seen, events = [], []

    async def on_progress(done, total, message):
        events.append(message)

    async def main():
        async with connect_over_http(http_server) as client:
            await call_every_tool(client, hospital, seen)
            await call_what_must_be_refused(client, hospital, seen)
            await call_with_scans(client, hospital, seen)
            arguments = {"image": "photos/0.png", "save": "new.npz"}
            reply = await client.call_tool("explain", arguments, progress_callback=on_progress)
            assert not reply.is_error, reply.content
            assert reply.structured_content["saved"] == "new.npz"
            for name, part in (
                ("new.npz", "exists"),
                ("../new.png", "outside"),
                ("link.png", "exists"),
                ("a.py", ".npz"),
            ):
                reply = await client.call_tool("explain", {"image": "photos/0.png", "save": name})
                assert reply.is_error
                assert part in reply.content[0].text

    anyio.run(main)
    assert events == ["gradcam"]
    assert not hospital.cage.found("\n".join(seen).encode())
    from camscope import Explanation

    direct = GradCAM(load_model("phantom")).explain(hospital.root / "photos" / "0.png")
    saved = Explanation.load(hospital.root / "new.npz")
    assert (saved.attribution == direct.attribution).all()
    assert saved.name == "photos/0.png"


def test_http_refuses_wrong_tokens_hosts_origins_and_bodies(http_server):
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
    accept = {"Accept": "application/json, text/event-stream", "Authorization": f"Bearer {TOKEN}"}
    with httpx2.Client(timeout=20) as session:

        def status(content=None, **headers):
            merged = {name: value for name, value in {**accept, **headers}.items() if value is not None}
            keywords = {"json": body} if content is None else {"content": content}
            return session.post(http_server, headers=merged, **keywords).status_code

        assert status() in (200, 400)  # the token is right; a session may be missing
        assert status(Authorization=None) == 401
        assert status(Authorization=f"Bearer {TOKEN[:-1]}") == 401
        assert status(Authorization=f"Bearer {TOKEN}x") == 401
        assert status(Host="evil.example") == 421
        assert status(Origin="http://evil.example") == 403
        assert status(content=b"x" * (2**20 + 1)) in (400, 413)
        assert session.get(http_server.replace("/mcp", "/other"), headers={"Authorization": ""}).status_code == 401

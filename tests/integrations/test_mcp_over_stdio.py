"""`camscope mcp` over stdio, and calls that are canceled or refused."""

import anyio
import pytest

pytest.importorskip("mcp")
pytest.importorskip("pydicom")
pytest.importorskip("httpx2")


from camscope import GradCAM, load_model, run_batch
from camscope.batch import BatchRun
from camscope.batch.batch_runner import PrivacyOptions
from camscope.errors import InputError
from camscope.integrations.mcp_server import CallRunner
from camscope.integrations.mcp_tools import ToolResult
from camscope.integrations.mcp_workspace import Workspace
from tests.integrations.mcp_hospital import (
    call_every_tool,
    call_what_must_be_refused,
    call_with_scans,
    connect_over_stdio,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def test_over_stdio(hospital):
    seen = []

    async def main():
        async with connect_over_stdio(hospital) as client:
            await call_every_tool(client, hospital, seen)
            await call_what_must_be_refused(client, hospital, seen)
            await call_with_scans(client, hospital, seen)
            reply = await client.call_tool("explain", {"image": "photos/0.png", "save": "new.png"})
            assert reply.is_error
            assert "read-only" in reply.content[0].text

    anyio.run(main)
    assert hospital.cage.planted
    assert not hospital.cage.found("\n".join(seen).encode())
    assert str(hospital.folder) not in "".join(seen)
    assert not (hospital.root / "new.png").exists()


def test_a_canceled_call_stops_and_the_next_one_runs(hospital):
    model = load_model("phantom")
    runner = CallRunner(Workspace({"phantom": model}, [hospital.root]))
    passes = []

    class Silent:
        async def report_progress(self, *args):
            pass

    def endless(workspace, report):
        import torch

        while True:
            passes.append(1)
            model(torch.zeros(1, 1, 64, 64, device="cpu", dtype=torch.float32))

    def quick(workspace, report):
        from camscope.integrations import mcp_reply_schemas as schemas

        return ToolResult("done", schemas.MethodsReply(methods=[], versions={}))

    async def main():
        with anyio.move_on_after(0.3) as scope:
            await runner.run(Silent(), endless)
        assert scope.cancelled_caught
        with anyio.fail_after(20):
            assert (await runner.run(Silent(), quick)).content[0].text == "done"
        count = len(passes)
        await anyio.sleep(0.1)
        assert passes
        assert len(passes) == count

    anyio.run(main)


def test_runs_that_name_scans_are_refused(hospital):
    folder, model = hospital.folder / "clinical", load_model(f"{hospital.folder / 'model.py'}:flat")
    scan = next((hospital.root / "scans").glob("*.dcm"))
    options = PrivacyOptions(profile="clinical")
    run_batch(GradCAM(model), [str(scan)], folder, [1], privacy=options)
    with pytest.raises(InputError, match="--profile research"):
        Workspace({"scans": model}, [hospital.root], {"clinical": BatchRun(folder)})

"""The benchmark's own arithmetic, by worked numbers, and one pass over a tiny model; how fast anything is, is not tested."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from camscope.explainers import METHODS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is not installed
agreement, cam, cases, family, import_time, memory, peers, report, tables, timing, tools, command = (
    importlib.import_module(f"benchmarks.{name}")
    for name in (
        *("agreement", "cam", "cases", "family", "import_time", "memory", "peers", "report", "tables", "timing"),
        *("tool", "__main__"),
    )
)


class Tiny(nn.Module):
    """A convolution, an activation, the mean over space, a linear head: the gradient is w / cells where it passes."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.act = nn.ReLU(inplace=True) if in_place else nn.Identity()
        self.head = nn.Linear(6, 10)

    def forward(self, x):
        return self.head(self.act(self.features(x)).mean((2, 3)))


def tiny(in_place=False):
    torch.manual_seed(3)
    return cases.ready("Tiny", Tiny(in_place).double(), "features", torch.randn(2, 3, 12, 16).double())


def by_hand(case):
    with torch.no_grad():
        activation = case.model.features(case.x)
        passed = (activation > 0) if isinstance(case.model.act, nn.ReLU) else torch.ones_like(activation)
        share = passed.double().mean((2, 3)) / activation[0, 0].numel()
        weights = case.model.head.weight[case.classes] * share
        return (weights[:, :, None, None] * activation).sum(1).relu()


def test_a_machine_that_slows_down_leaves_the_ratios_alone():
    pace = iter([1.0] * 3 + [40.0] * 3 + [0.5] * 3 + [7.0] * 3)
    tasks = {name: lambda work=work: work * next(pace) for name, work in {"base": 4, "a": 8, "b": 1}.items()}
    spreads = timing.ratios(timing.in_turns(tasks, rounds=4), "base")
    assert spreads["a"] == timing.Spread(2, 2, 2)
    assert spreads["b"] == timing.Spread(0.25, 0.25, 0.25)


def test_every_round_begins_with_the_yardstick_and_nobody_always_follows_it():
    order = []
    tasks = {name: lambda name=name: order.append(name) or 1.0 for name in ("base", "a", "b", "c")}
    timing.in_turns(tasks, rounds=3)
    rounds = ["".join(order[i : i + 4]) for i in (0, 4, 8)]
    assert rounds == ["baseabc", "basebca", "basecab"]


def test_the_clock_runs_for_the_work_alone_and_the_quartiles_are_the_middle_half():
    events = []
    ticks = iter([3.0, 5.5])
    taken = timing.seconds(lambda: events.append("run"), clock=lambda: events.append("clock") or next(ticks))
    assert taken == 2.5
    assert events == ["clock", "run", "clock"]
    assert timing.Spread.of([5.0, 1.0, 2.0, 100.0, 3.0]) == timing.Spread(3.0, 2.0, 5.0)
    assert timing.Spread.of([7.0]) == timing.Spread(7.0, 7.0, 7.0)


def test_the_distance_of_maps_by_hand():
    ours = torch.tensor([[[1.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    other = torch.tensor([[[2.0, 1.0], [-4.0, 0.0]], [[-1.0, -2.0], [0.0, 0.0]]])
    assert agreement.difference(other, ours) == 0.5
    assert agreement.difference(1e-30 * ours, ours) == 0
    assert agreement.empty(other) == 1
    with pytest.raises(ValueError, match="tokens"):
        agreement.difference(torch.ones(2, 768), ours)


def test_cases_are_ready_for_gradients():
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), *pooled)
    nn.init.zeros_(model[4].weight)
    nn.init.zeros_(model[4].bias)
    x = 100 + 30 * torch.randn(16, 3, 8, 8)
    case = cases.ready("asleep", model, "1", x)
    assert bool(model[4].weight.any())
    assert not model.training
    assert model[1].momentum == 0.1
    normal = model[1](model[0](x))
    assert torch.allclose(normal.mean((0, 2, 3)), torch.zeros(4), atol=1e-3)
    assert torch.allclose(normal.std((0, 2, 3)), torch.ones(4), atol=1e-2)
    assert case.classes == model(x).argmax(1).tolist()


def test_right_wrong_absent_and_broken_tools(monkeypatch):
    case = tiny(in_place=True)

    @contextmanager
    def right(case, method="gradcam"):
        yield tools.Tool(lambda: 5 * by_hand(case), lambda heat: heat)

    @contextmanager
    def wrong(case, method="gradcam"):
        yield tools.Tool(lambda: by_hand(case).flip(-1), lambda heat: heat)

    def absent(case, method="gradcam"):
        raise ModuleNotFoundError("No module named 'absent'")

    def broken(case, method="gradcam"):
        raise RuntimeError("it is | broken\nand says so at length")

    others = {"right": right, "wrong": wrong, "absent": absent, "broken": broken}
    monkeypatch.setattr(peers, "TOOLS", {report.OURS: peers.camscope, **others})
    figures = {figure.tool: figure for figure in cam.beside_peers(case, rounds=2)}
    assert figures["right"].difference < 1e-12
    assert figures["wrong"].difference > 0.05
    assert figures["absent"].value is None
    assert figures["absent"].note == "not installed"
    assert figures["broken"].value is None
    assert figures["broken"].note == "it is | broken"
    ours = figures[report.OURS]
    assert ours.goal == 1.08
    assert ours.low <= ours.value <= ours.high
    assert ours.low > 0
    assert ours.forward > 0
    table = report.tables(list(figures.values()))
    columns = {line.count("|") for line in table.splitlines() if line.startswith("|")}
    assert len(columns) == 1
    assert "n/a: not installed" in table
    assert "n/a: it is / broken" in table


@pytest.mark.parametrize(
    ("tool", "package"), [("grad-cam", "pytorch_grad_cam"), ("torchcam", "torchcam"), ("captum", "captum")]
)
def test_an_installed_toolkit_gives_the_closed_form_and_leaves_the_model_bare(tool, package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{tool} is not installed")
    case = tiny()
    with peers.open_tool(tool, case) as opened:
        heat = opened.to_maps(opened.run())
    assert agreement.difference(heat, by_hand(case)) < 1e-6
    assert agreement.empty(by_hand(case)) == 0
    assert not any(part._forward_hooks or part._backward_hooks for part in case.model.modules())
    assert all(parameter.grad is None for parameter in case.model.parameters())


def test_tokens_are_told_to_the_others_without_their_prefix():
    case = cases.Case("tokens", nn.Identity(), "", torch.zeros(1), [0], prefix=1)
    tokens = torch.arange(5.0).view(1, 5, 1).expand(1, 5, 2)
    assert tools.channels_first(case)(tokens)[0, 1].tolist() == [[1, 2], [3, 4]]


HOLDING = """
from contextlib import contextmanager
import sys
sys.path[:0] = ["..", "../src"]
import torch
from benchmarks import memory, peers, report
from benchmarks import tool as tools
from tests.benchmarks.test_benchmarks import tiny

@contextmanager
def holding(case, method="gradcam"):
    yield tools.Tool(lambda: torch.ones(48 * 2**20 // 8, dtype=torch.float64).sum(), lambda heat: heat)

peers.TOOLS["holding"] = holding
print(memory.above_inference("holding", tiny()), memory.above_inference(report.OURS, tiny()))
"""


@pytest.mark.skipif(not memory.CLEAR.exists(), reason="the peak of the resident set cannot be reset here")
@pytest.mark.thorough  # test_semantics_numbers has a peak in a child
def test_the_peak_counts_what_is_held_for_a_moment():
    """In a child, as the table's figures are: here other tests' memory would be freed meanwhile."""
    child = [sys.executable, "-c", HOLDING]
    told = subprocess.check_output(child, env={**os.environ, **memory.ALLOCATOR}, cwd=Path(__file__).parents[1])
    held, ours = map(float, told.split())
    assert 40 < held < 60
    assert ours < 20


def rows_of_memory(monkeypatch, answer, *words):
    """Those of some words of the command line, with the children's answer made up, and what each was started with."""
    started = []

    def fresh(*arguments, **environment):
        started.append(arguments[2:])
        return answer(arguments[2:])

    monkeypatch.setattr(memory, "fresh", fresh)
    monkeypatch.setattr(family, "case_or_random", lambda *_: tiny())
    options = command.read_options(["--only", "memory", "--device", "cpu", "--batch", "2", *words])
    return [figure for row in tables.measured(options) for figure in row], started


def says(number):
    return lambda arguments: subprocess.CompletedProcess(arguments, 0, f"a line of a toolkit\n{number}\n", "")


def test_every_method_has_a_row_of_memory_on_what_the_family_asks_it(monkeypatch):
    monkeypatch.setattr(peers, "TOOLS", {report.OURS: lambda case, method: nullcontext()})
    figures, started = rows_of_memory(monkeypatch, says(7.5), "--repeats", "3")
    assert {arguments[1] for arguments in started} == set(METHODS)
    assert all(arguments[2:] == ("cpu", "2") for arguments in started)
    times = {name: sum(arguments[1] == name for arguments in started) for name in METHODS}
    assert (times["gradcam"], times["scorecam"]) == (3, 1)
    works = {figure.work for figure in figures}
    assert {"gradcam, batch 2", "scorecam, batch 1", "sscam, n_samples=2, batch 1", "rollout, batch 2, Tiny"} <= works
    assert [(figure.work, figure.goal) for figure in figures if figure.goal] == [("gradcam, batch 2", 50)]
    assert {figure.value for figure in figures} == {7.5}


def test_memory_of_what_a_toolkit_cannot_is_a_cell_and_only_what_can_be_opened_starts_a_process(monkeypatch):
    def none(case, method):
        raise tools.NotOfferedError(method)

    def dies(arguments):
        return subprocess.CompletedProcess(arguments, 1, "", "Traceback\nMemoryError: no room")

    monkeypatch.setattr(peers, "TOOLS", {report.OURS: peers.camscope, "none": none})
    figures, started = rows_of_memory(monkeypatch, dies, "--methods", "layercam")
    assert started == [(report.OURS, "layercam", "cpu", "2")]
    assert [(figure.value, figure.note) for figure in figures] == [(None, "MemoryError: no room"), (None, "")]
    assert [figure.work for figure in rows_of_memory(monkeypatch, says(1), "--quick")[0]] == ["gradcam, batch 2"] * 2


def test_a_child_measures_the_method_that_it_was_started_for(monkeypatch, capsys):
    asked = []

    @contextmanager
    def holding(case, method):
        yield tools.Tool(lambda: asked.append(method), lambda heat: heat)

    def peak(device, run, calls=1):
        before = len(asked)
        for _ in range(calls):
            run()
        return 2**20 * (100 + ({"layercam": 48, "scorecam": 24}[asked[-1]] if len(asked) > before else 0))

    monkeypatch.setattr(memory, "peak", peak)

    monkeypatch.setitem(peers.TOOLS, "holding", holding)
    monkeypatch.setattr(family, "case_or_random", lambda *_: tiny())
    memory.main("holding", "layercam", "cpu", "2")
    assert float(capsys.readouterr().out) == 48
    memory.main("holding", "scorecam", "cpu", "2")
    assert float(capsys.readouterr().out) == 24
    assert asked == ["layercam", "layercam", "scorecam"]


def test_an_import_that_fails_is_a_line_and_not_the_end(monkeypatch):
    monkeypatch.setattr(import_time, "PROGRAM", import_time.PROGRAM.replace("import torch\n", ""))  # two seconds
    figure = import_time._figure("imports", "absent", "import no_such_module_anywhere", 1)
    assert figure.value is None
    assert "no_such_module_anywhere" in figure.note
    assert report.Figure("import", "imports", "x", 0.2, goal=0.1).verdict == "over"
    assert report.Figure("import", "imports", "x", 0.1, goal=0.1).verdict == "ok"


@pytest.mark.parametrize(("there", "device"), [(True, "cuda"), (False, "cpu")])
def test_what_is_measured_is_the_card_where_there_is_one(monkeypatch, there, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert command.read_options([]).device == device
    assert command.read_options(["--device", "cpu"]).device == "cpu"


@pytest.mark.slow
def test_one_run_prints_and_writes_the_table(monkeypatch, tmp_path, capsys):
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- cpu -->\nstale\n<!-- /cpu -->\nafter\n", encoding="utf-8")
    monkeypatch.setattr(cases, "build", lambda name, device, batch: tiny())
    monkeypatch.setattr(memory, "figures", lambda *_: [])
    monkeypatch.setattr(import_time, "figures", lambda *_: [])
    monkeypatch.setattr(command, "PAGE", page)
    monkeypatch.setattr(command, "HERE", tmp_path)
    for package in ("pytorch_grad_cam", "torchcam", "torchcam.methods", "captum", "captum.attr"):
        monkeypatch.setitem(sys.modules, package, None)
    kept = tmp_path / "figures.json"
    asked = ["--quick", "--only", "gradcam", "methods", "classes", "--rounds", "2", "--json", str(kept), "--write"]
    asked += ["--device", "cpu"]
    assert command.main(asked) == 0
    printed = capsys.readouterr().out
    assert printed.count("n/a: not installed") == 3
    assert all(f"{method}, Tiny" in printed for method in ("gradcam", "hirescam", "layercam", "five explanations"))
    content = json.loads(kept.read_text())
    assert content["machine"]["torch"] == torch.__version__
    assert {figure["section"] for figure in content["figures"]} == {"gradcam", "methods", "classes"}
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- cpu -->")
    assert text.endswith("<!-- /cpu -->\nafter\n")
    assert "stale" not in text
    assert "| Tiny `features` |" in text
    with pytest.raises(ValueError, match="<!-- cuda -->"):
        report.updated(text, "cuda", "")

"""The benchmark's tables: their arithmetic by worked numbers, and the reasons for every other answer; nothing is timed."""

import importlib
import json
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from camscope.explainers import METHODS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is not installed
agreement, by_captum, by_grad_cam, by_torchcam, cases, choices, deviations, parity, peers, report, tools, trained = (
    importlib.import_module(f"benchmarks.{name}")
    for name in (
        *("agreement", "by_captum", "by_grad_cam", "by_torchcam", "cases", "choices", "deviations", "parity", "peers"),
        *("report", "tool", "trained"),
    )
)
ablation, beside, family, score, situations, tables, command = (
    importlib.import_module(f"benchmarks.{name}")
    for name in ("ablation", "beside", "family", "score", "situations", "tables", "__main__")
)
Figure, OURS = report.Figure, report.OURS


def tiny():
    torch.manual_seed(3)
    body = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU())
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10))
    return cases.ready("Tiny", model, "0", torch.randn(2, 3, 12, 16))


def maps(*rows):
    return torch.tensor(rows, dtype=torch.float64)[:, None]


def test_correlation_by_hand():
    ours = maps([1, 2, 3, 4], [0, 0, 0, 0], [1, 0, 0, 0])
    assert agreement.correlation(1e-30 * ours, ours) == pytest.approx(1)
    assert agreement.correlations(maps([4, 3, 2, 1], [1, 2, 3, 4], [5, 5, 5, 5]), ours) == [pytest.approx(-1)]
    assert agreement.correlation(maps([7, 7]), maps([1, 2])) is None
    # ours cuts off what is negative, so theirs is cut off as well: (0, 0, 3) and (0, 0, 1); signed they would be 0.87
    assert agreement.correlation(maps([-2, 0, 3]), maps([0, 0, 1])) == pytest.approx(1)
    # both are signed: compared as they are. (-1, 0, 1) with (-1, 1, 0): 1/2
    assert agreement.correlation(maps([-1, 0, 1]), maps([-1, 1, 0])) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="tokens"):
        agreement.correlation(torch.ones(2, 768), ours)


def test_spearman_sees_ranks_alone_and_equal_cells_share_theirs():
    assert agreement.spearmans(maps([1, 10, 100]), maps([-5, -4, 7])) == [pytest.approx(1)]
    # ranks 1.5 1.5 3 4 and 1 2 3 4: 4.5 / sqrt(4.5 * 5)
    assert agreement.spearmans(maps([0, 0, 1, 2]), maps([1, 2, 3, 4])) == [pytest.approx((4.5 / 5) ** 0.5)]
    assert agreement.spearmans(maps([3, 3]), maps([1, 2])) == []


def test_correlations_are_never_rounded_up():
    assert report.rounded_down(0.99999) == "0.9999"
    assert report.rounded_down(0.98998) == "0.9899"
    assert report.rounded_down(1 - 1e-9) == "1.0000"
    assert report.rounded_down(-0.30001) == "-0.3001"


def test_limits_from_both_sides_and_tools_without_the_method():
    assert Figure("ablation", "faster", OURS, 39.9, floor=40).verdict == "under"
    assert Figure("ablation", "faster", OURS, 40.0, floor=40).verdict == "ok"
    row = [Figure("family", "x", OURS, 1.0), Figure("family", "x", "other", None), Figure("family", "x", "third", 2e-6)]
    assert "goal" not in report.tables([Figure("parity", "x", "other", 0.5, floor=0.9999)])
    assert report.tables(row).splitlines()[-1] == "| x | 1.00 | – | 2e-06 |"


def test_times_faster_and_the_distance_stand_in_rows_of_their_own():
    ours, theirs = Figure("ablation", "w", OURS, 4.0), Figure("ablation", "w", "grad-cam", 200.0, difference=2e-5)
    faster, apart = ablation.against(ours, theirs)
    assert (faster.value, faster.verdict) == (50, "ok")
    assert (apart.value, apart.verdict) == (2e-5, "over")
    assert ablation.against(ours, Figure("ablation", "w", "grad-cam", None)) == []


def test_the_fastest_other_toolkit_is_the_yardstick():
    row = [Figure("family", "w", tool, value) for tool, value in ((OURS, 3.0), ("a", 6.0), ("b", 2.0), ("c", None))]
    assert family.with_ratio(row)[-1].value == 1.5
    alone = [row[0], row[3]]
    assert family.with_ratio(alone) == alone


def test_every_registered_method_has_a_row_by_itself_and_the_slow_ones_are_asked_about_one_image(monkeypatch):
    asked = []

    def note(case, name, rounds, **kwargs):
        asked.append((name, len(case.x), rounds))
        return [Figure("family", kwargs["work"], OURS, 1.0)]

    monkeypatch.setattr(family, "case_or_random", lambda *_: tiny())
    monkeypatch.setattr(family, "beside_peers", note)
    works = [row[0].work for row in family.figures(9, "cpu", 2)]
    assert {name for name, _, _ in asked} == set(METHODS)
    assert ("gradcam", 2, 9) in asked
    assert ("scorecam", 1, 3) in asked
    assert "sscam, n_samples=2, batch 1" in works


def test_other_toolkits_are_run_for_the_same_method_with_ours_scaled_as_they_scale(monkeypatch):
    seen = []

    @contextmanager
    def other(case, method):
        seen.append(method)
        yield tools.Tool(
            lambda: 10 + 5 * METHODS[method](case.model, case.layer).attribute(case.x, case.classes).cpu(),
            lambda heat: heat,
            finish=lambda heat: 10 + 7 * heat,
        )

    def none(case, method):
        raise tools.NotOfferedError(method)

    monkeypatch.setattr(peers, "TOOLS", {OURS: peers.camscope, "other": other, "none": none})
    row = beside.beside_peers(tiny(), "layercam", 1, section="family", work="w")
    figures = {figure.tool: figure for figure in row}
    assert set(seen) == {"layercam"}
    assert figures["other"].correlation == pytest.approx(1)
    assert (figures["none"].value, figures["none"].note) == (None, "")


def test_names_of_others_are_names_of_ours():
    for module in (by_captum, by_grad_cam, by_torchcam):
        assert set(module.NAMES) <= set(METHODS)
        assert set(getattr(module, "SCORED", ())) | set(getattr(module, "ENLARGEMENT", ())) <= set(module.NAMES)
    for method, settings in tools.SETTINGS.items():
        assert all(hasattr(METHODS[method], name) for name in settings)


def test_plain_passes_are_as_many_as_the_method_runs():
    case = trained.first(tiny())
    assert score.rows(case, lambda: case.model(torch.cat([case.x] * 5))) == 5
    for passes in (7, 64, 70):
        assert score.rows(case, score.plain(case, passes)) == passes


def test_what_grad_cam_does_to_a_map():
    case = tiny()
    finished = by_grad_cam.finish(case)(torch.tensor([[[-3.0, 1.0], [2.0, 5.0]], [[4.0, 4.0], [4.0, 4.0]]]))
    assert finished.shape == (2, 12, 16)
    assert finished[0, 0, 0] == 0
    assert finished[0, -1, -1] == 1
    assert finished[1].abs().max() == 0


def test_choices_are_what_they_say_by_hand():
    case = tiny()
    activation, gradient = torch.tensor([[[1.0, 3.0]]]), torch.tensor([[[2.0, -1.0]]])

    def weight(kind):
        return float(kind(case.model, case.layer).weights(activation, gradient))

    assert weight(choices.NoDenominator) == 8  # 2² · 2
    assert weight(choices.AbsoluteEpsilon) == pytest.approx(2 * 4 / (2 * 4 + 8 * 4))
    own = METHODS["gradcam++"](case.model, case.layer)
    numerator, denominator, _ = own.quotient_terms(activation, gradient)
    assert float((numerator / denominator).sum()) == pytest.approx(2 * 4 / (2 * 4 + 8 * 4))


def test_a_deviation_names_what_exists_and_once():
    rows = [(one.work, one.peer) for one in deviations.DEVIATIONS]
    assert len(set(rows)) == len(rows)
    offered = {"grad-cam": by_grad_cam.NAMES, "torchcam": by_torchcam.NAMES, "captum": by_captum.NAMES}
    for one in deviations.DEVIATIONS:
        assert one.method in offered[one.peer]
        assert not one.situation or one.situation in situations.SITUATIONS
        assert one.does
        assert one.right


def test_every_other_answer_that_was_measured_has_its_reason_and_its_proof():
    stored = json.loads((ROOT / "benchmarks" / "results" / "cpu.json").read_text(encoding="utf-8"))["figures"]
    measured = [figure for figure in stored if figure["section"] == "parity" and figure["value"] is not None]
    if not measured:
        pytest.skip("parity is not measured yet")
    reasons = {(one.work, one.peer): one for one in deviations.DEVIATIONS}
    page = (ROOT / "docs" / "evidence" / "parity.md").read_text(encoding="utf-8")
    for figure in measured:
        if figure["value"] < parity.SAME:
            assert reasons[figure["work"], figure["tool"]].does in page
    assert all(figure["value"] >= parity.SAME for figure in stored if figure["section"] == "choice")


def test_some_tables_measured_anew_leave_the_others(monkeypatch, tmp_path):
    old = [Figure("family", "a", OURS, 1.0), Figure("family", "b", OURS, 2.0), Figure("score", "a", OURS, 3.0)]
    new = [Figure("family", "a", OURS, 9.0)]
    assert [figure.value for figure in report.merged(old, new)] == [3, 9]
    assert [figure.value for figure in report.merged(old, new, rows=True)] == [2, 3, 9]
    monkeypatch.setattr(command, "HERE", tmp_path)
    report.to_json(command.stored("cpu"), {"torch": "1", "rounds": 5}, old)
    assert report.from_json(command.stored("cpu")) == ({"torch": "1", "rounds": 5}, old)
    options = command.read_options(["--only", "family"])
    assert len(command.with_kept(options, "cpu", {"torch": "1", "rounds": 9}, new)) == 2
    with pytest.raises(SystemExit, match="another torch"):
        command.with_kept(options, "cpu", {"torch": "2", "rounds": 9}, new)


def test_every_table_can_be_asked_for_and_has_a_title():
    assert set(report.TITLES) == set(tables.TABLES)
    assert command.read_options([]).tables == list(tables.TABLES)
    assert command.read_options(["--quick"]).tables == list(command.QUICK)
    assert set(command.QUICK) <= set(tables.TABLES)
    with pytest.raises(SystemExit):
        command.read_options(["--only", "nothing"])


def test_the_page_of_deviations_pairs_what_was_found_with_its_proof():
    found = [
        Figure("parity", "gradcam++", "torchcam", 0.08, note="ResNet-18 `layer3`", floor=parity.SAME),
        Figure("choice", "gradcam++", "torchcam", 0.999999, floor=parity.SAME),
    ]
    line = next(line for line in parity.page(found).splitlines() if line.startswith("| gradcam++ | torchcam"))
    assert "| 0.0800 |" in line
    assert line.endswith("| 0.9999 |")
    assert parity.page([]) == ""

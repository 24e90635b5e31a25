"""The leaderboard's page: which numbers stand where, who is compared with whom, and what a method is said to cost."""

import importlib
import signal
import sys
import time
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed
leaderboard, board, prices = (
    importlib.import_module(f"benchmarks.{name}") for name in ("leaderboard", "leaderboard_page", "prices")
)
METHODS = importlib.import_module("camscope.explainers").METHODS


def table(**methods):
    """A long form, [method]: a value for each row; names in capitals are controls."""
    rows = [
        {
            "row": row,
            "method": name.lower(),
            "layer": None,
            "parameters_digest": None,
            "target": 0,
            "control": name.isupper(),
        }
        | {"metric": metric, "value": value, "reason": None, "center_in_box": row % 2 == 0}
        for name, values in methods.items()
        for metric in board.FIRST
        for row, value in values.items()
    ]
    kinds = {"layer": pa.string(), "parameters_digest": pa.string(), "reason": pa.string()}
    return pa.table({name: pa.array([row[name] for row in rows], kinds.get(name)) for name in rows[0]})


def spend(seconds):
    begin = time.process_time()
    while time.process_time() - begin < seconds:
        pass


def results():
    quick = table(
        gradcam={0: 0.5, 1: 0.7, 2: 0.9, 3: 0.2},
        saliency=dict.fromkeys(range(4), 0.1),
        UNIFORM=dict.fromkeys(range(4), 0.3),
    )
    slow = table(xrai={1: 0.9, 3: 0.6}, UNIFORM={1: 0.9, 3: 0.9})  # a control of another grid
    found = {
        "rise": (184.0, "about 184"),
        "sscam": (float("inf"), "more than 6"),
        "cam": (float("inf"), "no such layer"),
    }
    known = {"xrai": (9.5, "9.50"), "gradcam": (0.1, "0.06"), "saliency": (0.1, "0.12")}
    tables = {"all": quick, "slow": slow, "slowest": slow.slice(0, 0)}
    return board.Results(tables, {"slow": [1, 3], "slowest": [1]}, {**known, **found}, {"rise": {"n_samples": 10}})


def test_every_method_that_is_no_control_is_either_quick_or_slow_and_none_is_both():
    named = [*leaderboard.QUICK, *leaderboard.BRISK, *leaderboard.SLOW]
    assert sorted(named) == sorted({*named} | {name for name, kind in METHODS.items() if not kind.control})
    assert len(set(leaderboard.FEW)) == 20
    assert set(leaderboard.FEW) <= set(range(100))
    assert {*leaderboard.SAMPLES["slowest"]} < {*leaderboard.SAMPLES["slow"]}
    assert all(
        setting in signature(METHODS[name]).parameters for name, own in leaderboard.FEWER.items() for setting in own
    )


def test_slow_methods_stand_beside_grad_cam_and_the_controls_on_the_same_photographs():
    parts = results().parts()
    slow = parts["slow"].to_pylist()
    assert {row["method"] for row in slow} == {"gradcam", "uniform", "xrai"}
    assert {row["row"] for row in slow} == {1, 3}
    assert {row["value"] for row in slow if row["control"]} == {0.3}, "those of all photographs, not a slow run's own"
    assert {row["row"] for row in parts["off-center"].to_pylist()} == {1, 3}
    gaps = board.beside(parts["slow"])
    assert list(gaps) == ["xrai"]
    assert gaps["xrai"] == "0.30", "(0.9 - 0.7 + 0.6 - 0.2) / 2, of too few photographs for an interval"


def test_a_number_in_the_words_is_looked_up_in_the_tables():
    named = board.NAMED.findall(board.CONCLUSIONS)
    assert board.CONCLUSIONS.count("{") == len(named) > 0
    assert {part for _, part, _, _ in named} <= {"all", "off-center", *leaderboard.SAMPLES}
    assert {metric for *_, metric in named} <= {*board.FIRST, "gap"}


def test_what_is_in_no_table_is_named_with_the_reason_or_the_price():
    words = board.left_out(results())
    assert "| `cam` | no such layer |\n" in words
    assert "the passes): `rise` (about 184 s), `sscam` (more than 6 s)." in words
    assert "xrai" not in words


def test_passes_have_the_numbers_of_the_defaults():
    passes = board.passes({"hsic": {"n_samples": 10, "precision": "bf16"}})
    assert passes["rise"] == "1 + 4000"
    assert passes["xrai"] == "1 + 2 x (1 + 50), 2 x 50 back"
    assert passes["ablationcam"] == METHODS["ablationcam"].forward_passes
    assert passes["hsic"] == "1 + 10; `n_samples=10`, `precision='bf16'`"


@pytest.mark.slow
def test_a_price_is_measured_or_reckoned_from_the_steps_before_it_was_stopped(monkeypatch):
    clock = iter([0, 1.5, 10, 11.25, 20, 20.25, 30, 33])
    monkeypatch.setattr(prices, "time", SimpleNamespace(process_time=lambda: next(clock)))
    calls = []
    assert prices.price(lambda: calls.append(1), most=5) == (1.25, "1.25")
    assert len(calls) == 2, "1.5 s are brief: timed again"

    def counting():
        try:
            spend(30)
        except prices.TooDearError as error:
            error.add_note("rise, image 1 of 1: stopped after 20 of 4000 steps")
            raise

    assert prices.price(counting, most=0.2) == (50, "about 50"), "0.25 s for 20 of 4000 steps"
    assert prices.price(lambda: spend(30), most=0.2) == (float("inf"), "more than 0")
    assert signal.getsignal(signal.SIGPROF) == signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)

"""`python -m benchmarks`: camscope beside the usual toolkits, everything measured in this one run."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks import cam, cases, import_time, memory, report
from benchmarks.machine import machine

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
ROUNDS, QUICK_ROUNDS = 15, 3
MEMORY_CASE = "resnet18"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write what was asked for."""
    options = read_options(arguments)
    facts = machine(options.device)
    say(report.described(facts))
    figures: list[report.Figure] = []
    for part in measured(options):
        figures += part
        say(report.tables(part))
    print(f"\n{report.tables(figures)}")
    if options.json:
        report.to_json(options.json, facts, figures)
    if options.write:
        kind = options.device.partition(":")[0]
        report.to_json(HERE / "results" / f"{kind}.json", facts, figures)
        text = f"{report.described(facts)}; {options.rounds} rounds.\n\n{report.tables(figures)}"
        PAGE.write_text(report.updated(PAGE.read_text(encoding="utf-8"), kind, text), encoding="utf-8")
    return 0


def measured(options: argparse.Namespace) -> Iterator[list[report.Figure]]:
    """The parts of the table, one after another."""
    for name in options.models:
        case = cases.build(name, options.device, options.batch)
        yield cam.beside_peers(case, options.rounds)
        if name == options.models[0]:
            yield cam.every_method(case, options.rounds)
            yield cam.several_classes(case, options.rounds)
    yield memory.figures(options.memory, options.device, options.repeats)
    yield import_time.figures(options.repeats)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with what `--quick` stands for filled in."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small model and few rounds: a check, not a figure")
    parser.add_argument("--models", nargs="+", choices=cases.RECIPES, metavar="NAME", help=", ".join(cases.RECIPES))
    parser.add_argument("--rounds", type=int, help=f"times that every tool runs ({ROUNDS})")
    parser.add_argument("--repeats", type=int, help="fresh processes for each peak and each import (5)")
    parser.add_argument("--batch", type=int, default=cases.BATCH, help=f"images at once ({cases.BATCH})")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    parser.add_argument(
        "--write", action="store_true", help="put the tables into benchmarks/README.md, and the JSON beside"
    )
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: there is no CUDA here")
    options.models = options.models or (["mobilenet_v2"] if options.quick else list(cases.MODELS))
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    options.repeats = options.repeats or (1 if options.quick else 5)
    options.memory = MEMORY_CASE
    return options


def say(text: str) -> None:
    """What is known so far goes to the terminal's other channel; the whole table is the output."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

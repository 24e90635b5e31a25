"""`python -m benchmarks`: camscope beside the usual toolkits, everything measured in this one run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import cases, parity, report
from benchmarks.machine import machine
from benchmarks.tables import TABLES, measured

HERE = Path(__file__).parent
PAGE, PARITY_PAGE = HERE / "README.md", HERE.parent / "docs" / "evidence" / "parity.md"
ROUNDS, QUICK_ROUNDS = 9, 3
REPEATS = 3
QUICK = ("gradcam", "methods", "classes", "sharing", "memory", "import")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write what was asked for."""
    options = read_options(arguments)
    if options.page:
        for kind in ("cpu", "cuda"):
            if stored(kind).exists():
                write_pages(kind)
        return 0
    facts = {**machine(options.device), "rounds": options.rounds}
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
        some = options.only or options.methods
        report.to_json(stored(kind), facts, with_kept(options, kind, facts, figures) if some else figures)
        write_pages(kind)
    return 0


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with what `--quick` stands for filled in."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small model and few rounds: a check, not a figure")
    parser.add_argument("--only", nargs="+", choices=TABLES, metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--models", nargs="+", choices=cases.RECIPES, metavar="NAME", help=", ".join(cases.RECIPES))
    parser.add_argument(
        "--methods", nargs="+", metavar="NAME", help="of the tables family, memory and parity (every one)"
    )
    parser.add_argument("--rounds", type=int, help=f"times that every tool runs ({ROUNDS})")
    parser.add_argument(
        "--repeats", type=int, help=f"fresh processes for each quick method's peak and each import ({REPEATS})"
    )
    parser.add_argument("--batch", type=int, default=cases.BATCH, help=f"images at once ({cases.BATCH})")
    parser.add_argument("--photographs", type=int, help="of the tables parity (10) and bf16 (40), where they are here")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", default=here, help=f"cpu, cuda or cuda:1; here {here}, as cuda wherever there is one"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    parser.add_argument(
        "--write", action="store_true", help="put the tables into benchmarks/README.md, and the JSON beside"
    )
    parser.add_argument(
        "--page", action="store_true", help="draw the pages again from the stored JSON; measure nothing"
    )
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: there is no CUDA here")
    options.models = options.models or (["mobilenet_v2"] if options.quick else list(cases.MODELS))
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    options.repeats = options.repeats or (1 if options.quick else REPEATS)
    options.tables = options.only or (list(QUICK) if options.quick else list(TABLES))
    return options


def stored(kind: str) -> Path:
    """Where the figures of a kind of machine lie: cpu, or cuda."""
    return HERE / "results" / f"{kind}.json"


def with_kept(
    options: argparse.Namespace, kind: str, facts: dict[str, str | int], figures: list[report.Figure]
) -> list[report.Figure]:
    """The new figures among those that are stored, if these come from the same machine and versions."""
    if not stored(kind).exists():
        return figures
    before, old = report.from_json(stored(kind))
    changed = [name for name in facts if name != "rounds" and before.get(name) != facts[name]]
    if changed:
        raise SystemExit(f"results/{kind}.json was measured with another {', '.join(changed)}: measure all of it again")
    return report.merged(old, figures, rows=bool(options.methods))


def write_pages(kind: str) -> None:
    """The pages, from what is stored."""
    facts, figures = report.from_json(stored(kind))
    text = f"{report.described(facts)}.\n\n{report.tables(figures)}"
    PAGE.write_text(report.updated(PAGE.read_text(encoding="utf-8"), kind, text), encoding="utf-8")
    rows = parity.page(figures)
    if rows and kind == "cpu":
        page = PARITY_PAGE.read_text(encoding="utf-8")
        PARITY_PAGE.write_text(report.updated(page, "parity", rows), encoding="utf-8")


def say(text: str) -> None:
    """What is known so far goes to the terminal's other channel; the whole table is the output."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

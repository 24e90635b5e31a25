"""TABLES: everything that can be measured, by name; each yields its figures as they come."""

import argparse
from collections.abc import Callable, Iterator

from benchmarks import (
    ablation,
    batch,
    cam,
    cases,
    family,
    import_time,
    loops,
    memory,
    parity,
    precision,
    score,
    sharing,
)
from benchmarks.report import Figure

Parts = Iterator[list[Figure]]


def measured(options: argparse.Namespace) -> Parts:
    """The tables asked for, one after another."""
    for name in options.tables:
        yield from TABLES[name](options)


def _gradcam(options: argparse.Namespace) -> Parts:
    for name in options.models:
        yield cam.beside_peers(cases.build(name, options.device, options.batch), options.rounds)


def _methods(options: argparse.Namespace) -> Parts:
    yield cam.every_method(cases.build(options.models[0], options.device, options.batch), options.rounds)


def _classes(options: argparse.Namespace) -> Parts:
    yield cam.several_classes(cases.build(options.models[0], options.device, options.batch), options.rounds)


def _family(options: argparse.Namespace) -> Parts:
    yield from family.figures(options.rounds, options.device, options.batch, options.methods)


def _ablation(options: argparse.Namespace) -> Parts:
    yield ablation.figures(min(options.rounds, family.SLOW_ROUNDS), options.device)


def _score(options: argparse.Namespace) -> Parts:
    yield score.figures(min(options.rounds, family.SLOW_ROUNDS), options.device)


def _loops(options: argparse.Namespace) -> Parts:
    yield from loops.figures(options.rounds, options.device)


def _precision(options: argparse.Namespace) -> Parts:
    for name in options.models:
        yield precision.times(name, options.rounds, options.device, options.batch)


def _bf16(options: argparse.Namespace) -> Parts:
    yield from precision.maps(options.device, options.photographs or precision.PHOTOGRAPHS)


def _sharing(options: argparse.Namespace) -> Parts:
    yield sharing.figures(options.rounds, options.device)


def _memory(options: argparse.Namespace) -> Parts:
    methods = options.methods or (["gradcam"] if options.quick else None)
    yield from memory.figures(options.device, options.batch, options.repeats, methods)


def _import(options: argparse.Namespace) -> Parts:
    yield import_time.figures(options.repeats)


def _batch(options: argparse.Namespace) -> Parts:
    yield from batch.figures(min(options.rounds, batch.ROUNDS), options.device)


def _parity(options: argparse.Namespace) -> Parts:
    yield from parity.figures(options.device, options.photographs or parity.PHOTOGRAPHS, options.methods)


TABLES: dict[str, Callable[[argparse.Namespace], Parts]] = {
    "gradcam": _gradcam,
    "methods": _methods,
    "family": _family,
    "ablation": _ablation,
    "score": _score,
    "loops": _loops,
    "precision": _precision,
    "bf16": _bf16,
    "classes": _classes,
    "sharing": _sharing,
    "memory": _memory,
    "import": _import,
    "batch": _batch,
    "parity": _parity,
}

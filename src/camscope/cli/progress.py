"""Bars of progress: a command's own, and those of methods of many passes. One at a time is on the terminal."""

import contextlib
import datetime
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from camscope.cli import base
from camscope.plurals import plural

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from camscope.batch import Outcome
    from camscope.explainers import Explainer
    from camscope.explainers.core.method import Method

EVERY = 30.0  # seconds between two lines of progress where there is no terminal


class Bar:
    """A command's bar; silent where its console is no terminal."""

    def __init__(self, bar: "Progress", task: "TaskID") -> None:
        self._bar, self._task, self._begun = bar, task, 0

    def advance(self, steps: int = 1) -> None:
        """So many steps are done."""
        self._bar.advance(self._task, steps)

    def at(self, done: int, total: int) -> None:
        """So many steps are done, of how many."""
        self._bar.update(self._task, completed=done, total=total)

    def seen(self, done: int, what: str) -> None:
        """So many steps are done, and this is what there is to say of it."""
        self._bar.update(self._task, completed=done, description=base.shown(what))

    def begin(self, what: str) -> None:
        """The next step has this name, and those before it are done."""
        self._bar.update(self._task, description=base.shown(what), completed=self._begun)
        self._begun += 1

    @contextlib.contextmanager
    def beside(self, what: str) -> "Iterator[Callable[[int, int], None]]":
        """A second bar on the next line, told how many steps are done, of how many."""
        task = self._bar.add_task(base.shown(what), total=None)
        try:
            yield lambda done, total: self._bar.update(task, completed=done, total=total)
        finally:
            self._bar.remove_task(task)

    def make_room(self, working: "Sequence[Method]") -> None:
        """Be away while methods with a bar of their own work, for a terminal has one last line; then be back."""
        own = any(getattr(tool, "progress", False) for tool in working)
        (self._bar.stop if own else self._bar.start)()


@contextlib.contextmanager
def counting(what: str = "") -> "Iterator[Callable[[Outcome], None]]":
    """A bar on stderr with rate, failures and time left, told the outcome so far; without a terminal a line every 30 s.

    `what`: is counted.
    """
    console, begun = base.err(), time.monotonic()
    said = begun
    with _progress(console) as drawn:
        task = drawn.add_task("", total=None)

        def told(so_far: "Outcome") -> None:
            nonlocal said
            now, done = time.monotonic(), so_far.before + so_far.images
            rate = so_far.images / max(now - begun, 1e-9)
            words = f"{what}{': ' if what else ''}{rate:.1f} images/s, {so_far.failures} failed"
            drawn.update(task, completed=done, total=so_far.total, description=words)
            if not console.is_terminal and now - said >= EVERY and rate:
                said, left = now, datetime.timedelta(seconds=round((so_far.total - done) / rate))
                console.print(f"{done} of {plural(so_far.total, 'image')}, {words}, {left} left")

        yield told


@contextlib.contextmanager
def bar(what: str, total: int, console: "Console") -> Iterator[Bar]:
    """A bar of so many steps, beside which the methods' own bars have their place."""
    with _methods_bars_on_stderr(), _progress(console) as made:
        yield Bar(made, made.add_task(base.shown(what), total=total))


def _progress(console: "Console") -> "Progress":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def of_method(kind: "type[Explainer]") -> dict[str, Any]:
    """The setting by which a method shows its own bar, where it has one and somebody is there to see it."""
    return {"progress": True} if "progress" in signature(kind).parameters and sys.stderr.isatty() else {}


def silent(kind: "type[Explainer]") -> dict[str, Any]:
    """The setting by which a method shows no bar, where it has one: for a command with one of its own."""
    return {"progress": False} if "progress" in signature(kind).parameters else {}


@contextlib.contextmanager
def _methods_bars_on_stderr() -> Iterator[None]:
    """Methods draw on rich's console, which is stdout's: there it would go into the results."""
    import rich

    console = rich.get_console()
    before = console.__dict__
    rich.reconfigure(stderr=True)
    try:
        yield
    finally:
        console.__dict__ = before

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

    from camscope.batch import BatchOutcome
    from camscope.explainers import Explainer
    from camscope.explainers.core.method import BaseMethod

SECONDS_BETWEEN_LINES = 30.0  # seconds between two lines of progress where there is no terminal


class ProgressBar:
    """A command's bar; silent where its console is no terminal."""

    def __init__(self, progress: "Progress", task: "TaskID") -> None:
        self._progress, self._task, self._n_started = progress, task, 0

    def advance(self, n_steps: int = 1) -> None:
        """So many steps are done."""
        self._progress.advance(self._task, n_steps)

    def set_progress(self, done: int, total: int) -> None:
        """So many steps are done, of how many."""
        self._progress.update(self._task, completed=done, total=total)

    def set_status(self, done: int, text: str) -> None:
        """So many steps are done, and this is what there is to say of it."""
        self._progress.update(self._task, completed=done, description=base.display_text(text))

    def start_step(self, text: str) -> None:
        """The next step has this name, and those before it are done."""
        self._progress.update(self._task, description=base.display_text(text), completed=self._n_started)
        self._n_started += 1

    @contextlib.contextmanager
    def nested_bar(self, text: str) -> "Iterator[Callable[[int, int], None]]":
        """A second bar on the next line, told how many steps are done, of how many."""
        task = self._progress.add_task(base.display_text(text), total=None)
        try:
            yield lambda done, total: self._progress.update(task, completed=done, total=total)
        finally:
            self._progress.remove_task(task)

    def pause_for_methods(self, methods: "Sequence[BaseMethod]") -> None:
        """Be away while methods with a bar of their own work, for a terminal has one last line; then be back."""
        own = any(getattr(tool, "progress", False) for tool in methods)
        (self._progress.stop if own else self._progress.start)()


@contextlib.contextmanager
def outcome_progress(label: str = "") -> "Iterator[Callable[[BatchOutcome], None]]":
    """A bar on stderr with rate, failures and time left, told the outcome so far; without a terminal a line every 30 s.

    `label`: is counted.
    """
    console, begun = base.stderr_console(), time.monotonic()
    said = begun
    with _build_progress(console) as drawn:
        task = drawn.add_task("", total=None)

        def told(so_far: "BatchOutcome") -> None:
            nonlocal said
            now, done = time.monotonic(), so_far.n_done_before + so_far.n_processed
            rate = so_far.n_processed / max(now - begun, 1e-9)
            words = f"{label}{': ' if label else ''}{rate:.1f} images/s, {so_far.n_failures} failed"
            drawn.update(task, completed=done, total=so_far.n_images, description=words)
            if not console.is_terminal and now - said >= SECONDS_BETWEEN_LINES and rate:
                said, left = now, datetime.timedelta(seconds=round((so_far.n_images - done) / rate))
                console.print(f"{done} of {plural(so_far.n_images, 'image')}, {words}, {left} left")

        yield told


@contextlib.contextmanager
def progress_bar(label: str, total: int, console: "Console") -> Iterator[ProgressBar]:
    """A bar of so many steps, beside which the methods' own bars have their place."""
    with _redirect_method_bars_to_stderr(), _build_progress(console) as made:
        yield ProgressBar(made, made.add_task(base.display_text(label), total=total))


def _build_progress(console: "Console") -> "Progress":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def method_bar_settings(explainer_cls: "type[Explainer]") -> dict[str, Any]:
    """The setting by which a method shows its own bar, where it has one and somebody is there to see it."""
    return {"progress": True} if "progress" in signature(explainer_cls).parameters and sys.stderr.isatty() else {}


def silent_method_settings(explainer_cls: "type[Explainer]") -> dict[str, Any]:
    """The setting by which a method shows no bar, where it has one: for a command with one of its own."""
    return {"progress": False} if "progress" in signature(explainer_cls).parameters else {}


@contextlib.contextmanager
def _redirect_method_bars_to_stderr() -> Iterator[None]:
    """Methods draw on rich's console, which is stdout's: there it would go into the results."""
    import rich

    console = rich.get_console()
    before = console.__dict__
    rich.reconfigure(stderr=True)
    try:
        yield
    finally:
        console.__dict__ = before

"""Progress bars of commands. They are hidden while a method shows its own bar."""

import contextlib
import datetime
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from camscope.cli import console_output
from camscope.plurals import plural

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from camscope.batch import BatchOutcome
    from camscope.explainers import Explainer
    from camscope.explainers.core.base_method import BaseMethod

SECONDS_BETWEEN_LINES = 30.0  # seconds between two lines of progress where there is no terminal


class ProgressBar:
    """The progress bar of a command, shown only on a terminal."""

    def __init__(self, progress: "Progress", task: "TaskID") -> None:
        self._progress, self._task = progress, task

    def advance(self, n_steps: int = 1) -> None:
        """Advance the bar by a number of steps."""
        self._progress.advance(self._task, n_steps)

    def set_progress(self, done: int, total: int) -> None:
        """Set the number of finished steps and the total number of steps."""
        self._progress.update(self._task, completed=done, total=total)

    def set_status(self, done: int, text: str) -> None:
        """Set the number of finished steps, and the text next to the bar."""
        self._progress.update(self._task, completed=done, description=console_output.to_printable_line(text))

    @contextlib.contextmanager
    def nested_bar(self, text: str) -> "Iterator[Callable[[int, int], None]]":
        """Show a second bar below. Yield a callback that takes the number of finished steps and the number of all steps."""
        task = self._progress.add_task(console_output.to_printable_line(text), total=None)
        try:
            yield lambda done, total: self._progress.update(task, completed=done, total=total)
        finally:
            self._progress.remove_task(task)

    def pause_for_methods(self, methods: "Sequence[BaseMethod]") -> None:
        """Show this bar, but hide it if one of the methods shows its own bar."""
        has_method_bar = any(getattr(method, "progress", False) for method in methods)
        (self._progress.stop if has_method_bar else self._progress.start)()


@contextlib.contextmanager
def show_batch_progress(label: str = "") -> "Iterator[Callable[[BatchOutcome], None]]":
    """Show the progress of a batch run inside the `with` block. Yield a callback that takes the current BatchOutcome.

    Without a terminal, print a line every 30 seconds.
    """
    console, started = console_output.stderr_console(), time.monotonic()
    last_line_at = started
    with build_progress(console) as progress:
        task = progress.add_task("", total=None)

        def on_progress(current_outcome: "BatchOutcome") -> None:
            nonlocal last_line_at
            now, done = time.monotonic(), current_outcome.n_done_before + current_outcome.n_processed
            rate = current_outcome.n_processed / max(now - started, 1e-9)
            description = f"{label}{': ' if label else ''}{rate:.1f} images/s, {current_outcome.n_failures} failed"
            progress.update(task, completed=done, total=current_outcome.n_images, description=description)
            if not console.is_terminal and now - last_line_at >= SECONDS_BETWEEN_LINES and rate:
                last_line_at, time_left = (
                    now,
                    datetime.timedelta(seconds=round((current_outcome.n_images - done) / rate)),
                )
                console.print(f"{done} of {plural(current_outcome.n_images, 'image')}, {description}, {time_left} left")

        yield on_progress


@contextlib.contextmanager
def progress_bar(label: str, total: int, console: "Console") -> Iterator[ProgressBar]:
    """Show a progress bar of `total` steps inside the `with` block. If the command prints JSON, the bar is on stderr.

    Methods draw their own bars on rich's global console, which is redirected to stderr.
    """
    import rich

    console = console_output.stderr_console() if console.quiet else console
    global_console = rich.get_console()
    original_state = global_console.__dict__
    rich.reconfigure(stderr=True)
    try:
        with build_progress(console) as progress:
            yield ProgressBar(progress, progress.add_task(console_output.to_printable_line(label), total=total))
    finally:
        global_console.__dict__ = original_state


def build_progress(console: "Console") -> "Progress":
    """Create progress bars. They are shown only on a terminal, and disappear when the work is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def build_method_bar_settings(explainer_cls: "type[Explainer]", *, show: bool = True) -> dict[str, Any]:
    """Return the keyword argument that makes a method show or hide its own progress bar.

    The dict is empty if the method has no bar.
    """
    show = show and sys.stderr.isatty()
    return {"progress": show} if "progress" in signature(explainer_cls).parameters else {}

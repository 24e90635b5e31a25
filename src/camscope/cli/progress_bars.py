"""Progress bars of commands. They are hidden while a method shows its own bar."""

import contextlib
import datetime
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from camscope.cli import console_output, event_log
from camscope.plurals import plural

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from camscope.batch import BatchOutcome
    from camscope.explainers import Explainer
    from camscope.explainers.core.base_method import BaseMethod

SECONDS_BETWEEN_LINES = 60.0  # seconds between two lines of progress where there is no terminal


class ProgressReporter:
    """Report progress once a minute: as a line on a console that is no terminal, and as an event of `--log`."""

    def __init__(self, console: "Console", label: str, noun: str = "step") -> None:
        self._console, self._label, self._noun = console, label, noun
        self._started = self._last_report_at = time.monotonic()

    def report(self, done: int, total: int | None, n_failures: int | None = None, n_done_before: int = 0) -> bool:
        """Report the number of finished steps, if the last report is a minute ago. Return whether it is reported."""
        now = time.monotonic()
        if now - self._last_report_at < SECONDS_BETWEEN_LINES or done <= n_done_before:
            return False
        self._last_report_at = now
        self._write(now, done, total, n_failures, n_done_before)
        return True

    def log_end(self, done: int, total: int | None, n_failures: int | None = None, n_done_before: int = 0) -> None:
        """Log the final numbers as an event. No line is printed."""
        self._write(time.monotonic(), done, total, n_failures, n_done_before, prints=False)

    def _write(
        self,
        now: float,
        done: int,
        total: int | None,
        n_failures: int | None,
        n_done_before: int,
        *,
        prints: bool = True,
    ) -> None:
        rate = (done - n_done_before) / max(now - self._started, 1e-9)
        seconds_left = None if total is None or not rate else round((total - done) / rate)
        event_log.log_event(
            "progress",
            label=self._label,
            done=done,
            total=total,
            rate=round(rate, 3),
            seconds_left=seconds_left,
            n_failures=n_failures,
        )
        if prints and not self._console.is_terminal:
            clock = datetime.datetime.now().astimezone().strftime("%H:%M:%S")
            count = plural(done, self._noun) if total is None else f"{done} of {plural(total, self._noun)}"
            parts = [f"{self._label}: {count}" if self._label else count, f"{rate:.1f} {self._noun}s/s"]
            parts += [] if n_failures is None else [f"{n_failures} failed"]
            parts += [] if seconds_left is None else [f"{datetime.timedelta(seconds=seconds_left)} left"]
            self._console.print(f"{clock} {console_output.to_printable_line(', '.join(parts))}", soft_wrap=True)


class ProgressBar:
    """The progress bar of a command. Without a terminal, it is a line once a minute."""

    def __init__(self, progress: "Progress", task: "TaskID", label: str = "") -> None:
        self._progress, self._task = progress, task
        self._reporter = ProgressReporter(progress.console, label)

    def log_end(self) -> None:
        """Log the final numbers as an event of `--log`."""
        self._reporter.log_end(*self._get_done_and_total())

    def _report(self) -> None:
        self._reporter.report(*self._get_done_and_total())

    def _get_done_and_total(self) -> tuple[int, int | None]:
        task = next(task for task in self._progress.tasks if task.id == self._task)
        return int(task.completed), None if task.total is None else int(task.total)

    def advance(self, n_steps: int = 1) -> None:
        """Advance the bar by a number of steps."""
        self._progress.advance(self._task, n_steps)
        self._report()

    def set_progress(self, done: int, total: int) -> None:
        """Set the number of finished steps and the total number of steps."""
        self._progress.update(self._task, completed=done, total=total)
        self._report()

    def set_status(self, done: int, text: str) -> None:
        """Set the number of finished steps, and the text next to the bar."""
        self._progress.update(self._task, completed=done, description=console_output.to_printable_line(text))
        self._report()

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

    Without a terminal, print a line once a minute. Failed images are events of `--log`.
    """
    console, started = console_output.stderr_console(), time.monotonic()
    reporter = ProgressReporter(console, label, "image")
    with build_progress(console) as progress:
        task = progress.add_task("", total=None)

        def on_progress(outcome: "BatchOutcome") -> None:
            done = outcome.n_done_before + outcome.n_processed
            rate = outcome.n_processed / max(time.monotonic() - started, 1e-9)
            description = f"{label}{': ' if label else ''}{rate:.1f} images/s, {outcome.n_failures} failed"
            progress.update(task, completed=done, total=outcome.n_images, description=description)
            for failure in outcome.new_failures:
                event_log.log_event("failed_image", id=failure.id, reason=failure.reason, kind=failure.kind)
            counts = (done, outcome.n_images, outcome.n_failures, outcome.n_done_before)
            if not reporter.report(*counts) and done == outcome.n_images:
                reporter.log_end(*counts)

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
            bar = ProgressBar(progress, progress.add_task(console_output.to_printable_line(label), total=total), label)
            yield bar
            bar.log_end()
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

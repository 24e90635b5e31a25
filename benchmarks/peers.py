"""Every method by camscope and by the usual toolkits, each as its own documentation has one batch done.

A tool is opened on a case, runs as often as wanted, and leaves the model as it found it: hooks that a toolkit keeps on
the model are there while the tool is open, so that no other measurement pays for them.
"""

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout

from benchmarks import by_captum, by_grad_cam, by_torchcam
from benchmarks.cases import Case
from benchmarks.report import OURS
from benchmarks.tool import Tool, explainer


@contextmanager
def camscope(case: Case, method: str) -> Iterator[Tool]:
    """The maps are the result."""
    ours = explainer(case, method)
    yield Tool(lambda: ours.attribute(case.x, case.classes), lambda heat: heat)


TOOLS: dict[str, Callable[[Case, str], AbstractContextManager[Tool]]] = {
    OURS: camscope,
    "grad-cam": by_grad_cam.opened,
    "torchcam": by_torchcam.opened,
    "captum": by_captum.opened,
}


@contextmanager
def open_tool(name: str, case: Case, method: str = "gradcam") -> Iterator[Tool]:
    """A tool by its name in TOOLS, with its warnings, lines and bars kept quiet: they are not what is measured."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        with TOOLS[name](case, method) as tool:
            yield tool

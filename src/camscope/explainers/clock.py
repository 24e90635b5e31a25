"""Clock: the seconds that each method of a call took, for passes that several of them share."""

import time
from collections.abc import Sequence

from camscope.explainers.agreement import Witness
from camscope.explainers.method import Method
from camscope.explainers.run import Watch


class Clock:
    """Watches which methods work: what a pass took is shared out evenly among those that shared it."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch, self._seconds = watch, dict[int, float]()
        self._working, self._since = list[Method](), time.perf_counter()

    def __call__(self, tools: Sequence[Method]) -> None:
        """These work from now on."""
        self._note()
        self._working = [tool for tool in tools if not isinstance(tool, Witness)]
        if self._watch is not None and self._working:
            self._watch(self._working)

    def of(self, tool: Method) -> float:
        """Seconds of one method; asked when all is done."""
        self._note()
        return self._seconds.get(id(tool), 0.0)

    def _note(self) -> None:
        now = time.perf_counter()
        for tool in self._working:
            self._seconds[id(tool)] = self._seconds.get(id(tool), 0.0) + (now - self._since) / len(self._working)
        self._working, self._since = [], now

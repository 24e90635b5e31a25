"""Reading: what a finished report says, held against the files that it was made of. Nothing in it may be of its own."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from html.parser import HTMLParser
from typing import Any

from camscope.audit.report.number_format import number_of
from camscope.audit.report.verdict_labels import clean

FREE = ("95 %",)  # what an interval is called
VOID = {"meta", "img", "input", "br", "link", "hr", "use", "path", "line", "rect", "circle", "polygon"}
SPOKEN = ("alt", "aria-label", "title", "placeholder")
DIGIT = re.compile(r"\d")


class Said(HTMLParser):
    """`numbers`: (value, as written, what it counts); `texts`: what else holds a digit and is no tick of an axis.

    `labels`: the same where several texts of the files may be one: rows of a figure, and words for those who do not see.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.numbers: list[tuple[str, str, str | None]] = []
        self.texts: list[str] = []
        self.labels: list[str] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element begins."""
        own = dict(attrs)
        self.labels += [text for name in SPOKEN if (text := own.get(name)) and DIGIT.search(text)]
        if tag not in VOID:
            self._open.append((tag, own))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element that holds nothing."""

    def handle_endtag(self, tag: str) -> None:
        """An element ends."""
        if any(name == tag for name, _ in self._open):
            while self._open.pop()[0] != tag:
                pass

    def handle_data(self, data: str) -> None:
        """A text."""
        if not DIGIT.search(data) or any(_is_exempt(name, own) for name, own in self._open):
            return
        inner = next((own for _, own in reversed(self._open) if "data-value" in own), None)
        tag, own = self._open[-1] if self._open else ("", {})
        if tag == "data":
            self.numbers.append((own.get("value") or "", data, own.get("data-counts")))
        elif inner is not None:
            self.numbers.append((inner["data-value"] or "", data, None))
        elif tag == "text":
            self.labels.append(data)
        else:
            self.texts.append(data)


def _is_exempt(tag: str, own: Mapping[str, str | None]) -> bool:
    """Whether its digits are nobody's claim: a section's number, a tick of an axis, the table of norms."""
    classes = (own.get("class") or "").split()
    return tag in ("style", "script") or "data-static" in own or "number" in classes or "tick" in classes


def numbers_in(html: str) -> list[float]:
    """Every number that a report shows as one."""
    return [float(value) for value, _, _ in Said(html).numbers]


def unknown(html: str, *files: Mapping[str, Any]) -> list[str]:
    """What a report says that none of these files does: numbers, or texts with digits; an empty list for a sound one.

    `files`: what was in `summary.json` first, then in `provenance.json`, and of the gallery.
    """
    numbers = {float(one) for file in files for one in _leaves(file) if isinstance(one, int | float)}
    words = {clean(one) for file in files for one in _leaves(file) if isinstance(one, str)}
    said = Said(html)
    wrong = []
    for value, text, counts in said.numbers:
        known = _counted(files, counts) if counts else numbers
        if float(value) not in known or not _agrees(float(value), text):
            wrong.append(f"the number {text} ({value})")
    wrong += [f"the text {one.strip()!r}" for one in said.texts if not _is_known(one, words)]
    return wrong + [f"the label {one!r}" for one in said.labels if not _is_of(one, words)]


def _is_of(label: str, words: Iterable[str]) -> bool:
    """Whether every word of it with a digit stands in some text of the files."""
    parts = [one.strip(",.:;…") for one in _without(clean(label), FREE).split() if DIGIT.search(one)]
    return all(any(part in text for text in words) for part in parts)


def _is_known(text: str, words: Iterable[str]) -> bool:
    line = clean(text)
    return line in words or not DIGIT.search(_without(line, FREE))


def _without(text: str, phrases: Iterable[str]) -> str:
    for phrase in phrases:
        text = text.replace(phrase, "")
    return text


def _counted(files: tuple[Mapping[str, Any], ...], counts: str) -> set[float]:
    path, known = json.loads(counts)
    return {float(number_of(file, path, known)) for file in files if path.split(".")[0] in file}


def _agrees(value: float, text: str) -> bool:
    """Whether a text is the value, rounded."""
    plain = text.strip().replace(",", "").replace("−", "-")
    if plain.startswith("<"):
        return bool(value < float(plain[1:]))
    if "e" in plain:
        return math.isclose(float(plain), value, rel_tol=0.06)
    decimals = len(plain.partition(".")[2])
    return bool(abs(float(plain) - value) <= 0.5 * 10**-decimals * (1 + 1e-9))


def _leaves(node: Any) -> Iterator[Any]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield name
            yield from _leaves(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _leaves(value)
    elif node is not None and not isinstance(node, bool):
        yield node

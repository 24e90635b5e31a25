"""Check a finished report against its source files: every number and text with digits must come from them."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from html.parser import HTMLParser
from typing import Any

from camscope.audit.report.number_format import count_items
from camscope.audit.report.verdict_labels_and_groups import format_sentence, sanitize_text

ALLOWED_PHRASES = ("95 %",)
VOID_TAGS = {"meta", "img", "input", "br", "link", "hr", "use", "path", "line", "rect", "circle", "polygon"}
TEXT_ATTRIBUTES = ("alt", "aria-label", "title", "placeholder")
FORMATTED_NUMBER_PATTERN = re.compile(r"−?\d[\d,]*(?:\.\d+)?(?:e-\d+)?")  # as number_to_text formats them
DIGIT_PATTERN = re.compile(r"\d")


class ReportTextParser(HTMLParser):
    """Collects the numbers and the texts with digits of a report.

    `numbers`: (value, text, count query). `texts`: other texts with digits, except axis ticks. `labels`: row labels of
    figures and alternative texts, which may combine several texts of the files.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.numbers: list[tuple[str, str, str | None]] = []
        self.texts: list[str] = []
        self.labels: list[str] = []
        self._open_tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Handle a start tag."""
        attributes = dict(attrs)
        self.labels += [
            text for name in TEXT_ATTRIBUTES if (text := attributes.get(name)) and DIGIT_PATTERN.search(text)
        ]
        if tag not in VOID_TAGS:
            self._open_tags.append((tag, attributes))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Ignore an empty element."""

    def handle_endtag(self, tag: str) -> None:
        """Handle an end tag."""
        if any(name == tag for name, _ in self._open_tags):
            while self._open_tags.pop()[0] != tag:
                pass

    def handle_data(self, data: str) -> None:
        """Handle a text."""
        if not DIGIT_PATTERN.search(data) or any(_is_exempt(name, attributes) for name, attributes in self._open_tags):
            return
        chart_values = next((own["data-values"] for _, own in self._open_tags if "data-values" in own), None)
        tag, attributes = self._open_tags[-1] if self._open_tags else ("", {})
        if tag == "data":
            self.numbers.append((attributes.get("value") or "", data, attributes.get("data-counts")))
        elif chart_values is not None:
            texts = FORMATTED_NUMBER_PATTERN.findall(data)
            self.numbers += [(value, number, None) for value, number in zip(chart_values.split(), texts, strict=True)]
        elif tag == "text":
            self.labels.append(data)
        else:
            self.texts.append(data)


def _is_exempt(tag: str, attributes: Mapping[str, str | None]) -> bool:
    """Return whether digits in this element are not claims: section numbers, axis ticks, the table of norms."""
    classes = (attributes.get("class") or "").split()
    return tag in ("style", "script") or "data-static" in attributes or "number" in classes or "tick" in classes


def extract_numbers(html: str) -> list[float]:
    """Return every tagged number of a report."""
    return [float(value) for value, _, _ in ReportTextParser(html).numbers]


def find_unsupported_claims(html: str, *files: Mapping[str, Any]) -> list[str]:
    """Return the numbers and texts with digits of a report that are in none of the files.

    `files`: the contents of `summary.json`, `provenance.json` and `gallery.json`.
    """
    numbers = {float(leaf) for file in files for leaf in _iter_leaves(file) if isinstance(leaf, int | float)}
    texts = {sanitize_text(leaf) for file in files for leaf in _iter_leaves(file) if isinstance(leaf, str)}
    texts |= {clause for text in texts for clause in text.split("; ")}  # the clauses of a reason
    texts |= {format_sentence(text) for text in texts}
    parser = ReportTextParser(html)
    problems = []
    for value, text, counts in parser.numbers:
        allowed = _recount_items(files, counts) if counts else numbers
        if float(value) not in allowed or not _is_rounding_of(float(value), text):
            problems.append(f"the number {text} ({value})")
    problems += [f"the text {leaf.strip()!r}" for leaf in parser.texts if not _is_text_supported(leaf, texts)]
    return problems + [f"the label {leaf!r}" for leaf in parser.labels if not _is_label_supported(leaf, texts)]


def _is_label_supported(label: str, source_texts: Iterable[str]) -> bool:
    """Return whether every word with a digit is part of a text of the files."""
    parts = [
        word.strip(",.:;…")
        for word in _remove_phrases(sanitize_text(label), ALLOWED_PHRASES).split()
        if DIGIT_PATTERN.search(word)
    ]
    return all(any(part in text for text in source_texts) for part in parts)


def _is_text_supported(text: str, source_texts: Iterable[str]) -> bool:
    line = sanitize_text(text)
    return line in source_texts or not DIGIT_PATTERN.search(_remove_phrases(line, ALLOWED_PHRASES))


def _remove_phrases(text: str, phrases: Iterable[str]) -> str:
    for phrase in phrases:
        text = text.replace(phrase, "")
    return text


def _recount_items(files: tuple[Mapping[str, Any], ...], count_query: str) -> set[float]:
    path, field_values = json.loads(count_query)
    return {float(count_items(file, path, field_values)) for file in files if path.split(".")[0] in file}


def _is_rounding_of(value: float, text: str) -> bool:
    """Return whether a text is the rounded value."""
    number_text = text.strip().replace(",", "").replace("−", "-")
    if number_text.startswith("<"):
        return bool(value < float(number_text[1:]))
    if "e" in number_text:
        return math.isclose(float(number_text), value, rel_tol=0.06)
    decimals = len(number_text.partition(".")[2])
    return bool(abs(float(number_text) - value) <= 0.5 * 10**-decimals * (1 + 1e-9))


def _iter_leaves(node: Any) -> Iterator[Any]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield name
            yield from _iter_leaves(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _iter_leaves(value)
    elif node is not None and not isinstance(node, bool):
        yield node

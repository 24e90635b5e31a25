"""What `camscope explain` makes of one image: the answers, the files, and the lines for the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camscope.cli import base
from camscope.cli.options import Look
from camscope.cli.output_paths import Destination, Files, check_free
from camscope.cli.scan_options import Scans, masks_of

if TYPE_CHECKING:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from camscope.cli.progress import Bar
    from camscope.explainers import Explainer
    from camscope.explainers.core.dispatch import Watch
    from camscope.explanation import ClassScore, Explanation, Scale
    from camscope.render import Picture

    Line = Text | Padding

SMALLEST, LARGEST = 384, 768  # rows of a picture in a figure


@dataclass(frozen=True)
class Answers:
    """Several methods and classes asked of every image, each time the same."""

    explainers: "Sequence[Explainer]"
    questions: Sequence[int | str | None]
    destination: Destination
    look: Look
    top: int
    shared_scale: bool = False
    leave_out: bool = False
    scans: Scans = field(default_factory=Scans)
    masks: Sequence[str] = ()

    def write(self, row: int, path: Path, bar: "Bar") -> "list[Line]":
        """Explain one image and write its files, none of which may be in the way; what to print of it.

        `bar`: of the command; it makes room for others.
        """
        called = self.scans.called(path)
        files = self.destination.files(row, path, self._names(), called)
        exported = self._exported(row, path, called)
        with base.remarks(quoting=called is None) as remarks:
            methods, found = self._asked(self.scans.read(path), bar.make_room)
        maps = [self.scans.discreet(one, path) for answers in found for one in answers]
        kept = [self.explainers.index(method) * len(self.questions) + q for method in methods for q in self._numbers]
        files = Files(files.pictures, tuple(files.raw[n] for n in kept))
        masks = self._masks(maps)
        self._save(maps, files, masks, bar)
        for n, one in zip(kept, maps, strict=True):
            viewed = self.scans.write(one, exported[n], path, overwrite=self.destination.overwrite)
            files = Files((*files.pictures, *viewed), files.raw)
        notes = dict.fromkeys([*remarks, *(text for one in maps for text in one.notes)])
        return self._lines(called or base.shown(path), maps, files, list(notes))

    def _exported(self, row: int, path: Path, called: str | None) -> list[tuple[Path, ...]]:
        """What viewers open, of each map; none of it is in the way."""
        names = self._names()
        tails = [""] if len(names) == 1 else [f"-{one}" for one in names]
        found = self.scans.files(self.destination.stem(row, path, called), tails)
        for one in (each for own in found for each in own):
            check_free(one, self.destination.overwrite, path)
        return found

    def _masks(self, found: "Sequence[Explanation]") -> "dict[str, Any] | None":
        """Outlines to draw over every map."""
        place = found[0].placement
        return masks_of(self.masks, place.image_size) if self.masks and place is not None else None

    @property
    def _numbers(self) -> range:
        return range(len(self.questions))

    def _asked(self, source: Any, watch: "Watch") -> "tuple[Sequence[Explainer], list[list[Explanation]]]":
        """The methods that answer, and [method][class], all from the same passes."""
        from camscope.explainers.comparison.best_effort import explain_suited
        from camscope.explainers.core.dispatch import explain_each

        if self.scans.axis is not None:
            return self.explainers, [
                [self._sliced(tool, source, q) for q in self.questions] for tool in self.explainers
            ]
        if self.leave_out:
            return explain_suited(self.explainers, source, self.questions, watch=watch)
        return self.explainers, explain_each(self.explainers, source, self.questions, watch=watch)

    def _sliced(self, tool: "Explainer", source: Any, question: int | str | None) -> "Explanation":
        from camscope.medical import explain_slices

        return explain_slices(tool, source, question, axis=self.scans.axis or 0, progress=base.err().is_terminal).volume

    def _names(self) -> list[str]:
        """A part of a file's name for each map, in the order of the maps."""
        methods = [explainer.name for explainer in self.explainers]
        numbers = [f"q{n + 1}" for n in self._numbers]
        return ["-".join([m] * (len(methods) > 1) + [q] * (len(numbers) > 1)) for m in methods for q in numbers]

    def _save(self, found: "Sequence[Explanation]", files: Files, masks: "dict[str, Any] | None", bar: "Bar") -> None:
        from camscope.render import encode
        from camscope.safe_files import write_bytes

        if files.pictures:
            figure = self._figure(found, masks)
            for path in files.pictures:
                write_bytes(path, encode(figure, path.suffix), overwrite=self.destination.overwrite)
        for one, paths in zip(found, files.raw, strict=True):
            for path in paths:
                if path.suffix.lower() == ".gif" and one.heat.ndim == 3:
                    with bar.beside("drawing slices") as watch:
                        one.animate(path, mask=masks, watch=watch, overwrite=self.destination.overwrite)
                else:
                    one.save(path, overwrite=self.destination.overwrite)

    def _figure(self, found: "Sequence[Explanation]", masks: "dict[str, Any] | None" = None) -> "Picture":
        """The image and its maps; with several methods and several classes, a row for each class."""
        from camscope.explanation import shared_scales
        from camscope.render import panel

        photo, rows, columns = found[0].image, len(self.questions), None
        photo = photo if found[0].heat.ndim == 2 else None  # a volume is seen under its maps
        tall = LARGEST if found[0].heat.ndim == 3 else SMALLEST  # three planes in one picture
        height = tall if photo is None else min(LARGEST, max(SMALLEST, photo.shape[0]))
        first = [] if photo is None else [(photo, base.shown(found[0].name), None)]
        every: list[Scale] = ["auto"] * len(found)
        scales = shared_scales(found, self.look.colormap) if self.shared_scale else every
        drawn = [
            (self.look.of(one, height, scale, masks), one.caption, one.flag)
            for one, scale in zip(found, scales, strict=True)
        ]
        if rows > 1 and len(found) > rows:
            columns = len(first) + len(found) // rows
            drawn = [cell for row in range(rows) for cell in [*first, *drawn[row::rows]]]
        else:
            drawn = first + drawn
        pictures, captions, flags = zip(*drawn, strict=True)
        return panel(pictures, captions, flags=flags, height=height, columns=columns)

    def _lines(self, called: str, found: "Sequence[Explanation]", files: Files, notes: list[str]) -> "list[Line]":
        from rich.padding import Padding

        title = base.styled((called, "bold cyan"))
        top = base.styled(("  top  ", "dim"), (" · ".join(map(_named, found[0].top[: self.top])), ""))
        said = [base.styled((f"  note: {base.shown(text)}", "dim")) for text in notes]
        steps = "; ".join(found[0].steps)
        said = [base.styled(("  read ", "dim"), (base.shown(steps), "dim")), *said] if steps else said
        where = [base.styled(("  to   ", "dim"), (base.shown(one), "")) for one in files.all]
        return [title, top, Padding(_table(found), (0, 0, 0, 2), expand=False), *said, *where, base.styled(("", ""))]


def _named(one: "ClassScore") -> str:
    chance = f"score {one.score:.3g}" if one.probability is None else f"{one.probability:.3f}"
    return f"{base.class_words(one.index, one.label)} {chance}"


def _table(found: "Sequence[Explanation]") -> "Table":
    from rich.text import Text

    from camscope.explanation import OK

    table = base.table("method", "class", "score>", "probability>", "layer", "grid>", "status")
    for one in found:
        table.add_row(
            one.method,
            Text(base.class_words(one.target, one.label)),
            f"{one.score:.4g}",
            "–" if one.probability is None else f"{one.probability:.3f}",
            Text(base.shown(one.layer or "–")),
            "×".join(map(str, one.grid)),
            Text(one.status.replace("_", " "), "green" if one.status == OK else "yellow"),
        )
    return table

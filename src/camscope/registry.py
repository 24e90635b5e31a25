"""Registries of methods and metrics: look up entries by name, and return their display names."""

import difflib
import re
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeVar

from camscope.errors import InputError, MissingExtraError, warn_caller

N_NEAREST_NAMES = 3
NAME_SEPARATORS = re.compile(r"( \+ |, | (?=\w+=))")  # in labels such as "gradcam + layercam, fused mode=max"


class RegistryEntry(Protocol):
    """A class or object that can be registered: it has a name for lookup and a title for display."""

    @property
    def name(self) -> str:
        """The key of the entry as users type it, such as `gradcam++`."""

    @property
    def title(self) -> str:
        """The display name of the entry, such as `Grad-CAM++`."""


Entry = TypeVar("Entry", bound=RegistryEntry)


def normalize_name(name: str) -> str:
    """Return a name in lower case. Remove hyphens, underscores and spaces. `++` becomes `plusplus`.

    >>> normalize_name("Grad-CAM++") == normalize_name("gradcam_plusplus")
    True
    """
    return re.sub(r"[-_\s]", "", name.casefold().replace("++", "plusplus"))


class Registry(MutableMapping[str, Entry]):
    """Entries by name. Iteration gives the names. Lookup accepts every spelling of a name or a title.

    Args:
        kind: What an entry is, for error messages: "method" or "metric".
        package: The package whose modules register the entries. It is imported at the first lookup of a name.
        entry_point_group: The group of entry points by which other installed packages register entries. They are
            imported after `package`. If an entry point fails, a warning names its package.

    >>> from camscope.explainers import METHODS
    >>> METHODS["Grad-CAM++"] is METHODS["gradcam_plusplus"]
    True

    """

    def __init__(self, kind: str, package: str | None = None, entry_point_group: str | None = None) -> None:
        self.kind = kind
        self.package = package
        self._pending_groups = [] if entry_point_group is None else [entry_point_group]
        self._load_lock = threading.RLock()
        self._entries: dict[str, Entry] = {}
        self._titles: dict[str, str] = {}  # by name, also of entries whose package is not installed
        self._names: dict[str, str] = {}  # by normalized name or title
        self._missing_packages: dict[str, tuple[str, str]] = {}  # package and extra by name

    def add(self, entry: Entry) -> None:
        """Register an entry. Raise ValueError if another entry has the same name or title."""
        if self._entries.get(entry.name) is not entry:
            self._reserve_spellings(entry.name, entry.title)
            self._entries[entry.name] = entry

    def add_unavailable(self, name: str, title: str, package: str, extra: str) -> None:
        """Reserve the name of an entry whose package is missing. `find` then raises an error that names the extra to install."""
        self._reserve_spellings(name, title)
        self._missing_packages[name] = package, extra

    def find(self, name: str) -> Entry:
        """Return the entry whose name or title is `name`.

        Raises:
            InputError: No entry has such a name; the message lists the nearest names.
            MissingExtraError: The entry needs a package that is not installed.

        """
        self.load()
        canonical = self._names.get(normalize_name(str(name)))
        if canonical in self._missing_packages:
            package, extra = self._missing_packages[canonical]
            raise MissingExtraError(package, extra)
        if canonical is None:
            raise InputError(f"there is no {self.kind} {name!r}; nearest names: {', '.join(self.nearest_names(name))}")
        return self._entries[canonical]

    def nearest_names(self, name: str) -> list[str]:
        """Return the names of the most similar entries. The most similar entry is first."""
        matches = difflib.get_close_matches(normalize_name(str(name)), self._names, n=2 * N_NEAREST_NAMES, cutoff=0.0)
        return list(dict.fromkeys(self._names[match] for match in matches))[:N_NEAREST_NAMES]

    def replace_names_by_titles(self, label: str) -> str:
        """Replace all registered names in a label by their titles. A label may name several methods and a layer.

        >>> from camscope.explainers import METHODS
        >>> METHODS.replace_names_by_titles("gradcam + layercam, fused")
        'Grad-CAM + LayerCAM, fused'
        """
        self.load()
        method, dot, layer = label.partition(" · ")
        parts = NAME_SEPARATORS.split(method)
        titles = [self._titles.get(self._names.get(normalize_name(part), part), part) for part in parts]
        return f"{''.join(titles)}{dot}{layer}"

    @property
    def unavailable(self) -> tuple[str, ...]:
        """The names of the entries whose packages are not installed."""
        return tuple(self._missing_packages)

    def __getitem__(self, name: str) -> Entry:
        self.load()
        return self._entries[self._names.get(normalize_name(str(name)), name)]

    def __setitem__(self, name: str, entry: Entry) -> None:
        if name != getattr(entry, "name", None):
            raise ValueError(
                f"{entry!r} cannot be registered as {name!r}, because its `name` is {getattr(entry, 'name', None)!r}; "
                "use the same name"
            )
        self.add(entry)

    def __delitem__(self, name: str) -> None:
        canonical = self._names.get(normalize_name(name), name)
        del self._entries[canonical]
        del self._titles[canonical]
        for spelling in [spelling for spelling, owner in self._names.items() if owner == canonical]:
            del self._names[spelling]

    def __iter__(self) -> Iterator[str]:
        self.load()
        return iter(self._entries)

    def __len__(self) -> int:
        self.load()
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}, {list(self._entries)})"

    def load(self) -> None:
        """Import the modules that register entries. These are modules of `package`, then entry points of installed packages."""
        if self.package is not None:
            import_module(self.package)
        with self._load_lock:
            groups, self._pending_groups = self._pending_groups, []  # first: a package may look up a name
            for group in groups:
                for entry_point in sorted(entry_points(group=group), key=lambda each: each.name):
                    self._load_entry_point(entry_point)

    def _load_entry_point(self, entry_point: EntryPoint) -> None:
        """Import the code of an entry point. If this fails, issue a warning. Other packages then still work."""
        package = entry_point.dist.name if entry_point.dist is not None else entry_point.value
        try:
            with self.entries_removed_on_error():
                loaded = entry_point.load()
                if isinstance(loaded, type) and id(loaded) not in map(id, self._entries.values()):
                    raise TypeError(f"{loaded.__name__} is not registered; decorate it with @register")
        except (Exception, SystemExit) as error:
            warn_caller(
                f"the package {package} registers no {self.kind}, because its entry point "
                f"{entry_point.name!r} ({entry_point.value}) failed with {type(error).__name__}: {error}"
            )

    @contextmanager
    def entries_removed_on_error(self) -> Iterator[None]:
        """If the `with` block raises an error, remove all entries that the block added."""
        saved = [(content, dict(content)) for content in self._all_name_tables]
        try:
            yield
        except BaseException:
            for content, original in saved:
                content.clear()
                content.update(original)
            raise

    @property
    def _all_name_tables(self) -> tuple[dict[str, Any], ...]:
        return self._entries, self._titles, self._names, self._missing_packages

    def _reserve_spellings(self, name: str, title: str) -> None:
        """Reserve the name and the title of an entry. Raise a ValueError if one refers to another entry."""
        for text in (name, title):
            owner = self._names.get(normalize_name(text))
            if owner is not None:
                raise ValueError(f"the {self.kind} {name!r} cannot be registered: {text!r} already refers to {owner!r}")
        self._names |= {normalize_name(name): name, normalize_name(title): name}
        self._titles[name] = title


METHOD_ENTRY_POINTS = "camscope.methods"
METHODS: Registry[Any] = Registry(
    "method", "camscope.explainers", METHOD_ENTRY_POINTS
)  # typed, in `camscope.explainers`, as classes of explainers

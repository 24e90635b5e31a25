"""Query: which rows of a run are meant, in SQL's words, which can read nothing but the run."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from camscope.batch.manifest import arrow
from camscope.batch.result_rows import KEYS, NOT_IN_ALL, column_types
from camscope.data_readers import FEW_VALUES, VALUES_PER_BYTE, check_parquet, one_error
from camscope.errors import InputError, MissingExtraError
from camscope.plurals import plural

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds

Places = NDArray[np.int64]
AT = '"camscope: place"'  # where a row stands in the run, under a name that no manifest gives a column
LOCKS = (
    "SET python_enable_replacements = false",  # a name is a column, never a variable of the caller's
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)
PIECE = 4096  # rows of a stream that are Python's at a time


@dataclass(frozen=True)
class Query:
    """`where`: a condition, as `label = 'nodule' and probability < 0.6`; `sort`: as `probability desc, id`; `limit`: how many.

    Both are DuckDB's SQL over the run's columns. Rows that `sort` leaves equal stay in the run's order.
    """

    where: str | None = None
    sort: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and not 1 <= self.limit < 2**63:
            raise InputError(f"limit={self.limit}; expected 1 row or more, and less than 2**63")
        for name, given in (("where", self.where), ("sort", self.sort)):
            if given is not None and not given.strip():
                raise InputError(f"{name} is empty; expected SQL, as label = 'nodule', or nothing at all")

    @property
    def words(self) -> str:
        """The query in a line."""
        parts = {"where": self.where, "sorted by": self.sort, "the first": self.limit}
        return ", ".join(f"{name} {given}" for name, given in parts.items() if given is not None)

    def matching(self, rows: "ds.Dataset") -> int:
        """How many rows `where` holds for, whatever the limit is."""
        if self.where is None:
            return int(rows.count_rows())
        with self._asked(rows, "count(*) AS matching", all_of_them=True) as found:
            return int(found.fetchone()[0])

    def places(self, rows: "ds.Dataset") -> Places:
        """The rows' numbers in the run, in the order of `sort`. Only columns that the query names are read."""
        if self.where is None and self.sort is None:
            with reading_parts():
                count = int(rows.count_rows())
                if count > FEW_VALUES + VALUES_PER_BYTE * sum(Path(file).stat().st_size for file in rows.files):
                    raise InputError(f"a part of the run claims {plural(count, 'row', spec=',')}: it is damaged")
            return np.arange(count if self.limit is None else min(count, self.limit))
        with self._asked(rows, AT) as found:
            return np.asarray(found.fetchnumpy()[AT.strip('"')], np.int64)

    def stream(self, rows: "ds.Dataset", columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """The rows one by one. `columns`: what to read, each a column or an expression of SQL."""
        with self._asked(rows, ", ".join(columns)) as found:
            while some := found.fetchmany(PIECE):
                yield from some

    @contextlib.contextmanager
    def _asked(self, rows: "ds.Dataset", columns: str, *, all_of_them: bool = False) -> Iterator[Any]:
        """DuckDB's answer, while it is open."""
        duckdb = _duckdb()
        with reading_parts(), duckdb.connect(config={"autoinstall_known_extensions": "false"}) as connection:
            connection.register("run", rows)
            for lock in LOCKS:
                connection.execute(lock)
            try:
                self._check(connection)
                yield connection.execute(self._sql(columns, all_of_them))
            except duckdb.Error as error:
                raise InputError(self._refused(error, rows)) from error

    def _sql(self, columns: str, all_of_them: bool) -> str:
        made = f"SELECT {columns} FROM (SELECT row_number() OVER () - 1 AS {AT}, * FROM run) AS run"  # noqa: S608 - checked
        made += "" if self.where is None else f" WHERE (\n{self.where}\n)"
        if not all_of_them:
            made += " ORDER BY " + ("" if self.sort is None else f"{self.sort}\n, ") + AT
            made += "" if self.limit is None else f" LIMIT {self.limit}"
        return made

    def _check(self, connection: Any) -> None:
        """What is given is one condition, alone and in brackets, so that it ends neither; and a list to sort by."""
        forms = [] if self.where is None else [f"SELECT {self.where}", f"SELECT (\n{self.where}\n)"]
        if self.sort is not None:  # what could follow an order, as a limit, fails where another column follows
            forms.append(f"SELECT 1 ORDER BY {self.sort}")
        for form in forms:
            if len(connection.extract_statements(form)) != 1:
                raise InputError(f"the query ({self.words}) holds several statements; expected one condition")

    def _refused(self, error: Exception, rows: "ds.Dataset") -> str:
        said = str(error).partition("\n")[0].partition(": ")[2] or str(error)
        return f"the query ({self.words}): {said.rstrip('.!')}; the columns are {', '.join(rows.schema.names)}"


class Pieces:
    """The rows of a run by their numbers: of the parts, and of these the groups, only those that hold any are read."""

    def __init__(self, rows: "ds.Dataset") -> None:
        self._schema, self._sound = rows.schema, set[str]()
        with reading_parts():
            self._pieces = [piece for part in rows.get_fragments() for piece in part.split_by_row_group()]
            sizes = [sum(group.num_rows for group in piece.row_groups) for piece in self._pieces]
        self._starts = np.cumsum([0, *sizes])

    def take(self, places: Places, columns: Sequence[str] | None = None) -> "pa.Table":
        """Rows in the order of their numbers in `places`."""
        order = np.argsort(places, kind="stable")
        found = list(self.in_turn(places[order], columns))
        table = arrow().concat_tables(found) if found else self._schema.empty_table()
        if columns is not None:
            table = table.select(list(columns))
        return table.take(np.argsort(order, kind="stable"))

    def in_turn(self, places: Places, columns: Sequence[str] | None = None) -> "Iterator[pa.Table]":
        """Rows with rising numbers, a table for each piece of the run."""
        which = np.searchsorted(self._starts, places, side="right") - 1
        for own in np.split(places, np.flatnonzero(np.diff(which)) + 1):
            if len(own):
                number = int(np.searchsorted(self._starts, own[0], side="right")) - 1
                names = None if columns is None else list(columns)
                path = self._pieces[number].path
                with reading_parts(path):
                    if path not in self._sound:
                        check_parquet([path])
                        self._sound.add(path)
                    table = with_keys(self._pieces[number].to_table(schema=self._schema, columns=names))
                    chosen = table.take(own - self._starts[number])
                yield chosen


def open_parts(parts: Sequence[str], schema: "pa.Schema | None" = None) -> "ds.Dataset":
    """Files of rows as one dataset, of which nothing is read yet; an InputError where one is no Parquet file."""
    with reading_parts():
        rows = arrow("dataset").dataset(list(parts), schema=schema, format="parquet")
        if schema is None:
            _expect_types(rows.schema)
        return rows


def open_maps(parts: Sequence[str]) -> "ds.Dataset":
    """The same of parts of a run of maps; an InputError where one of its columns is missing."""
    rows = open_parts(parts)
    if missing := [name for name in column_types() if name not in (*NOT_IN_ALL, *rows.schema.names)]:
        raise InputError(
            f"the parts of the run have no column {', '.join(missing)}: they are damaged, or another program's"
        )
    return rows


def _expect_types(schema: "pa.Schema") -> None:
    """InputError where a column of ours holds something else than ours do, or two have one name."""
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise InputError(f"several columns are named {', '.join(twice)}")
    for name, kind in column_types().items():
        if name in schema.names and not _is_alike(schema.field(name).type, kind):
            raise InputError(f"its column {name} holds {schema.field(name).type}; expected {kind}")


def _is_alike(kind: "pa.DataType", expected: "pa.DataType") -> bool:
    """Whether columns are of one type, whatever the values of a list are called."""
    if not arrow().types.is_list(expected):
        return bool(kind == expected)
    return bool(arrow().types.is_list(kind) and kind.value_type == expected.value_type)


def with_keys(table: "pa.Table") -> "pa.Table":
    """The same table; InputError where a row lacks what tells it from others."""
    for name in KEYS:
        if name in table.column_names and (count := table[name].null_count):
            raise InputError(f"{plural(count, 'row has', 'rows have')} no {name}")
    return table


def read_rows(rows: "ds.Dataset", columns: Sequence[str] | None = None, matching: Any = None) -> "pa.Table":
    """All rows of a dataset, or those for which an expression of PyArrow holds, or some of their columns."""
    with reading_parts():
        check_parquet(rows.files)
        return with_keys(rows.to_table(columns=None if columns is None else list(columns), filter=matching))


def reading_parts(part: str = "a part of the run") -> contextlib.AbstractContextManager[None]:
    """Whatever Arrow raises of a part of a run that is damaged, as one error."""
    return one_error(f"{part} cannot be read, and is made anew once it is removed", quoting=False, own=True)


def by_image(rows: "ds.Dataset", places: Places) -> Iterator[list[dict[str, Any]]]:
    """The rows with rising numbers, those of one image together."""
    for table in Pieces(rows).in_turn(places):
        yield from images_of(table)


def images_of(table: "pa.Table") -> Iterator[list[dict[str, Any]]]:
    """A table's rows, those of one image together."""
    for _, own in groupby(as_dicts(table), lambda row: row["row"]):
        yield list(own)


def as_dicts(table: "pa.Table") -> list[dict[str, Any]]:
    """A table's rows; the maps stay arrays, for as Python's numbers they would be ten times as large."""
    with reading_parts():
        heats = [one.values for one in table["heat"]]
        plain = table.drop_columns(["heat"]).to_pylist()
    return [
        {**row, "heat": None if heat is None else heat.to_numpy(zero_copy_only=False)}
        for row, heat in zip(plain, heats, strict=True)
    ]


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise MissingExtraError("duckdb", "batch") from error
    return duckdb

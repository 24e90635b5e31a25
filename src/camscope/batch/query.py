"""Query: which rows of a run are meant, in SQL's words, which can read nothing but the run."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from camscope.batch.manifest import import_arrow
from camscope.batch.result_rows import OPTIONAL_COLUMNS, REQUIRED_COLUMNS, column_types
from camscope.data_readers import MAX_EXCESS_VALUES, MAX_VALUES_PER_BYTE, check_parquet, read_errors_converted
from camscope.errors import InputError
from camscope.optional import require
from camscope.plurals import plural

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds

RowPositions = NDArray[np.int64]
POSITION_COLUMN = '"camscope: place"'  # where a row stands in the run, under a name that no manifest gives a column
SECURITY_SETTINGS = (
    "SET python_enable_replacements = false",  # a name is a column, never a variable of the caller's
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)
ROWS_PER_FETCH = 4096  # rows of a stream that are Python's at a time


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
    def description(self) -> str:
        """The query in a line."""
        parts = {"where": self.where, "sorted by": self.sort, "the first": self.limit}
        return ", ".join(f"{name} {given}" for name, given in parts.items() if given is not None)

    def count_matching(self, dataset: "ds.Dataset") -> int:
        """How many rows `where` holds for, whatever the limit is."""
        if self.where is None:
            return int(dataset.count_rows())
        with self._execute(dataset, "count(*) AS matching", ignore_limit=True) as found:
            return int(found.fetchone()[0])

    def find_positions(self, dataset: "ds.Dataset") -> RowPositions:
        """The rows' numbers in the run, in the order of `sort`. Only columns that the query names are read."""
        if self.where is None and self.sort is None:
            with translate_part_errors():
                count = int(dataset.count_rows())
                if count > MAX_EXCESS_VALUES + MAX_VALUES_PER_BYTE * sum(
                    Path(file).stat().st_size for file in dataset.files
                ):
                    raise InputError(f"a part of the run claims {plural(count, 'row', spec=',')}: it is damaged")
            return np.arange(count if self.limit is None else min(count, self.limit))
        with self._execute(dataset, POSITION_COLUMN) as found:
            return np.asarray(found.fetchnumpy()[POSITION_COLUMN.strip('"')], np.int64)

    def iter_rows(self, dataset: "ds.Dataset", columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """The rows one by one. `columns`: what to read, each a column or an expression of SQL."""
        with self._execute(dataset, ", ".join(columns)) as found:
            while some := found.fetchmany(ROWS_PER_FETCH):
                yield from some

    @contextlib.contextmanager
    def _execute(self, dataset: "ds.Dataset", columns: str, *, ignore_limit: bool = False) -> Iterator[Any]:
        """DuckDB's answer, while it is open."""
        duckdb = require("duckdb", extra="batch")
        with translate_part_errors(), duckdb.connect(config={"autoinstall_known_extensions": "false"}) as connection:
            connection.register("run", dataset)
            for lock in SECURITY_SETTINGS:
                connection.execute(lock)
            try:
                self._check_statements(connection)
                yield connection.execute(self._build_sql(columns, ignore_limit))
            except duckdb.Error as error:
                raise InputError(self._format_error(error, dataset)) from error

    def _build_sql(self, columns: str, ignore_limit: bool) -> str:
        made = f"SELECT {columns} FROM (SELECT row_number() OVER () - 1 AS {POSITION_COLUMN}, * FROM run) AS run"  # noqa: S608 - checked
        made += "" if self.where is None else f" WHERE (\n{self.where}\n)"
        if not ignore_limit:
            made += " ORDER BY " + ("" if self.sort is None else f"{self.sort}\n, ") + POSITION_COLUMN
            made += "" if self.limit is None else f" LIMIT {self.limit}"
        return made

    def _check_statements(self, connection: Any) -> None:
        """What is given is one condition, alone and in brackets, so that it ends neither; and a list to sort by."""
        forms = [] if self.where is None else [f"SELECT {self.where}", f"SELECT (\n{self.where}\n)"]
        if self.sort is not None:  # what could follow an order, as a limit, fails where another column follows
            forms.append(f"SELECT 1 ORDER BY {self.sort}")
        for form in forms:
            if len(connection.extract_statements(form)) != 1:
                raise InputError(f"the query ({self.description}) holds several statements; expected one condition")

    def _format_error(self, error: Exception, dataset: "ds.Dataset") -> str:
        said = str(error).partition("\n")[0].partition(": ")[2] or str(error)
        return f"the query ({self.description}): {said.rstrip('.!')}; the columns are {', '.join(dataset.schema.names)}"


class RowReader:
    """The rows of a run by their numbers: of the parts, and of these the groups, only those that hold any are read."""

    def __init__(self, dataset: "ds.Dataset") -> None:
        self._schema, self._checked_files = dataset.schema, set[str]()
        with translate_part_errors():
            self._row_groups = [piece for part in dataset.get_fragments() for piece in part.split_by_row_group()]
            sizes = [sum(group.num_rows for group in piece.row_groups) for piece in self._row_groups]
        self._group_starts = np.cumsum([0, *sizes])

    def take(self, positions: RowPositions, columns: Sequence[str] | None = None) -> "pa.Table":
        """Rows in the order of their numbers in `positions`."""
        order = np.argsort(positions, kind="stable")
        found = list(self.iter_tables(positions[order], columns))
        table = import_arrow().concat_tables(found) if found else self._schema.empty_table()
        if columns is not None:
            table = table.select(list(columns))
        return table.take(np.argsort(order, kind="stable"))

    def iter_tables(self, positions: RowPositions, columns: Sequence[str] | None = None) -> "Iterator[pa.Table]":
        """Rows with rising numbers, a table for each piece of the run."""
        which = np.searchsorted(self._group_starts, positions, side="right") - 1
        for own in np.split(positions, np.flatnonzero(np.diff(which)) + 1):
            if len(own):
                number = int(np.searchsorted(self._group_starts, own[0], side="right")) - 1
                names = None if columns is None else list(columns)
                path = self._row_groups[number].path
                with translate_part_errors(path):
                    if path not in self._checked_files:
                        check_parquet([path])
                        self._checked_files.add(path)
                    table = require_key_columns(self._row_groups[number].to_table(schema=self._schema, columns=names))
                    chosen = table.take(own - self._group_starts[number])
                yield chosen


def open_parts(parts: Sequence[str], schema: "pa.Schema | None" = None) -> "ds.Dataset":
    """Files of rows as one dataset, of which nothing is read yet; an InputError where one is no Parquet file."""
    with translate_part_errors():
        rows = import_arrow("dataset").dataset(list(parts), schema=schema, format="parquet")
        if schema is None:
            _require_column_types(rows.schema)
        return rows


def open_map_parts(parts: Sequence[str]) -> "ds.Dataset":
    """The same of parts of a run of maps; an InputError where one of its columns is missing."""
    rows = open_parts(parts)
    if missing := [name for name in column_types() if name not in (*OPTIONAL_COLUMNS, *rows.schema.names)]:
        raise InputError(
            f"the parts of the run have no column {', '.join(missing)}: they are damaged, or another program's"
        )
    return rows


def _require_column_types(schema: "pa.Schema") -> None:
    """InputError where a column of ours holds something else than ours do, or two have one name."""
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise InputError(f"several columns are named {', '.join(twice)}")
    for name, kind in column_types().items():
        if name in schema.names and not _is_same_type(schema.field(name).type, kind):
            raise InputError(f"its column {name} holds {schema.field(name).type}; expected {kind}")


def _is_same_type(actual: "pa.DataType", expected: "pa.DataType") -> bool:
    """Whether columns are of one type, whatever the values of a list are called."""
    if not import_arrow().types.is_list(expected):
        return bool(actual == expected)
    return bool(import_arrow().types.is_list(actual) and actual.value_type == expected.value_type)


def require_key_columns(table: "pa.Table") -> "pa.Table":
    """The same table; InputError where a row lacks what tells it from others."""
    for name in REQUIRED_COLUMNS:
        if name in table.column_names and (count := table[name].null_count):
            raise InputError(f"{plural(count, 'row has', 'rows have')} no {name}")
    return table


def read_rows(dataset: "ds.Dataset", columns: Sequence[str] | None = None, filter_expression: Any = None) -> "pa.Table":
    """All rows of a dataset, or those for which an expression of PyArrow holds, or some of their columns."""
    with translate_part_errors():
        check_parquet(dataset.files)
        return require_key_columns(
            dataset.to_table(columns=None if columns is None else list(columns), filter=filter_expression)
        )


def translate_part_errors(part_name: str = "a part of the run") -> contextlib.AbstractContextManager[None]:
    """Whatever Arrow raises of a part of a run that is damaged, as one error."""
    return read_errors_converted(
        f"{part_name} cannot be read, and is made anew once it is removed",
        quote_original=False,
        wrap_camscope_errors=True,
    )


def iter_rows_by_image(dataset: "ds.Dataset", positions: RowPositions) -> Iterator[list[dict[str, Any]]]:
    """The rows with rising numbers, those of one image together."""
    for table in RowReader(dataset).iter_tables(positions):
        yield from group_rows_by_image(table)


def group_rows_by_image(table: "pa.Table") -> Iterator[list[dict[str, Any]]]:
    """A table's rows, those of one image together."""
    for _, own in groupby(table_to_dicts(table), lambda row: row["row"]):
        yield list(own)


def table_to_dicts(table: "pa.Table") -> list[dict[str, Any]]:
    """A table's rows; the maps stay arrays, for as Python's numbers they would be ten times as large."""
    with translate_part_errors():
        heats = [one.values for one in table["attribution"]]
        plain = table.drop_columns(["attribution"]).to_pylist()
    return [
        {**row, "attribution": None if heat is None else heat.to_numpy(zero_copy_only=False)}
        for row, heat in zip(plain, heats, strict=True)
    ]

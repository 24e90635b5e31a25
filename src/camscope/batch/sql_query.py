"""`Query`: select rows of a run by SQL. `RowReader`: read the selected rows. SQL has no access to other files."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from camscope.batch.image_manifest import import_arrow
from camscope.batch.result_rows import OPTIONAL_COLUMNS, REQUIRED_COLUMNS, get_result_column_types
from camscope.errors import InputError
from camscope.optional_packages import require
from camscope.plurals import plural
from camscope.read_untrusted_files import (
    MAX_EXCESS_VALUES,
    MAX_VALUES_PER_BYTE,
    check_parquet_files,
    read_errors_converted,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds

RowPositions = NDArray[np.int64]
POSITION_COLUMN = '"camscope: position"'  # the position of a row, under a name that no manifest uses
SECURITY_SETTINGS = (
    "SET python_enable_replacements = false",  # names mean columns, never Python variables
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)
# what DuckDB raises for a wrong condition; other errors come from damaged parts
QUERY_ERRORS = (
    "BinderException",
    "CatalogException",
    "ConversionException",
    "NotImplementedException",
    "OutOfRangeException",
    "ParserException",
    "PermissionException",
    "TypeMismatchException",
)
ROWS_PER_FETCH = 4096  # rows that are converted to Python at a time


@dataclass(frozen=True)
class Query:
    """Selects rows of a run by an SQL condition in DuckDB's dialect.

    Attributes:
        where: A condition, such as `label = 'nodule' and probability < 0.6`. Default: all rows.
        sort: What to sort by, such as `probability desc, id`. Equal rows stay in the order of the run.
        max_rows: The maximum number of rows. Default: all rows.

    Raises:
        InputError: `where` or `sort` is empty, or `max_rows` is below 1 or too large.

    >>> Query("probability < 0.6", "id", 10).description
    'where probability < 0.6, sorted by id, the first 10'

    """

    where: str | None = None
    sort: str | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        if self.max_rows is not None and not 1 <= self.max_rows < 2**63:
            raise InputError(f"max_rows={self.max_rows}; expected a number of rows from 1 to 2**63 - 1")
        for name, sql in (("where", self.where), ("sort", self.sort)):
            if sql is not None and not sql.strip():
                raise InputError(f"{name} is empty; expected SQL, such as label = 'nodule', or None")

    @property
    def description(self) -> str:
        """The query as text in one line."""
        parts = {"where": self.where, "sorted by": self.sort, "the first": self.max_rows}
        return ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)

    def count_matching(self, dataset: "ds.Dataset") -> int:
        """Count the rows that fulfill the condition `where`. `max_rows` is ignored."""
        if self.where is None:
            return int(dataset.count_rows())
        with self._execute_query(dataset, "count(*) AS matching", ignore_limit=True) as result:
            return int(result.fetchone()[0])

    def find_positions(self, dataset: "ds.Dataset") -> RowPositions:
        """Return the positions of the selected rows in the dataset. They are ordered by `sort`."""
        if self.where is None and self.sort is None:
            with translate_part_errors():
                count = int(dataset.count_rows())
                n_bytes = sum(Path(file).stat().st_size for file in dataset.files)
                if count > MAX_EXCESS_VALUES + MAX_VALUES_PER_BYTE * n_bytes:
                    raise InputError(f"a part of the run claims {plural(count, 'row', spec=',')}: the part is damaged")
            return np.arange(count if self.max_rows is None else min(count, self.max_rows))
        with self._execute_query(dataset, POSITION_COLUMN) as result:
            return np.asarray(result.fetchnumpy()[POSITION_COLUMN.strip('"')], np.int64)

    def iter_rows(self, dataset: "ds.Dataset", columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Yield the selected rows. `columns` holds column names or SQL expressions."""
        with self._execute_query(dataset, ", ".join(columns)) as result:
            while rows := result.fetchmany(ROWS_PER_FETCH):
                yield from rows

    @contextlib.contextmanager
    def _execute_query(self, dataset: "ds.Dataset", columns: str, *, ignore_limit: bool = False) -> Iterator[Any]:
        """Execute the query. Its DuckDB result can be read inside the `with` block."""
        duckdb = require("duckdb", extra="batch")
        invalid_query: Exception | None = None
        with translate_part_errors(), duckdb.connect(config={"autoinstall_known_extensions": "false"}) as connection:
            connection.register("run", dataset)
            for setting in SECURITY_SETTINGS:
                connection.execute(setting)
            try:
                self._require_single_condition_and_sort(connection)
                yield connection.execute(self._build_sql(columns, ignore_limit))
            except tuple(getattr(duckdb, name) for name in QUERY_ERRORS) as error:
                invalid_query = error
        if invalid_query is not None:  # not within the block, which says that a part is damaged
            message = str(invalid_query).partition("\n")[0].partition(": ")[2] or str(invalid_query)
            names = ", ".join(dataset.schema.names)
            raise InputError(
                f"the query ({self.description}): {message.rstrip('.!')}; the columns are {names}"
            ) from invalid_query

    def _build_sql(self, columns: str, ignore_limit: bool) -> str:
        """Build the SQL statement that selects the columns of the requested rows, in their order."""
        sql = f"SELECT {columns} FROM (SELECT row_number() OVER () - 1 AS {POSITION_COLUMN}, * FROM run) AS run"  # noqa: S608 - checked
        sql += "" if self.where is None else f" WHERE (\n{self.where}\n)"
        if not ignore_limit:
            sql += " ORDER BY " + ("" if self.sort is None else f"{self.sort}\n, ") + POSITION_COLUMN
            sql += "" if self.max_rows is None else f" LIMIT {self.max_rows}"
        return sql

    def _require_single_condition_and_sort(self, connection: Any) -> None:
        """Check that `where` and `sort` are single SQL expressions. Otherwise raise a DuckDB parser error."""
        statements = [] if self.where is None else [f"SELECT {self.where}", f"SELECT (\n{self.where}\n)"]
        if self.sort is not None:  # a clause such as LIMIT would fail before a further column
            statements.append(f"SELECT 1 ORDER BY {self.sort}")
        for sql in statements:
            if len(connection.extract_statements(sql)) != 1:
                raise require("duckdb", extra="batch").ParserException("Parser Error: several statements, expected one")


class RowReader:
    """Read rows of a run by position. Only Parquet row groups that hold requested rows are read."""

    def __init__(self, dataset: "ds.Dataset") -> None:
        self._schema, self._checked_files = dataset.schema, set[str]()
        with translate_part_errors():
            fragments = dataset.get_fragments()
            self._row_groups = [group for fragment in fragments for group in fragment.split_by_row_group()]
            sizes = [sum(part.num_rows for part in group.row_groups) for group in self._row_groups]
        self._group_starts = np.cumsum([0, *sizes])

    def read_rows_at(self, positions: RowPositions, columns: Sequence[str] | None = None) -> "pa.Table":
        """Return the rows at the given positions. The order of the positions is kept."""
        order = np.argsort(positions, kind="stable")
        tables = list(self.iter_tables(positions[order], columns))
        table = import_arrow().concat_tables(tables) if tables else self._schema.empty_table()
        if columns is not None:
            table = table.select(list(columns))
        return table.take(np.argsort(order, kind="stable"))

    def iter_tables(self, positions: RowPositions, columns: Sequence[str] | None = None) -> "Iterator[pa.Table]":
        """Yield the rows at ascending positions. Each table holds the rows of one Parquet row group."""
        group_numbers = np.searchsorted(self._group_starts, positions, side="right") - 1
        for group_positions in np.split(positions, np.flatnonzero(np.diff(group_numbers)) + 1):
            if len(group_positions):
                number = int(np.searchsorted(self._group_starts, group_positions[0], side="right")) - 1
                group, names = self._row_groups[number], None if columns is None else list(columns)
                with translate_part_errors(group.path):
                    if group.path not in self._checked_files:
                        check_parquet_files([group.path])
                        self._checked_files.add(group.path)
                    table = require_key_columns(group.to_table(schema=self._schema, columns=names))
                    rows = table.take(group_positions - self._group_starts[number])
                yield rows


def open_parts(parts: Sequence[str], schema: "pa.Schema | None" = None) -> "ds.Dataset":
    """Open part files as one Arrow dataset. No rows are read. Raise an InputError for a file that is not Parquet."""
    with translate_part_errors():
        rows = import_arrow("dataset").dataset(list(parts), schema=schema, format="parquet")
        _require_column_types(rows.schema)
        return rows


def open_map_parts(parts: Sequence[str]) -> "ds.Dataset":
    """Open part files that contain maps. Raise an InputError if a required column is missing."""
    rows = open_parts(parts)
    if missing := [name for name in get_result_column_types() if name not in (*OPTIONAL_COLUMNS, *rows.schema.names)]:
        raise InputError(
            f"the part files have no column {', '.join(missing)}; they are damaged or belong to another program"
        )
    return rows


def _require_column_types(schema: "pa.Schema") -> None:
    """Raise an InputError for a result column of the wrong type, and for two columns with the same name."""
    repeated = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if repeated:
        raise InputError(f"several columns are named {', '.join(repeated)}")
    is_list = import_arrow().types.is_list
    for name, expected in get_result_column_types().items():
        actual = schema.field(name).type if name in schema.names else expected
        # the names of list items may differ
        is_same_list = is_list(actual) and is_list(expected) and actual.value_type == expected.value_type
        if actual != expected and not is_same_list:
            raise InputError(f"the column {name} has the type {actual}; expected {expected}")


def require_key_columns(table: "pa.Table") -> "pa.Table":
    """Return the table unchanged. Raise an InputError if a row lacks its number, id, status or method."""
    for name in REQUIRED_COLUMNS:
        if name in table.column_names and (count := table[name].null_count):
            raise InputError(f"{plural(count, 'row has', 'rows have')} no value in the column {name}")
    return table


def read_rows(dataset: "ds.Dataset", columns: Sequence[str] | None = None, filter_expression: Any = None) -> "pa.Table":
    """Read the rows that match a PyArrow filter expression. By default, read all rows and all columns."""
    with translate_part_errors():
        check_parquet_files(dataset.files)
        return require_key_columns(
            dataset.to_table(columns=None if columns is None else list(columns), filter=filter_expression)
        )


def translate_part_errors(part_name: str = "a part of the run") -> contextlib.AbstractContextManager[None]:
    """Convert Arrow errors in the `with` block to an InputError. The InputError names the damaged part file."""
    return read_errors_converted(
        f"{part_name} cannot be read; remove it, and it is computed again",
        quote_original=False,
        wrap_camscope_errors=True,
    )


def iter_rows_by_image(dataset: "ds.Dataset", positions: RowPositions) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of one image at a time, as a list of dictionaries. `positions` must be ascending."""
    for table in RowReader(dataset).iter_tables(positions):
        yield from group_rows_by_image(table)


def group_rows_by_image(table: "pa.Table") -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of one image at a time, as a list of dictionaries."""
    for _, rows in groupby(table_to_dicts(table), lambda row: row["row"]):
        yield list(rows)


def table_to_dicts(table: "pa.Table") -> list[dict[str, Any]]:
    """Convert table rows to dictionaries. Attribution maps stay arrays."""
    with translate_part_errors():
        attributions = [scalar.values for scalar in table["attribution"]]
        other_values = table.drop_columns(["attribution"]).to_pylist()
    return [
        {**row, "attribution": None if attribution is None else attribution.to_numpy(zero_copy_only=False)}
        for row, attribution in zip(other_values, attributions, strict=True)
    ]

"""Gateway to Arrow: convert a Parquet file once to an Arrow file, and read single rows of the Arrow file.

pyarrow is imported when a Parquet file is used. No descriptor stays open between calls: episodes are forks.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marlaas_api.errors import InvalidInput

if TYPE_CHECKING:
    import pyarrow as pa

BATCH = 4096
"""Rows of a batch of the Arrow file; all but the last one are full, so that a row's batch is known."""
_BUFFER_BYTES = 1 << 20


def convert(parquet: Path, arrow: Path, shown: str) -> None:
    """Write a Parquet file as an Arrow file. Memory stays small, also with one large row group. Raises InvalidInput."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        source = pq.ParquetFile(parquet, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        with pa.OSFile(str(arrow), "wb") as file, pa.ipc.new_file(file, source.schema_arrow) as writer:
            for batch in _full(source.iter_batches(batch_size=BATCH, use_threads=False), source.schema_arrow):
                writer.write_batch(batch)
    except pa.ArrowException as error:
        raise InvalidInput(f"{shown} cannot be read as Parquet: {error}") from None


def _full(batches: "Iterator[pa.RecordBatch]", schema: "pa.Schema") -> "Iterator[pa.RecordBatch]":
    """Yield batches of exactly BATCH rows; the last one may have fewer. Parquet's batches may end at a row group's end."""
    import pyarrow as pa

    left: list[pa.RecordBatch] = []
    for batch in batches:
        left.append(batch)
        if sum(map(len, left)) >= BATCH:
            (whole,) = pa.Table.from_batches(left, schema).combine_chunks().to_batches() or [batch]
            yield whole.slice(0, BATCH)
            left = [whole.slice(BATCH)]
    if rest := pa.Table.from_batches(left, schema).combine_chunks().to_batches():
        yield rest[0]


class ArrowRows:
    """Rows of an Arrow file that `convert` wrote; the file is mapped for each row."""

    def __init__(self, file: Path, num_rows: int) -> None:
        self._file, self._num_rows = file, num_rows

    def __len__(self) -> int:
        return self._num_rows

    def row(self, number: int) -> dict[str, Any]:
        """Return the columns of a row."""
        with _opened(self._file) as reader:
            (row,) = reader.get_batch(number // BATCH).slice(number % BATCH, 1).to_pylist()
            return dict(row)

    def place(self, number: int) -> str:
        """Return the place of a row within its file."""
        return f"row {number + 1}"


def num_batches(file: Path) -> int:
    """Return the number of batches of an Arrow file that `convert` wrote."""
    with _opened(file) as reader:
        return int(reader.num_record_batches)


def scan(
    file: Path, columns: Collection[str] | None, batches: range | None = None
) -> "Iterator[tuple[int, dict[str, list[Any]]]]":
    """Yield batches of rows, in order: their number of rows, and the values of these columns, as far as the file has them.

    Args:
        columns: None: all.
        batches: numbers of the batches; None: all.
    """
    with _opened(file) as reader:
        names = reader.schema.names
    read = [at for at, name in enumerate(names) if columns is None or name in columns]
    with _opened(file, mapped=False, fields=read) as reader:
        for number in range(reader.num_record_batches) if batches is None else batches:
            batch = reader.get_batch(number)
            yield len(batch), {names[at]: batch.column(names[at]).to_pylist() for at in read}


class _opened:  # noqa: N801
    """Context of a reader of an Arrow file.

    Args:
        mapped: for single rows; to read all would keep the whole file in the process's memory.
        fields: numbers of the columns that are read; None: all.
    """

    def __init__(self, file: Path, *, mapped: bool = True, fields: "Sequence[int] | None" = None) -> None:
        self._path, self._mapped, self._fields = str(file), mapped, fields

    def __enter__(self) -> "pa.ipc.RecordBatchFileReader":
        import pyarrow as pa

        self._source = pa.memory_map(self._path) if self._mapped else pa.OSFile(self._path)
        return pa.ipc.open_file(
            self._source, options=pa.ipc.IpcReadOptions(use_threads=False, included_fields=self._fields)
        )

    def __exit__(self, *_: object) -> None:
        self._source.close()

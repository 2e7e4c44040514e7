"""Parquet: one document per row."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from twoaxis.core.errors import DataError, nearest
from twoaxis.data.corpus.scan import Document
from twoaxis.data.corpus.text_files import FileCorpusConfig


class ParquetConfig(FileCorpusConfig):
    """A Parquet file, or a folder of them; needs the extra `twoaxis[parquet]`.

    Attributes:
        column: the string column that holds the text.
    """

    kind: Literal["parquet"] = "parquet"
    pattern: str = "*.parquet"
    column: str = "text"

    def read_file(self, path: Path, name: str) -> Iterator[Document]:
        """Reads one document per row, a batch of rows at a time."""
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise DataError(f"{path}: reading Parquet needs pyarrow; install it with: pip install 'twoaxis[parquet]'") from None
        row = 0
        try:
            with parquet.ParquetFile(path) as file:
                columns = file.schema_arrow.names
                if self.column not in columns:
                    raise DataError(f"{path}: has no column {self.column!r}; set column, {nearest(self.column, columns)}")
                for batch in file.iter_batches(batch_size=1024, columns=[self.column]):
                    for text in batch.column(0).to_pylist():
                        if not isinstance(text, str):
                            raise DataError(
                                f"{path}: row {row} of column {self.column!r} is {type(text).__name__}; must be a string; "
                                "set column to the column of the text, or drop the row"
                            )
                        yield Document(f"{name}:{row}", text)
                        row += 1
        except UnicodeDecodeError:
            raise DataError(f"{path}: column {self.column!r} after row {row} is not UTF-8; convert the text") from None
        except pyarrow.ArrowException as error:
            raise DataError(f"{path}: is not a readable Parquet file ({error}); write it again, or set kind") from None

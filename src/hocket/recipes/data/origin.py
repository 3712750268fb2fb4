"""Finds, reads and decodes a data set's files; errors say where to get them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hocket.errors import DataError

_MARK = "\ufeff"  # the byte-order mark that some editors leave at the beginning


@dataclass(frozen=True, slots=True)
class DataOrigin:
    """Where to get a data set, and the layout of its folder.

    Args:
        name: the data set's name.
        url: its own page.
        layout: the files in the folder, in a few words.
    """

    name: str
    url: str
    layout: str

    @property
    def advice(self) -> str:
        """The end of an error message: what is expected, and where to get it."""
        return f"{self.name} is expected as {self.layout}; get it from {self.url}"

    def find(self, folder: Path, *names: str) -> Path:
        """Return the first of these files that is in a folder.

        Args:
            folder: the data set's folder.
            names: names of the file, in the order of preference.

        Raises:
            DataError: there is no such folder, or none of the files in it.
        """
        if not folder.is_dir():
            what = "is a file, not a folder" if folder.exists() else "does not exist"
            raise DataError(f"{folder} {what}: {self.advice}")
        for name in names:
            if (folder / name).is_file():
                return folder / name
        missing = " nor ".join(names)
        raise DataError(f"{folder} has no file {missing}: {self.advice}")

    def read(self, path: Path) -> bytes:
        """Return a file's content.

        Raises:
            DataError: it is missing, empty, or cannot be read.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"{path} cannot be read ({error.strerror}): {self.advice}"
            ) from error
        if not data:
            raise DataError(f"{path} is empty: {self.advice}")
        return data

    def text(self, path: Path) -> str:
        """Return a text file's content, without a byte order mark.

        Raises:
            DataError: as `read`, or the file is not UTF-8; names the line.
        """
        data = self.read(path)
        try:
            return data.decode("utf-8").removeprefix(_MARK)
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise DataError(
                f"{path}, line {line}: byte {data[error.start]:#04x} is not UTF-8: "
                "convert the file (iconv -f latin1 -t utf-8, where it is Latin-1)"
            ) from error

    def lines(self, path: Path) -> list[str]:
        """Return a text file's lines, without their ends; line n is at n - 1.

        Only line feeds end a line, with or without a carriage return before them: the
        other characters that `str.splitlines` splits at occur in sentences.

        Raises:
            DataError: as `read`, or the file is not UTF-8; names the line.
        """
        lines = self.text(path).split("\n")
        if not lines[-1]:
            lines.pop()
        return [line.removesuffix("\r") for line in lines]

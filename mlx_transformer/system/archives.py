"""Zip archives that somebody else made: what one claims to hold is compared with its file before it is believed."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib

LARGEST_DIRECTORY = 16 << 20
"""Bytes of the list of entries at an archive's end; that of 100,000 tensors has half of them."""
MOST_EXPANSION = 16
"""How many times its size an archive's contents may have. Trained numbers hardly compress to a half."""
FREE_EXPANSION = 16 << 20
"""Bytes that the contents may have in any case."""
DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, ValueError, EOFError, OverflowError, TypeError)
DAMAGE += (NotImplementedError, RuntimeError)
"""What `zipfile` and the readers of an archive's parts raise for one that is damaged."""


class _Bounded:
    """A file of which `zipfile` never reads more at once than a list of entries may have."""

    def __init__(self, file: io.BufferedReader):
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if size > LARGEST_DIRECTORY:
            raise zipfile.BadZipFile(f"its list of entries has {size} bytes")
        return self._file.read(size if size >= 0 else LARGEST_DIRECTORY)


def open_archive(file: io.BufferedReader) -> zipfile.ZipFile:
    """Open an archive to read entries that are stored or deflated. Raises one of `DAMAGE`, also for entries that
    overlap, lie outside the file, or are far larger than the file."""
    archive = zipfile.ZipFile(_Bounded(file))  # type: ignore[arg-type]
    entries, size = archive.infolist(), os.fstat(file.fileno()).st_size
    packed, unpacked = (sum(getattr(entry, name) for entry in entries) for name in ("compress_size", "file_size"))
    if packed > size or any(entry.header_offset >= size for entry in entries):
        raise zipfile.BadZipFile(f"its entries have {packed} bytes, in a file of {size}")
    if unpacked > MOST_EXPANSION * packed + FREE_EXPANSION:
        raise zipfile.BadZipFile(f"its {packed} bytes would become {unpacked}")
    if any(entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in entries):
        raise zipfile.BadZipFile("its entries are compressed by another method than deflate")
    return archive

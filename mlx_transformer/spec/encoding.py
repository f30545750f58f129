"""Marks at the start of text files that say how they are encoded."""

from __future__ import annotations

import codecs

from .errors import UserError

UTF8 = codecs.BOM_UTF8
WIDE = {
    codecs.BOM_UTF32_LE: "UTF-32",  # begins as UTF-16's does
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def without_mark(data: bytes, name: str) -> bytes:
    """The start of a file without UTF-8's mark; `UserError` for the mark of another encoding. name: of the file."""
    for mark, encoding in WIDE.items():
        if data.startswith(mark):
            raise UserError(f"{name}: is {encoding}; convert it: iconv -f {encoding} -t UTF-8 {name} > NEW")
    return data.removeprefix(UTF8)

"""The table of a Precompiled normalizer, SentencePiece's, in a tokenizer.json: what its library would give up at.

bytes 0 to 3: size of the trie, little-endian; the trie, four bytes a unit; the replacements, UTF-8, each ended by NUL.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from mlx_transformer.system.errors import UserError


def check_precompiled(normalizer: Any, origin: str) -> None:
    """`UserError` for a table that isn't whole. The library ends a thread there, and says so in many lines."""
    if not isinstance(normalizer, dict):
        return
    for inner in normalizer.get("normalizers") or ():
        check_precompiled(inner, origin)
    if normalizer.get("type") == "Precompiled" and not _is_whole(normalizer.get("precompiled_charsmap")):
        raise UserError(f"{origin}: the table of its Precompiled normalizer is damaged; restore it from a copy")


def _is_whole(table: Any) -> bool:
    try:
        data = base64.b64decode(table, validate=True)
        size = int.from_bytes(data[:4], "little")
        data[4 + size :].decode()
    except (TypeError, ValueError, binascii.Error):
        return False
    return size > 0 and size % 4 == 0 and len(data) >= 4 + size

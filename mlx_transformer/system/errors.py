"""The one exception type for mistakes that a user can make and can mend."""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own takes longer to import than all that is here
if TYPE_CHECKING:
    from collections.abc import Sequence


class UserError(ValueError):
    """Wrong input, settings or files. The message is one line: what is wrong, where, and what to do.

    A command line prints it without a traceback and exits with `status` (`process.py`).
    """

    status = 2


LONGEST_NAME = 400  # characters, of which two hundred at either end say which one it is


def shortened(text: str) -> str:
    """Return a name or another word as a line can show it: of a long one both ends, of half a surrogate pair its
    number."""
    half, text = LONGEST_NAME // 2, text.encode(errors="backslashreplace").decode()
    return text if len(text) <= LONGEST_NAME else f"{text[:half]}...{text[-half:]}"


def error_line(error: BaseException) -> str:
    """Return the words of another library's error in one line, of which the first two hundred letters say enough."""
    return " ".join(str(error).split())[:200]


def first_of(problems: Sequence[str], most: int = 8) -> str:
    """Return several problems in one line, and how many more there are."""
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more

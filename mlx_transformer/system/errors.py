"""The one exception type for mistakes that a user can make and can mend."""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own takes longer to import than all that is here
if TYPE_CHECKING:
    from collections.abc import Sequence


class UserError(ValueError):
    """Wrong input, settings or files. The message is one line: what is wrong, where, and what to do.

    A command line prints it without a traceback and exits with `status` (`process.py`). `problems`: everything that is
    wrong, where the message has room for the first alone (`refusal`); `info` prints them.
    """

    status = 2

    def __init__(self, message: str = "", problems: Sequence[str] = ()):
        super().__init__(one_line(message))
        self.problems = problems


LONGEST_NAME = 400  # characters, of which two hundred at either end say which one it is


def shortened(text: str, longest: int = LONGEST_NAME) -> str:
    """Return a name or another word as a line can show it: of a long one both ends, of half a surrogate pair its
    number."""
    half, text = longest // 2, text.encode(errors="backslashreplace").decode()
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"


def one_line(message: str) -> str:
    """Return a message in one line, long words shortened: parts of it may come from a stranger's file, to be read, not
    obeyed."""
    line = " ".join(map(shortened, " ".join(message.splitlines()).split(" ")))
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def error_line(error: BaseException) -> str:
    """Return the words of another library's error in one line, of which the first two hundred letters say enough."""
    return " ".join(str(error).split())[:200]


FEW, SHORT = 3, 500
"""So many of a list are said that is longer than this many characters."""


def first_of(problems: Sequence[str], joint: str = "; ") -> str:
    """Return several problems or names as a line can show them: of a long list the count and the first three."""
    if len(line := joint.join(problems)) <= SHORT:
        return line
    few = joint.join(shortened(text, 160) for text in problems[:FEW])
    return few if len(problems) <= FEW else f"{len(problems)}, the first of them {few}"


def refusal(where: object, problems: Sequence[str], model: object, hint: str = "") -> UserError:
    """Return the error of several problems of a model's folder or file. where: what the line begins with. model: what
    `info` lists all of them of, where the line has the first alone."""
    listed = f"mlx-transformer info {model} lists all" if len("; ".join(problems)) > SHORT else ""
    return UserError(f"{where}: {'; '.join(filter(None, [first_of(problems), hint, listed]))}", problems)

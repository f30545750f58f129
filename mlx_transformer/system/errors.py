"""The one exception type for mistakes that a user can make and can mend."""


class UserError(ValueError):
    """Wrong input, settings or files. The message is one line: what is wrong, where, and what to do.

    A command line prints it without a traceback and exits with `status` (`process.py`).
    """

    status = 2


LONGEST_NAME = 400  # characters, of which two hundred at either end say which one it is


def shortened(text: str) -> str:
    """A name or another word as a line can show it: of a long one both ends."""
    half = LONGEST_NAME // 2
    return text if len(text) <= LONGEST_NAME else f"{text[:half]}...{text[-half:]}"

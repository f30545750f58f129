"""The one exception type for mistakes that a user can make and can mend."""


class UserError(ValueError):
    """Wrong input, settings or files. The message is one line: what is wrong, where, and what to do.

    A command line prints it without a traceback and exits with `status` (`process.py`).
    """

    status = 2

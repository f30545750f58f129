"""The error a person can cause: the command line prints it in one line and exits with 2."""


class UserError(ValueError):
    """Bad input, files or options. The message says what is wrong, where, and what to do, in one line."""

"""What is wrong in a source of the documentation, in one line that says where."""


class Problem(Exception):  # noqa: N818
    """`where: what`."""

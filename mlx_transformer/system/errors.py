"""`UserError`, the exception for mistakes that a user can make and correct.

Options and commands in a message are kept as data (`Name`, `CommandLine`), not text. So Python prints `beam=0`, and the
command line prints `--beam 0` (`UserError.said`).
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing takes longer than this whole module
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TypeAlias

    Spelling: TypeAlias = "Callable[[Name | CommandLine], str]"


class Name:
    """An option in a message: `beam=0`, or `beam` without a value. On the command line: `--beam 0`, `--beam`."""

    def __init__(self, name: str, value: str | None = None):
        self.name, self.value = name, value

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}={self.value}"


class CommandLine:
    """A command to type: `mlx-transformer NAME ARGUMENTS`. Other programs spell it their way (`UserError.said`)."""

    def __init__(self, name: str, arguments: str = ""):
        self.name, self.arguments = name, arguments

    def __str__(self) -> str:
        return f"mlx-transformer {self.name} {self.arguments}".rstrip()


class Text(str):
    """Text from a template: `{}` is the next value, `{beam}` the option `beam` with its value, or only its name.

    >>> Text("{n_best} is more than {beam}: raise {beam}, or lower {}", "it", n_best=3, beam=1)
    'n_best=3 is more than beam=1: raise beam=1, or lower it'
    """

    parts: tuple[Any, ...]
    """The pieces in order: str, Name, CommandLine or Text."""

    def __new__(cls, template: str, *values: Any, **options: Any) -> Text:
        from string import Formatter  # needed only for errors

        rest = iter(values)
        parts: list[Any] = []
        for literal, field, _, conversion in Formatter().parse(template):
            show = repr if conversion == "r" else str
            value: Any = Name(field, show(options[field]) if field in options else None) if field else ""
            if field == "":
                value = next(rest)
                value = value.text if isinstance(value, UserError) else value
            parts += literal, value if isinstance(value, Name | CommandLine | Text) else show(value)
        return cls.of(parts)

    @classmethod
    def of(cls, parts: Sequence[Any]) -> Text:
        text = super().__new__(cls, "".join(map(str, parts)))
        text.parts = tuple(parts)
        return text

    def __reduce__(self) -> Any:
        return Text.of, (self.parts,)

    def said(self, spelled: Spelling) -> str:
        """The text with each option and command spelled by `spelled`, e.g. `--beam 0` for `beam=0`."""
        spell = lambda part: part.said(spelled) if isinstance(part, Text) else spelled(part)  # noqa: E731
        return "".join(part if type(part) is str else spell(part) for part in self.parts)


def joined(texts: Sequence[str], joint: str = "; ") -> Text:
    """Join texts, keeping their options and commands as data."""
    return Text(joint.join(["{}"] * len(texts)), *texts)


class UserError(ValueError):
    """Wrong input, settings or files. The message is one line: the problem, the place and the remedy.

    The command line prints it without a traceback and exits with `status` (`process.py`). `values` and `options` fill
    the message as a template (`Text`); without them the message is used unchanged. problems: the full list if the
    message shows only its beginning (`refusal`); `info` prints it.
    """

    status = 2

    def __init__(self, message: str = "", *values: Any, problems: Sequence[str] = (), **options: Any):
        self.text = Text(message, *values, **options) if values or options else message
        super().__init__(one_line(self.text))
        self.problems = problems

    def add(self, more: str) -> None:
        """Append a sentence to the message."""
        self.text = joined([self.text, more])
        self.args = (one_line(self.text),)

    def said(self, spelled: Spelling) -> str:
        """The message with options and commands spelled as in another program, e.g. `--beam 0` for `beam=0`."""
        return one_line(self.text.said(spelled)) if isinstance(self.text, Text) else str(self)


LONGEST_NAME = 400  # characters


def shortened(text: str, longest: int = LONGEST_NAME) -> str:
    """Shorten a long name to its two ends, and escape lone surrogates, for printing."""
    half, text = longest // 2, text.encode(errors="backslashreplace").decode()
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"


def one_line(message: str) -> str:
    """Put a message on one line, shorten long words and replace control characters, which may come from a file."""
    line = " ".join(map(shortened, " ".join(message.splitlines()).split(" ")))
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def error_line(error: BaseException) -> str:
    """The first 200 characters of another library's error, on one line."""
    return " ".join(str(error).split())[:200]


FEW, SHORT = 3, 500
"""A list of more than SHORT characters shows only its first FEW entries."""


def first_of(problems: Sequence[str], joint: str = "; ") -> str:
    """Join problems or names for one line; a long list becomes its count and its first three entries."""
    if len(line := joined(problems, joint)) <= SHORT:
        return line
    few = joint.join(shortened(text, 160) for text in problems[:FEW])
    return few if len(problems) <= FEW else f"{len(problems)}, the first of them {few}"


def refusal(where: object, problems: Sequence[str], model: object, hint: str = "") -> UserError:
    """Make one error of several problems in a model's files.

    where: the start of the message. model: the folder or file; a message that can't show all problems refers to
    `info MODEL`.
    """
    parts = [first_of(problems), *filter(None, [hint])]
    if len("; ".join(problems)) > SHORT:
        parts.append(Text("{} lists all", CommandLine("info", str(model))))
    return UserError("{}: {}", where, joined(parts), problems=problems)

"""The one exception type for mistakes that a user can make and can mend.

An option or a command that an error names is data in it (`Name`, `CommandLine`): Python prints `beam=0`, a command line
prints `--beam 0` (`UserError.said`).
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own takes longer to import than all that is here
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TypeAlias

    Spelling: TypeAlias = "Callable[[Name | CommandLine], str]"


class Name:
    """An option: `beam=0`, or without a value `beam`. On the command line: `--beam 0`, `--beam`."""

    def __init__(self, name: str, value: str | None = None):
        self.name, self.value = name, value

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}={self.value}"


class CommandLine:
    """What to type: `mlx-transformer NAME ARGUMENTS`; other programs call their commands differently."""

    def __init__(self, name: str, arguments: str = ""):
        self.name, self.arguments = name, arguments

    def __str__(self) -> str:
        return f"mlx-transformer {self.name} {self.arguments}".rstrip()


class Text(str):
    """A text made of a template: `{}` is the next value, `{beam}` an option with its value, or without one its name.

    >>> Text("{n_best} is more than {beam}: raise {beam}, or lower {}", "it", n_best=3, beam=1)
    'n_best=3 is more than beam=1: raise beam=1, or lower it'
    """

    parts: tuple[Any, ...]
    """Text, names, commands and other such texts, in their order."""

    def __new__(cls, template: str, *values: Any, **options: Any) -> Text:
        from string import Formatter  # nobody needs it until there is an error

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
        """The text with options and commands in another spelling."""
        spell = lambda part: part.said(spelled) if isinstance(part, Text) else spelled(part)  # noqa: E731
        return "".join(part if type(part) is str else spell(part) for part in self.parts)


def joined(texts: Sequence[str], joint: str = "; ") -> Text:
    """Join texts without losing what is data in them."""
    return Text(joint.join(["{}"] * len(texts)), *texts)


class UserError(ValueError):
    """Wrong input, settings or files. The message is one line: what is wrong, where, and what to do.

    A command line prints it without a traceback and exits with `status` (`process.py`). `values` and `options` fill the
    message as a template (`Text`); a message without them is taken as it is. `problems`: everything that is wrong,
    where the message has room for the first alone (`refusal`); `info` prints them.
    """

    status = 2

    def __init__(self, message: str = "", *values: Any, problems: Sequence[str] = (), **options: Any):
        self.text = Text(message, *values, **options) if values or options else message
        super().__init__(one_line(self.text))
        self.problems = problems

    def add(self, more: str) -> None:
        """Say more at the end of the message."""
        self.text = joined([self.text, more])
        self.args = (one_line(self.text),)

    def said(self, spelled: Spelling) -> str:
        """The message with options and commands in the spelling of a program."""
        return one_line(self.text.said(spelled)) if isinstance(self.text, Text) else str(self)


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
    if len(line := joined(problems, joint)) <= SHORT:
        return line
    few = joint.join(shortened(text, 160) for text in problems[:FEW])
    return few if len(problems) <= FEW else f"{len(problems)}, the first of them {few}"


def refusal(where: object, problems: Sequence[str], model: object, hint: str = "") -> UserError:
    """Return the error of several problems of a model's folder or file. where: what the line begins with. model: what
    `info` lists all of them of, where the line has the first alone."""
    parts = [first_of(problems), *filter(None, [hint])]
    if len("; ".join(problems)) > SHORT:
        parts.append(Text("{} lists all", CommandLine("info", str(model))))
    return UserError("{}: {}", where, joined(parts), problems=problems)

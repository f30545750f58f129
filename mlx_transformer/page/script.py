"""Scripts of a page: ES modules as one script that needs no others, without what only readers of the source need."""

from __future__ import annotations

import re
from pathlib import Path

EXPORTED = re.compile(r"^export (?:async )?(?:function\*?|const|class) ([\w$]+)", re.M)
IMPORTED = re.compile(r"^import \{([^}]*)\} from '([^']*)';$", re.M)
BEFORE_A_REGEX = "(,=:[!&|?{};>"
"""Behind these a slash begins a regular expression; behind others it divides."""
ENDLESS, GOES_ON = "\n;{,([&|?:=", ".)]},;?:&|"
"""A line that ends with the first, or is followed by the second, needs no end."""
STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
REGEX = re.compile(r"/(?:[^/\\\[\n]|\\.|\[(?:[^\]\\]|\\.)*\])+/")
COMMENT = re.compile(r"//[^\n]*|/\*[\s\S]*?\*/")
SPACE = re.compile(r"\s+")
PLAIN = re.compile(r"[^\s'\"/`{};]+")
"""Text that stays as it is, whatever stands before it."""


def joined(entry: Path) -> str:
    """Return an ES module and all that it imports as one script: each module is a function, which returns its exports.

    Imports stand at the top, by relative names in braces.
    """
    written: dict[Path, str] = {}

    def add(path: Path) -> str:
        path = path.resolve()
        if path not in written:
            text = path.read_text(encoding="utf-8")
            names = EXPORTED.findall(text)

            def taken(match: re.Match[str]) -> str:
                return f"const {{{match[1].replace(' as ', ': ')}}} = {add(path.parent / match[2])};"

            text = IMPORTED.sub(taken, re.sub(r"^export ", "", text, flags=re.M))
            written[path] = compact(f"(() => {{\n{text}\nreturn {{ {', '.join(names)} }};\n}})()")
        return f"m{list(written).index(path)}"

    add(entry)
    return "".join(f"const m{i}={text};\n" for i, text in enumerate(written.values()))


def compact(text: str) -> str:
    """Return a script without its comments and the spaces and line ends that nothing depends on."""
    out: list[str] = []
    braces: list[int] = []  # of each template that is open, those in its hole
    at = 0
    while at < len(text):
        letter, last = text[at], out[-1][-1] if out else ";"
        if match := PLAIN.match(text, at):
            out.append(match[0])
            at = match.end()
        elif match := COMMENT.match(text, at):
            at = match.end()
        elif match := SPACE.match(text, at):
            at = match.end()
            following = text[at : at + 1] or ";"
            words = (last.isalnum() or last in "_$") and (following.isalnum() or following in "_$#")
            both = words or (last == "/" and following.isalpha())
            ends = last not in ENDLESS and following not in GOES_ON
            apart = both or (last == following and last in "+-")
            out += "\n" if "\n" in match[0] and ends else " " if apart else ""
        elif match := STRING.match(text, at) or (
            letter == "/" and (last in BEFORE_A_REGEX or last == "\n") and REGEX.match(text, at)
        ):
            out.append(match[0])
            at = match.end()
        elif letter == "`" or (letter == "}" and braces and braces[-1] == 0):
            end = _template_end(text, at + 1)
            out.append(text[at:end])
            if letter == "}":
                braces.pop()
            if text[end - 1] == "{":
                braces.append(0)
            at = end
        else:
            if braces and letter in "{}":
                braces[-1] += 1 if letter == "{" else -1
            if letter == "}" and last == ";":  # the last of a block needs none
                out.pop()
            out.append(letter)
            at += 1
    return "".join(out)


def _template_end(text: str, at: int) -> int:
    """Return where the text of a template ends, from `at` on: behind its last quote, or behind the ${ of a hole."""
    while text[at] != "`":
        if text.startswith("${", at):
            return at + 2
        at += 2 if text[at] == "\\" else 1
    return at + 1


def compact_style(text: str) -> str:
    """Return a style sheet without its line ends, the spaces around braces and commas and behind colons, and the last
    semicolon of each block."""
    close = re.sub(r" *([{};,]) *", r"\1", re.sub(r"\s*\n\s*", "", text))
    return close.replace(": ", ":").replace(";}", "}")

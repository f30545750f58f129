"""Bundle a page's ES modules into one script, and shorten scripts and style sheets."""

from __future__ import annotations

import re
from pathlib import Path

EXPORTED = re.compile(r"^export (?:async )?(?:function\*?|const|class) ([\w$]+)", re.M)
IMPORTED = re.compile(r"^import \{([^}]*)\} from '([^']*)';$", re.M)
BEFORE_A_REGEX = "(,=:[!&|?{};>"
"""After these characters a slash begins a regular expression; after others it divides."""
ENDLESS, GOES_ON = "\n;{,([&|?:=", ".)]},;?:&|"
"""A line break isn't needed after a character of the first string, or before a character of the second."""
STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
REGEX = re.compile(r"/(?:[^/\\\[\n]|\\.|\[(?:[^\]\\]|\\.)*\])+/")
COMMENT = re.compile(r"//[^\n]*|/\*[\s\S]*?\*/")
SPACE = re.compile(r"\s+")
PLAIN = re.compile(r"[^\s'\"/`{};]+")
"""Text copied unchanged in any context."""


def joined(entry: Path) -> str:
    """Bundle an ES module and its imports into one script. Each module becomes a function that returns its exports.

    Imports must have the form `import { a, b as c } from './file.js';`, on one line.
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
    """Remove comments and unneeded spaces and line breaks from a script."""
    out: list[str] = []
    braces: list[int] = []  # for each open template literal, the number of open braces within its ${...}
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
            if letter == "}" and last == ";":  # the last statement of a block needs no semicolon
                out.pop()
            out.append(letter)
            at += 1
    return "".join(out)


def _template_end(text: str, at: int) -> int:
    """The index after a template literal's text starting at `at`: after its closing backquote, or after a `${`."""
    while text[at] != "`":
        if text.startswith("${", at):
            return at + 2
        at += 2 if text[at] == "\\" else 1
    return at + 1


def compact_style(text: str) -> str:
    """Remove a style sheet's line breaks, spaces around braces, commas and after colons, and each block's last
    semicolon."""
    close = re.sub(r" *([{};,]) *", r"\1", re.sub(r"\s*\n\s*", "", text))
    return close.replace(": ", ":").replace(";}", "}")

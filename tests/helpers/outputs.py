"""The commands that write, their outputs and what they read, taken from the command line itself: a parameter that is a
path and isn't among `READ` is an output, so that a new command is tried without anybody thinking of it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from mlx_transformer.commands.app import ALL, command_of, function_of
from mlx_transformer.commands.settings import with_settings

READ = set(
    "model checkpoint source reference base adapter checkpoints input onnx runs a b folder models teacher".split()
)
READ |= set("calibrate shortlist gate_source gate_reference assets original web api_key_file".split())
READ |= set("pairs similarity labelled valid_source valid_target hostfile path messages tools text draft".split())
"""Parameters that are paths of something that is read."""
TEXTS = ("source", "reference", "input")
TABLES = {"pairs", "similarity", "labelled"}
"""What `evaluate` reads instead of them."""
WORDS = {"texts": ["A man."], "recipe": ["quickstart"], "repository": ["org/name"]}
REASONS = (
    "is read",
    "lie inside",
    "is a file",
    "is a folder",
    "holds",
    "the teacher",
    "needs a folder",
)
"""What an error about an output says, one of these."""


@functools.cache
def parameters(command: str) -> dict[str, Any]:
    """The parameters of a command by their names, as the parser has them."""
    return {each.name: each for each in command_of("mlx-transformer").commands[command].params if each.name}


def paths(command: str) -> Iterator[str]:
    """The names of those that are paths."""
    for each in inspect.signature(with_settings(function_of(command))).parameters.values():
        kind = get_args(each.annotation)[0] if get_origin(each.annotation) is Annotated else each.annotation
        if Path in (kind, *get_args(kind)):
            yield each.name


OUTPUTS = [(command, name) for command in ALL for name in paths(command) if name not in READ]


def command_line(command: str, given: Mapping[str, list[Any]], places: Mapping[str, Path]) -> list[Any]:
    """A call of a command. given: parameters and their values; whatever else it demands is one of `places`: text, run
    and model."""
    arguments: list[Any] = [command]
    for name, parameter in parameters(command).items():
        values: list[Any] = []
        if name in given:
            values = given[name]
        elif name in WORDS and (parameter.required or name == "texts"):
            values = WORDS[name]
        elif name in TEXTS and (parameter.required or (command == "evaluate" and not given.keys() & TABLES)):
            values = [places["text"]]
        elif parameter.required or name in ("model", "models"):
            assert name in READ, f"{command}: say here what {name} may be"
            runs = {"checkpoints": 2, "runs": 1}.get(name, 0)
            values = [places["run"]] * runs or [places["model"]]
        if values and parameter.opts[0].startswith("-"):
            arguments += [parameter.opts[0], *values]
        else:
            arguments += values
    return arguments

"""What docs/deploy.md and the Dockerfile start is a server: every option is one, and it has time for its end."""

from __future__ import annotations

import configparser
import json
import plistlib
import re
import shlex

import pytest
from documents import blocks
from imports import ROOT

from export.serve.models import Named
from export.settings import ServeSettings
from mlx_transformer.system.fields import field_types

PAGE = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "docs/serve.Dockerfile").read_text(encoding="utf-8")


def block(kind):
    [found] = [block.code for block in blocks(PAGE) if block.kind == kind]
    return found


def unit():
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read_string(block("ini"))
    return parser


def in_container():
    entry, command = (json.loads(re.search(rf"^{name} (\[.*)$", DOCKERFILE, re.M)[1]) for name in ("ENTRYPOINT", "CMD"))
    return [*entry, *command]


COMMANDS = {
    "container": in_container,
    "systemd": lambda: shlex.split(unit()["Service"]["ExecStart"]),
    "launchd": lambda: plistlib.loads(block("xml").encode())["ProgramArguments"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_are_of_the_server(name):
    program, serve, *rest = COMMANDS[name]()
    assert (program.rpartition("/")[2], serve) == ("mlx-transformer", "serve")
    models, options = [], iter(rest)
    for word in options:
        if word.startswith("--"):
            field = word[2:].replace("-", "_")
            assert field in {*field_types(ServeSettings), "api_key_file"}
            next(options)
        else:
            models.append(word)
    assert Named.of(models)


def test_the_end_has_more_time_than_the_server_takes():
    least = ServeSettings().grace_seconds + 5
    assert int(unit()["Service"]["TimeoutStopSec"]) > least
    assert plistlib.loads(block("xml").encode())["ExitTimeOut"] > least
    assert int(re.search(r"--stop-timeout (\d+)", DOCKERFILE)[1]) > least

"""The commands, each a function with typer's annotations; `cli.py` puts them together."""

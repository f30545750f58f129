"""The commands, each a function with typer's annotations; `app.py` puts them together."""

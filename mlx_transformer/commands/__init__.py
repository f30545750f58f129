"""The commands, each a function whose annotations say how it is called; `app.py` puts them together."""

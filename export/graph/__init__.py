"""Graphs made, changed and read: what every target and pass shares."""

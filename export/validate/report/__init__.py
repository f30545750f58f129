"""The findings of a validation: as data, in the terminal, as JSON and as a page."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from mlx_transformer.page import table
from mlx_transformer.system import terminal
from mlx_transformer.system.durable import write_text

from .data import ReportData, summary
from .html import page
from .terminal import print_report


class Report(ReportData):
    """The result of a validation: its data, and every way to show them."""

    def write(self, path: str | Path) -> None:
        """Write the JSON, making folders as needed; `UserError` if the place can't be written to."""
        write_text(Path(path), self.to_json())

    def write_html(self, path: str | Path) -> None:
        """Write one page that needs nothing else; `UserError` if the place can't be written to."""
        write_text(Path(path), page(self))

    def __repr__(self) -> str:
        """Say in a shell what it comes to: its numbers fill pages."""
        names = ", ".join(runtime.name for runtime in self.runtimes)
        return f"Report({self.verdict}: {self.checkpoint}, {self.onnx}, by {names}); .print() shows more"

    def _repr_html_(self) -> str:
        """Show the verdict, and what supports it or went wrong, in notebooks."""
        return table(f"validate: {self.verdict}", summary(self))

    def print(self, console: Console | None = None) -> None:
        """Print it on the terminal: verdict first, then what supports it."""
        print_report(self, console or terminal.Console())

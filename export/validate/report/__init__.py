"""The findings of a validation: as data, in the terminal, as JSON and as a page."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from mlx_transformer.core.outputs import Kind, claim, holds_object, page_kind
from mlx_transformer.page import table
from mlx_transformer.system import progress as terminal
from mlx_transformer.system.durable import Output, Target, write_text

from .data import ReportData, summary
from .html import page
from .terminal import print_report

JSON = Kind("report of validate", holds_object("verdict", "checkpoint", "onnx", "runtimes"))


def claim_reports(
    json: Target | None, html: Target | None, force: bool, *read: Path
) -> tuple[Output | None, Output | None]:
    """Claim the places of the JSON report and of the page, if asked for. `UserError` as of `claim`."""
    first = None if json is None else claim(json, JSON, force, *read)
    return first, None if html is None else claim(html, page_kind("validate"), force, *read)


class Report(ReportData):
    """The result of a validation: its data, and every way to show them."""

    def write(self, path: Target, force: bool = False) -> None:
        """Write the JSON, making folders as needed; `force` replaces an earlier one. `UserError` if the place can't
        be written to, or holds something else."""
        write_text(claim(path, JSON, force), self.to_json())

    def write_html(self, path: Target, force: bool = False) -> None:
        """Write one page that needs nothing else; `force` and `UserError` as of `write`."""
        write_text(claim(path, page_kind("validate"), force), page(self))

    def __repr__(self) -> str:
        """In a shell: the verdict, as the numbers fill pages."""
        names = ", ".join(runtime.name for runtime in self.runtimes)
        return f"Report({self.verdict}: {self.checkpoint}, {self.onnx}, by {names}); .print() shows more"

    def _repr_html_(self) -> str:
        """In notebooks: the verdict, and what supports it or went wrong."""
        return table(f"validate: {self.verdict}", summary(self))

    def print(self, console: Console | None = None) -> None:
        """Print it on the terminal: verdict first, then what supports it."""
        print_report(self, console or terminal.Console())

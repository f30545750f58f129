"""The report of a validation: data, terminal, JSON and HTML page."""

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
    """Check that the JSON report and the page can be written, where asked for. Raises UserError like `claim`."""
    first = None if json is None else claim(json, JSON, force, *read)
    return first, None if html is None else claim(html, page_kind("validate"), force, *read)


class Report(ReportData):
    """The result of a validation, with methods to print and write it."""

    def write(self, path: Target, force: bool = False) -> None:
        """Write the report as JSON, making folders as needed. force: replace an earlier report.

        Raises UserError if the file can't be written, or is anything but an earlier report.
        """
        write_text(claim(path, JSON, force), self.to_json())

    def write_html(self, path: Target, force: bool = False) -> None:
        """Write a self-contained HTML page; `force` and errors as in `write`."""
        write_text(claim(path, page_kind("validate"), force), page(self))

    def __repr__(self) -> str:
        """For a shell: only the verdict and names, as all the numbers would fill pages."""
        names = ", ".join(runtime.name for runtime in self.runtimes)
        return f"Report({self.verdict}: {self.checkpoint}, {self.onnx}, by {names}); .print() shows more"

    def _repr_html_(self) -> str:
        """For notebooks: the verdict, failures and a line for each runtime."""
        return table(f"validate: {self.verdict}", summary(self))

    def print(self, console: Console | None = None) -> None:
        """Print the report on the terminal, the verdict first."""
        print_report(self, console or terminal.Console())

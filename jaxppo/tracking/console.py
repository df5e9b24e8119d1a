"""What a person watches: the plan, progress bars, a line a cycle, samples.

Model output is data here. It is escaped, so that markup, control characters and text direction
marks in it can't act on the terminal.
"""

import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

# label, key, format; in the order of the line
_FIGURES = (
    ("reward", "rollout_scores/mean", "7.3f"),
    ("kl", "policy/kl", "6.2f"),
    ("coef", "kl_ctl_value", "6.4f"),
    ("loss", "losses/total_loss", "7.3f"),
    ("entropy", "policy/entropy", "5.2f"),
    ("clip", "policy/clipfrac", "5.3f"),
    ("length", "rollout/response_length", "5.1f"),
    ("ended", "rollout/ended", "4.2f"),
    ("tok/s", "perf/rollout_tokens_per_s", "6.0f"),
    ("s", "time/cycle", "5.1f"),
)


def make_console(stream=None) -> Console:
    """Makes a console on a stream (standard output). What its encoding lacks becomes escapes."""
    stream = stream or sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")
    return Console(file=stream, highlight=False, soft_wrap=not stream.isatty())


def show_plan(console: Console, title: str, lines: Sequence[tuple[str, str]]) -> None:
    """Prints label and value pairs."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in lines:
        table.add_row(label, Text(visible(value)))
    console.print(table, soft_wrap=False)


@contextmanager
def phase(console: Console, description: str, total: int | None) -> Iterator[Callable[[], None]]:
    """Shows a progress bar while its body runs; gives the function that moves it one on.

    `total` None shows that something goes on. Where nobody watches (no terminal) nothing is shown.
    """
    if not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        bar = progress.add_task(description, total=total)
        yield lambda: progress.advance(bar)


def cycle_line(
    console: Console, cycle: int, cycles: int, step: int, row: Mapping[str, float]
) -> None:
    """Prints one line of a cycle's figures, in columns that stay where they are."""
    parts = [f"cycle {cycle:{len(str(cycles))}d}/{cycles}", f"step {step:<6d}"]
    parts += [f"{label} {row[key]:{form}}" for label, key, form in _FIGURES if key in row]
    console.print("  ".join(parts), markup=False, soft_wrap=True)


def show_samples(
    console: Console, title: str, table: Mapping[str, Sequence], rows: int = 4
) -> None:
    """Prints the first rows of a table of samples."""
    shown = Table(title=Text(title), title_justify="left", expand=False)
    for name in table:
        numeric = name not in ("prompt", "output")
        shown.add_column(Text(name), justify="right" if numeric else "left", max_width=72)
    for values in list(zip(*table.values()))[:rows]:
        cells = [v if isinstance(v, str) else f"{v:.4g}" for v in values]
        shown.add_row(
            *(Text(visible(cell if len(cell) < 300 else cell[:297] + "...")) for cell in cells)
        )
    console.print(shown, soft_wrap=False)


def show_summary(console: Console, title: str, rows: Sequence[tuple[str, float, float]]) -> None:
    """Prints figures before and after."""
    table = Table(title=title, title_justify="left")
    table.add_column("evaluation")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for label, before, after in rows:
        table.add_row(Text(label), f"{before:.4g}", f"{after:.4g}")
    console.print(table, soft_wrap=False)


def visible(text: str) -> str:
    """Replaces what would act on a terminal: control and format characters, line breaks."""

    def safe(c: str) -> str:
        if c == "\n":
            return "\u23ce"
        unsafe = unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
        return f"\\x{ord(c):02x}" if unsafe else c

    return "".join(map(safe, text))

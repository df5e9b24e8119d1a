"""What a person watches: the plan, progress bars, a line a cycle, samples.

Model output is data here. It is escaped, so that markup, control characters and text direction
marks in it can't act on the terminal.
"""

import os
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Integral, Real
from typing import Any, NamedTuple, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

_LOG_WIDTH = 120  # of tables in a log file, which has no width of its own


class _Figure(NamedTuple):
    """A column of a cycle's line.

    label, key, unit: what it is called there, in the logged row, and what follows the number.
    width, decimals: cells of the number, and digits after its point.
    rank: on a narrow terminal the highest go first.
    """

    label: str
    key: str
    unit: str
    width: int
    decimals: int
    rank: int


_FIGURES = (
    _Figure("reward ", "rollout_scores/mean", "", 7, 3, 0),
    _Figure("kl ", "policy/kl", "", 7, 4, 1),
    _Figure("coef ", "kl_ctl_value", "", 7, 4, 8),
    _Figure("loss ", "losses/total_loss", "", 7, 4, 7),
    _Figure("entropy ", "policy/entropy", "", 6, 3, 6),
    _Figure("clip ", "policy/clipfrac", "", 5, 3, 9),
    _Figure("length ", "rollout/response_length", "", 6, 1, 3),
    _Figure("ended ", "rollout/ended", "", 4, 2, 5),
    _Figure("", "perf/rollout_tokens_per_s", " tok/s", 6, 0, 4),
    _Figure("", "time/cycle", " s", 6, 1, 2),
)


class _Stream:
    """A text stream that takes any text and may fail without harm.

    What the encoding lacks is written as escapes. A terminal that was closed, or a full disk under
    a log file, costs the output and not the run, whose figures are in its own files.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError, AttributeError):  # a closed stdout is None
            self._stream.write(_encodable(text, self.encoding))
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            self._stream.flush()

    def isatty(self) -> bool:
        with suppress(OSError, ValueError, AttributeError):
            return self._stream.isatty()
        return False

    def fileno(self) -> int:
        return self._stream.fileno()


class _RateColumn(ProgressColumn):
    """Steps a second, or seconds a step where these are slow."""

    def render(self, task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        return Text(f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each", style="dim")


def make_console(stream: TextIO | None = None) -> Console:
    """Makes a console on a stream, by default the standard output.

    On a terminal there are colours and progress bars; in a file, a pipe or a notebook plain lines
    without control codes. Text that the encoding can't express is escaped, output that fails is
    dropped, and strings are printed as they are, markup and emoji codes included.
    """
    safe = _Stream(sys.stdout if stream is None else stream)
    terminal = safe.isatty()
    wide = terminal or os.environ.get("COLUMNS", "").isdigit()
    return Console(
        file=safe,
        force_terminal=terminal,
        force_jupyter=False,
        width=None if wide else _LOG_WIDTH,
        markup=False,
        emoji=False,
        highlight=False,
    )


def show_plan(console: Console, title: str, lines: Sequence[tuple[str, str]]) -> None:
    """Prints labels and values in a panel."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in lines:
        grid.add_row(_text(console, label), _text(console, value))
    console.print(Panel(grid, title=_text(console, title), title_align="left", expand=False))


@contextmanager
def phase(console: Console, description: str, total: int | None) -> Iterator[Callable[..., None]]:
    """Shows a progress bar while its body runs; gives `advance(steps=1)`, which moves it on.

    The bar says how far it is, at what rate and how long the rest will take, and is gone
    afterwards. `total` None: only that something goes on, and since when. Where nobody watches (no
    terminal) nothing is shown.
    """
    if not console.is_interactive:
        yield lambda steps=1: None
        return
    columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False), BarColumn()]
    if total is None:
        columns += [TimeElapsedColumn()]
    else:
        columns += [MofNCompleteColumn(), _RateColumn(), TimeRemainingColumn()]
    # four pictures a second: the processor has better things to do
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
        bar = progress.add_task(_safe(console, description), total=total)
        yield lambda steps=1: progress.advance(bar, steps)


def cycle_line(
    console: Console, cycle: int, cycles: int, step: int, row: Mapping[str, float]
) -> None:
    """Prints one line of a cycle's figures, in columns that stay where they are.

    Figures that the row lacks are left out. On a terminal too narrow for the line, so are the less
    telling ones; a log file gets them all.

    Args:
      console: from `make_console`.
      cycle, cycles: the cycle just completed, counted from 1, and how many there will be.
      step: optimizer steps completed.
      row: scalars by name, as they are logged.
    """
    head = f"cycle {cycle:>{len(str(cycles))}}/{cycles}  step {step:<6}"
    figures = [figure for figure in _FIGURES if figure.key in row]
    cells = lambda f: 2 + len(f.label) + f.width + len(f.unit)  # noqa: E731
    while console.is_terminal and len(head) + sum(map(cells, figures)) > console.width and figures:
        figures.remove(max(figures, key=lambda f: f.rank))
    line = Text(head)
    for figure in figures:
        line.append(f"  {figure.label}", style="dim")
        line.append(_fixed(float(row[figure.key]), figure.width, figure.decimals))
        line.append(figure.unit, style="dim")
    console.print(line, soft_wrap=True)


def show_samples(
    console: Console,
    title: str,
    table: Mapping[str, Sequence],
    rows: int = 4,
    *,
    clip: int = 240,
) -> None:
    """Prints the first rows of a table of samples.

    Args:
      console: from `make_console`.
      title: printed above, and alone if there are no rows to show.
      table: equally long lists by name: "prompt", "output", "reward", further metrics.
      rows: how many at most.
      clip: cells of the terminal that a text takes at most; the rest becomes an ellipsis.
    """
    shown = list(zip(*table.values()))[: max(rows, 0)]
    console.print(_text(console, title, style="bold"))
    if not shown:
        return
    grid = Table(show_lines=True)
    for name, first in zip(table, shown[0]):
        side = "left" if isinstance(first, str) else "right"
        grid.add_column(_text(console, name), justify=side, overflow="fold")
    for values in shown:
        grid.add_row(*(_text(console, _cell(value), clip) for value in values))
    console.print(grid)


def show_summary(
    console: Console, title: str, rows: Sequence[tuple[str, float | None, float | None]]
) -> None:
    """Prints figures before and after training: label, before, after."""
    console.print(_text(console, title, style="bold"))
    grid = Table()
    grid.add_column("evaluation", overflow="fold")
    grid.add_column("before", justify="right", no_wrap=True)
    grid.add_column("after", justify="right", no_wrap=True)
    for values in rows:
        grid.add_row(*(_text(console, _cell(value)) for value in values))
    console.print(grid)


def visible(text: str) -> str:
    r"""Replaces what would act on a terminal by something to look at.

    Line feeds become "⏎". Other control characters, marks of text direction and further invisible
    ones, private characters and halves of surrogate pairs become escapes: `\x1b`, `\u202e`. The
    joiners U+200C and U+200D stay: scripts and emoji need them, and they move nothing.
    """

    def safe(c: str) -> str:
        if c == "\n":
            return "⏎"
        if c in "\u200c\u200d":
            return c
        unsafe = unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
        return c.encode("unicode_escape").decode("ascii") if unsafe else c

    return text if text.isascii() and text.isprintable() else "".join(map(safe, text))


def _encodable(text: str, encoding: str) -> str:
    """Escapes what an encoding lacks."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _safe(console: Console, text: str) -> str:
    """Text as it can be shown: escaped before it is laid out, so that columns stay aligned."""
    if not console.encoding.startswith("utf"):
        text = text.replace("\n", "\\n")
    return _encodable(visible(text), console.encoding)


def _text(console: Console, text: str, clip: int | None = None, style: str = "") -> Text:
    """Text without markup, of at most `clip` cells."""
    # no character but a joined or combining one has no width, and nobody needs 8 of them in a row
    text = _safe(console, text if clip is None else text[: 8 * clip])
    if clip is not None and cell_len(text) > clip:
        mark = "…" if console.encoding.startswith("utf") else "..."
        text = set_cell_size(text, max(clip - len(mark), 0)) + mark
    return Text(text, style=style)


def _cell(value: Any) -> str:
    """A cell of a table: fractions with four digits, everything else as it is."""
    if value is None:
        return "-"
    return (
        f"{value:.4g}"
        if isinstance(value, Real) and not isinstance(value, Integral)
        else str(value)
    )


def _fixed(value: float, width: int, decimals: int) -> str:
    """A number in so many cells, with fewer decimals or a power of ten where it must be."""
    forms = [f".{digits}f" for digits in range(decimals, -1, -1)]
    if decimals >= 3 and 0 < abs(value) < 0.001:
        forms = []
    texts = [f"{value:{form}}" for form in (*forms, ".1e", ".0e")]
    return next((text for text in texts if len(text) <= width), texts[-1]).rjust(width)

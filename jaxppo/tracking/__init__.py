"""Figures of a run: files, trackers, console."""

from jaxppo.tracking.compile_cache import use_compile_cache
from jaxppo.tracking.compiles import count_compiles
from jaxppo.tracking.console import (
    cycle_line,
    make_console,
    phase,
    show_plan,
    show_samples,
    show_summary,
    visible,
)
from jaxppo.tracking.sinks import (
    Sink,
    TrackerError,
    combine,
    json_lines,
    read_rows,
    tensorboard,
    wandb_sink,
)

__all__ = [
    "Sink",
    "TrackerError",
    "combine",
    "count_compiles",
    "cycle_line",
    "json_lines",
    "make_console",
    "phase",
    "read_rows",
    "show_plan",
    "show_samples",
    "show_summary",
    "tensorboard",
    "use_compile_cache",
    "visible",
    "wandb_sink",
]

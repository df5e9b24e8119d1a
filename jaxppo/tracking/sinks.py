"""Where figures go: JSON lines always, TensorBoard and Weights & Biases if asked for.

`metrics.jsonl` holds what a seed determines, `timing.jsonl` what differs from run to run; so a run
that was killed and resumed leaves the same bytes in the former as one that was not.
"""

import json
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from jaxppo.tracking.console import visible

# figures under these names are the machine's, not the seed's
TIMING_PREFIXES = ("time/", "perf/", "memory/", "compiles")
_FILES = ("metrics", "timing", "samples")
_NON_FINITE = ("nan", "inf", "-inf")
_SHOWN_SAMPLES = 16  # rows of a table that TensorBoard shows


class TrackerError(RuntimeError):
    """A tracker that was asked for can't be used."""


class Sink(NamedTuple):
    """Takes the figures of a run.

    write: `(step, row)`, scalars by name.
    samples: `(step, table)`, equally long lists by name: "prompt", "output", "reward", metrics.
    close: `()`, after which nothing is written; closing twice does no harm.
    """

    write: Callable[[int, Mapping[str, float]], None]
    samples: Callable[[int, Mapping[str, Sequence]], None]
    close: Callable[[], None]


def combine(sinks: Iterable[Sink]) -> Sink:
    """Writes to several sinks, in their order. All are closed, even if one of them fails to."""
    sinks = list(sinks)

    def write(step, row):
        for sink in sinks:
            sink.write(step, row)

    def samples(step, table):
        for sink in sinks:
            sink.samples(step, table)

    def close():
        with ExitStack() as stack:
            for sink in reversed(sinks):
                stack.callback(sink.close)

    return Sink(write, samples, close)


def json_lines(folder: str | Path, *, resume_step: int | None, evaluated: bool = True) -> Sink:
    """Writes `metrics.jsonl`, `timing.jsonl` and `samples.jsonl` into a folder.

    A row is one line of ASCII, an object with "step" first, then the figures by name, written and
    flushed whole. Names with one of `TIMING_PREFIXES` go to the timing, all others to the metrics.
    Numbers read back exactly; NaN and infinities, which JSON lacks, are written as the strings
    "nan", "inf" and "-inf". `read_rows` undoes that.

    Args:
      folder: made if need be.
      resume_step: rows of later steps, and a torn last line, are removed first, for the resumed
        run writes them again. None: a new run; what the files held is removed.
      evaluated: False says that the evaluation at `resume_step` is to come, again perhaps: what it
        wrote, the samples and all but the first row of the step, is removed as well.

    Raises:
      TrackerError: a file to be resumed is damaged elsewhere than in its last line.
      OSError: the disk refuses; here, and from `write`, `samples` and `close`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    with ExitStack() as stack:
        for name in _FILES:
            path = folder / f"{name}.jsonl"
            _keep_until(path, resume_step, None if evaluated else int(name != "samples"))
            files[name] = stack.enter_context(path.open("ab"))
            stack.callback(_sync, files[name])
        close = stack.pop_all().close

    def put(name: str, rows: Iterable[dict]) -> None:
        # ASCII: half of a surrogate pair is no UTF-8, and U+2028 is the end of a line to some
        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        files[name].write(lines.encode("ascii"))
        files[name].flush()

    def write(step, row):
        parts: tuple[dict, dict] = ({}, {})
        for name in sorted(row):
            parts[name.startswith(TIMING_PREFIXES)][name] = _plain(row[name])
        for name, part in zip(_FILES, parts):
            if part:
                put(name, [{"step": int(step)} | part])

    def samples(step, table):
        rows = [zip(table, map(_plain, row)) for row in _sample_rows(table)]
        put("samples", [{"step": int(step), **dict(row)} for row in rows])

    return Sink(write, samples, close)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Reads a file that `json_lines` wrote; NaN and infinities are floats again.

    The text of prompts and outputs is never taken for a number. A torn last line is left out.

    Raises:
      TrackerError: a line before the last is not a row; it is named.
      OSError: the file can't be read.
    """

    def number(key, value):
        special = key not in ("prompt", "output") and value in _NON_FINITE
        return float(value) if special else value

    with Path(path).open("rb") as file:
        return [{k: number(k, v) for k, v in row.items()} for _, row in _whole_lines(file)]


def tensorboard(folder: str | Path, *, resume_step: int | None = None) -> Sink:
    """Writes TensorBoard events; of each table the first 16 samples, as text.

    Args:
      folder: made if need be; every sink adds a file to it.
      resume_step: TensorBoard hides what earlier files hold of later steps. None: it hides nothing.

    Raises:
      TrackerError: tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise _missing("tensorboard", "tensorboardX", error) from error
    purge = None if resume_step is None else resume_step + 1
    writer = SummaryWriter(str(folder), purge_step=purge)

    def write(step, row):
        for name, value in row.items():
            writer.add_scalar(name, float(value), step)
        writer.flush()

    def samples(step, table):
        # an indented block is literal in Markdown, so nothing in the text becomes markup
        blocks = [
            "\n".join(f"    {name}: {visible(str(value))}" for name, value in zip(table, row))
            for row in _sample_rows(table)[:_SHOWN_SAMPLES]
        ]
        writer.add_text("samples", "\n    \n".join(blocks), step)
        writer.flush()

    return Sink(write, samples, writer.close)


def wandb_sink(
    *,
    project: str,
    name: str | None = None,
    entity: str | None = None,
    group: str | None = None,
    tags: Sequence[str] = (),
    dir: str | Path = ".",
    config: Mapping[str, Any] | None = None,
    resume_step: int | None = None,
) -> Sink:
    """Writes to Weights & Biases.

    Args:
      project, name, entity, group, tags, config: those of `wandb.init`.
      dir: the run folder; `wandb_run_id.txt` in it remembers the run.
      resume_step: not None goes on in the remembered run, where W&B itself ignores rows of steps
        that it has; None begins a run there.

    Raises:
      TrackerError: wandb is not installed, or would not start.
    """
    try:
        import wandb
    except ImportError as error:
        raise _missing("wandb", "wandb", error) from error
    folder = Path(dir)
    folder.mkdir(parents=True, exist_ok=True)
    remembered = folder / "wandb_run_id.txt"
    known = resume_step is not None and remembered.exists()
    run_id = remembered.read_text(encoding="utf-8").strip() if known else None
    try:
        run = wandb.init(
            project=project,
            name=name,
            entity=entity,
            group=group,
            tags=list(tags),
            dir=str(folder),
            config=dict(config or {}),
            id=run_id,
            resume="allow" if run_id else None,
        )
    except Exception as error:
        raise TrackerError(
            f"wandb would not start ({error}); run 'wandb login', or set WANDB_MODE=offline"
        ) from error
    remembered.write_text(f"{run.id}\n", encoding="utf-8")

    def write(step, row):
        run.log({key: float(value) for key, value in row.items()}, step=step)

    def samples(step, table):
        def cell(value):  # half of a surrogate pair can't be sent
            return value.encode(errors="replace").decode() if isinstance(value, str) else value

        rows = [[cell(value) for value in row] for row in _sample_rows(table)]
        run.log({"samples": wandb.Table(columns=list(table), data=rows)}, step=step)

    return Sink(write, samples, run.finish)


def _missing(tracker: str, package: str, error: ImportError) -> TrackerError:
    """The error of a tracker whose package can't be imported."""
    return TrackerError(
        f"train.tracker is {tracker!r}, but {package} can't be imported ({error}); "
        f"pip install {package}, or leave train.tracker out"
    )


def _sample_rows(table: Mapping[str, Sequence]) -> list[list]:
    """The rows of a table."""
    lengths = {name: len(column) for name, column in table.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of a table of samples differ in length: {lengths}")
    return [list(row) for row in zip(*table.values())]


def _plain(value: Any) -> Any:
    """A number as an int or a float, whatever library it is of; NaN and infinities as strings."""
    if value is None or isinstance(value, str | bool | int):
        return value
    try:
        return operator.index(value)  # integers of numpy and jax
    except TypeError:
        value = float(value)
    return value if math.isfinite(value) else str(value)


def _sync(file) -> None:
    """Makes sure that what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def _whole_lines(file) -> Iterator[tuple[bytes, dict]]:
    """Lines of a file and the rows they hold, but for a torn last one."""
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):  # rows are written with their line end, so this one is torn
            return
        try:
            row = json.loads(line)
            operator.index(row["step"])
        except (ValueError, TypeError, KeyError):
            raise TrackerError(
                f"line {number} of {file.name} is not a row; repair the file or move it away"
            ) from None
        yield line, row


def _keep_until(path: Path, step: int | None, most: int | None) -> None:
    """Removes rows of later steps (None: all rows) and those of this step beyond the first `most`.

    It does so atomically, and makes the file if there is none.
    """
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as new:
        if step is not None and path.exists():
            found = 0
            with path.open("rb") as old:
                for line, row in _whole_lines(old):
                    found += row["step"] == step
                    if row["step"] < step or (
                        row["step"] == step and (most is None or found <= most)
                    ):
                        new.write(line)
        _sync(new)
    os.replace(part, path)

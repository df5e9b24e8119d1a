"""Where figures go: JSON lines always, TensorBoard and Weights & Biases if asked for.

`metrics.jsonl` holds what a seed determines, `timing.jsonl` what differs from run to run; so a run
that was killed and resumed leaves the same bytes in the former as one that was not.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TIMING_PREFIXES = ("time/", "perf/")


class TrackerError(RuntimeError):
    """A tracker that was asked for can't be used."""


class Sink(NamedTuple):
    """Takes figures.

    write: `(step, row)`, scalars by name.
    samples: `(step, table)`, equally long lists by name.
    close: `()`, after which nothing is written.
    """

    write: Callable[[int, Mapping[str, float]], None]
    samples: Callable[[int, Mapping[str, Sequence]], None]
    close: Callable[[], None]


def combine(sinks: Iterable[Sink]) -> Sink:
    """Writes to several sinks."""
    sinks = list(sinks)

    def each(name):
        return lambda *args: [getattr(sink, name)(*args) for sink in sinks] and None

    return Sink(each("write"), each("samples"), each("close"))


def json_lines(folder: str | Path, *, resume_step: int | None) -> Sink:
    """Writes `metrics.jsonl`, `timing.jsonl` and `samples.jsonl` into a folder.

    A row is one line, written and flushed whole. Numbers read back exactly; NaN and infinities,
    which JSON lacks, are the strings "nan", "inf" and "-inf".

    Args:
      folder: made if need be.
      resume_step: rows of later steps, and a torn last line, are removed first, for the resumed
        run writes them again. None: a new run; what the files held is removed.

    Raises:
      OSError: the disk refuses.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name in ("metrics", "timing", "samples"):
        path = folder / f"{name}.jsonl"
        kept = [] if resume_step is None else _lines_until(path, resume_step)
        part = path.with_suffix(".part")
        part.write_bytes(b"".join(kept))
        os.replace(part, path)
        files[name] = path.open("ab")

    def put(name: str, row: Mapping[str, Any]) -> None:
        text = json.dumps({key: _plain(x) for key, x in row.items()}, ensure_ascii=False)
        # half of a surrogate pair can't be written as UTF-8
        files[name].write(text.encode("utf-8", "backslashreplace") + b"\n")
        files[name].flush()

    def write(step, row):
        timing = {key: row[key] for key in sorted(row) if key.startswith(TIMING_PREFIXES)}
        figures = {key: row[key] for key in sorted(row) if key not in timing}
        for name, part in (("metrics", figures), ("timing", timing)):
            if part:
                put(name, {"step": step, **part})

    def samples(step, table):
        for values in zip(*table.values()):
            put("samples", {"step": step, **dict(zip(table, values))})

    def close():
        for file in files.values():
            if not file.closed:
                file.flush()
                os.fsync(file.fileno())
                file.close()

    return Sink(write, samples, close)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Reads a file that `json_lines` wrote. A torn last line is left out."""
    return [json.loads(line) for line in _lines_until(Path(path), None)]


def tensorboard(folder: str | Path) -> Sink:
    """Writes TensorBoard events. Needs tensorboardX."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise _missing("tensorboard", "tensorboardX") from None
    writer = SummaryWriter(str(folder))

    def write(step, row):
        for name, value in row.items():
            writer.add_scalar(name, value, step)

    def samples(step, table):
        lines = ["| " + " | ".join(table) + " |", "|---" * len(table) + "|"]
        for values in zip(*table.values()):
            cells = [str(v).replace("|", "\\|").replace("\n", " ") for v in values]
            lines.append("| " + " | ".join(cells) + " |")
        writer.add_text("samples", "\n".join(lines), step)

    return Sink(write, samples, writer.close)


def wandb_sink(*, project, name, entity, group, tags, dir, config) -> Sink:
    """Writes to Weights & Biases. Needs wandb and its log-in."""
    try:
        import wandb
    except ImportError:
        raise _missing("wandb", "wandb") from None
    run = wandb.init(
        project=project, name=name, entity=entity, group=group, tags=list(tags), dir=str(dir),
        config=config, resume="allow",
    )  # fmt: skip

    def samples(step, table):
        rows = [list(values) for values in zip(*table.values())]
        run.log({"samples": wandb.Table(columns=list(table), data=rows)}, step=step)

    return Sink(lambda step, row: run.log(dict(row), step=step), samples, run.finish)


def _missing(tracker: str, package: str) -> TrackerError:
    return TrackerError(
        f"train.tracker is {tracker!r}, but {package} is not installed: "
        f"pip install 'jaxppo[{tracker}]', or leave train.tracker out"
    )


def _lines_until(path: Path, step: int | None) -> list[bytes]:
    """The whole lines of a file, up to a step (None: all)."""
    if not path.exists():
        return []
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or (step is not None and row["step"] > step):
            break
        kept.append(line)
    return kept


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return float(value)

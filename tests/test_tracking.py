"""Sinks that resume to the byte, and a console that model text can't act on."""

import io
import json
import math
import os
import re
import struct
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from jaxppo import tracking

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
# what a model may write: markup, colours, a title, text direction, line breaks, half a character
NASTY = (
    "[bold]x[/bold] [/] :smile: \x1b[31mred\x1b]0;t\x07 "
    "\u202eabc\u2066 \r\nnew\u2028line \ud800 \x9b2J"
)
ROW = {
    "rollout_scores/mean": 1.25,
    "policy/kl": 0.0123,
    "kl_ctl_value": 0.05,
    "losses/total_loss": -0.25,
    "policy/entropy": 3.5,
    "policy/clipfrac": 0.01,
    "rollout/response_length": 40.0,
    "rollout/ended": 0.5,
    "perf/rollout_tokens_per_s": 812.4,
    "time/cycle": 12.34,
}


def table(step):
    return {
        "prompt": [f"p{step}", "nan"],
        "output": ["a\nb", "é\ud800"],
        "reward": [0.1, float(step)],
    }


def write_steps(sink, steps):
    for step in steps:
        row = {"b/x": step / 3, "a": np.float32(0.1), "time/cycle": os.getpid() * 1.5}
        sink.write(step, row | {"perf/compiles": 3, "n": step})
        sink.samples(step, table(step))


def contents(folder):
    return {
        name: (folder / f"{name}.jsonl").read_bytes() for name in ("metrics", "timing", "samples")
    }


def terminal(width=100, encoding="utf-8"):
    """A console on a stream that says it is a terminal, and what was written to it."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict", write_through=True)
    stream.isatty = lambda: True
    console = tracking.make_console(stream)
    console.width = width
    return console, lambda: raw.getvalue().decode(encoding)


def plain(encoding="utf-8"):
    """A console on a stream that is no terminal, and what was written to it."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict", write_through=True)
    return tracking.make_console(stream), lambda: raw.getvalue().decode(encoding)


# ---- JSON lines


def test_rows_are_split_by_prefix_and_sorted(tmp_path):
    sink = tracking.json_lines(tmp_path / "new" / "run", resume_step=None)
    sink.write(4, {"z": 1, "time/update": 2.5, "a/b": 0.5, "perf/compiles": 7, "compiles": 7})
    sink.write(5, {"time/update": 1.0})
    sink.write(6, {"timely": 1.0})
    sink.close()
    sink.close()
    files = contents(tmp_path / "new" / "run")
    assert files["metrics"] == b'{"step": 4, "a/b": 0.5, "z": 1}\n{"step": 6, "timely": 1.0}\n'
    assert files["timing"].splitlines() == [
        b'{"step": 4, "compiles": 7, "perf/compiles": 7, "time/update": 2.5}',
        b'{"step": 5, "time/update": 1.0}',
    ]


def test_every_row_is_on_the_disk_at_once(tmp_path):
    sink = tracking.json_lines(tmp_path, resume_step=None)
    sink.write(1, {"a": 1.0})
    sink.samples(1, table(1))
    assert tracking.read_rows(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1.0}]
    assert len(tracking.read_rows(tmp_path / "samples.jsonl")) == 2
    sink.close()


def test_numbers_read_back_exactly(tmp_path):
    generator = np.random.default_rng(0)
    doubles = [x for (x,) in struct.iter_unpack("d", generator.bytes(8 * 200)) if math.isfinite(x)]
    singles = generator.standard_normal(50, np.float32)
    row = {f"d{i}": x for i, x in enumerate([*doubles, 5e-324, 1.7976931348623157e308, -0.0])}
    row |= {f"s{i}": x for i, x in enumerate(singles)}
    row |= {"i": np.int64(2**53 + 1), "array": np.asarray(0.1, np.float32)}
    sink = tracking.json_lines(tmp_path, resume_step=None)
    sink.write(0, row)
    sink.close()
    (read,) = tracking.read_rows(tmp_path / "metrics.jsonl")
    assert read.pop("step") == 0
    assert read == row
    assert math.copysign(1, read[f"d{len(doubles) + 2}"]) == -1
    assert isinstance(read["i"], int)


def test_non_finite_numbers_are_valid_json_and_read_back(tmp_path):
    sink = tracking.json_lines(tmp_path, resume_step=None)
    sink.write(0, {"a": math.nan, "b": math.inf, "c": -np.float32(np.inf)})
    sink.samples(0, {"prompt": ["nan"], "output": ["inf"], "reward": [math.nan]})
    sink.close()

    def refuse(name):
        raise AssertionError(name)

    (line,) = contents(tmp_path)["metrics"].splitlines()
    assert json.loads(line, parse_constant=refuse) == {
        "step": 0,
        "a": "nan",
        "b": "inf",
        "c": "-inf",
    }
    (row,) = tracking.read_rows(tmp_path / "metrics.jsonl")
    assert math.isnan(row["a"])
    assert (row["b"], row["c"]) == (math.inf, -math.inf)
    (sample,) = tracking.read_rows(tmp_path / "samples.jsonl")
    assert (sample["prompt"], sample["output"]) == ("nan", "inf")
    assert math.isnan(sample["reward"])


def test_any_text_is_one_line_and_reads_back(tmp_path):
    sink = tracking.json_lines(tmp_path, resume_step=None)
    sink.samples(2, {"prompt": ["p"], "output": [NASTY], "reward": [1.0], "metric": [None]})
    sink.close()
    data = contents(tmp_path)["samples"]
    assert not CONTROL.search(data.decode("ascii"))
    assert len(data.decode().splitlines()) == 1
    expected = {"step": 2, "prompt": "p", "output": NASTY, "reward": 1.0, "metric": None}
    assert tracking.read_rows(tmp_path / "samples.jsonl") == [expected]


def test_uneven_columns_are_refused(tmp_path):
    sink = tracking.json_lines(tmp_path, resume_step=None)
    with pytest.raises(ValueError, match=r"length: \{'prompt': 1, 'reward': 2\}"):
        sink.samples(0, {"prompt": ["p"], "reward": [1.0, 2.0]})
    sink.close()


@pytest.mark.parametrize("torn", [b"", b'{"step": 2, "a', b'{"step": 3}', b"\x00\x00"])
@pytest.mark.parametrize("killed_at", [3, 5, 8])
def test_a_resumed_run_leaves_the_same_bytes(tmp_path, torn, killed_at):
    whole = tracking.json_lines(tmp_path / "whole", resume_step=None)
    write_steps(whole, range(8))
    whole.close()

    first = tracking.json_lines(tmp_path / "resumed", resume_step=None)
    write_steps(first, range(killed_at))
    first.close()
    for name in contents(tmp_path / "resumed"):
        with (tmp_path / "resumed" / f"{name}.jsonl").open("ab") as file:
            file.write(torn)
    second = tracking.json_lines(tmp_path / "resumed", resume_step=2)
    steps = [row["step"] for row in tracking.read_rows(tmp_path / "resumed" / "metrics.jsonl")]
    assert steps == [0, 1, 2]
    write_steps(second, range(3, 8))
    second.close()

    assert contents(tmp_path / "resumed") == contents(tmp_path / "whole")
    assert sorted(p.name for p in (tmp_path / "resumed").iterdir()) == [
        "metrics.jsonl", "samples.jsonl", "timing.jsonl",
    ]  # fmt: skip


def test_resuming_without_files_and_beginning_anew(tmp_path):
    for resume_step in (5, None):
        sink = tracking.json_lines(tmp_path, resume_step=resume_step)
        assert set(contents(tmp_path).values()) == {b""}
        write_steps(sink, [1])
        sink.close()


def test_damage_in_the_middle_is_named_and_nothing_is_lost(tmp_path):
    path = tmp_path / "metrics.jsonl"
    damaged = b'{"step": 0}\n{"st\x00\n{"step": 2}\n'
    path.write_bytes(damaged)
    with pytest.raises(tracking.TrackerError, match=r"line 2 of .*metrics.jsonl is not a row"):
        tracking.json_lines(tmp_path, resume_step=2)
    with pytest.raises(tracking.TrackerError, match="line 2"):
        tracking.read_rows(path)
    assert path.read_bytes() == damaged


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_an_os_error(tmp_path, monkeypatch):
    monkeypatch.setattr(
        os, "replace", lambda old, new: (os.remove(old), os.symlink("/dev/full", new))
    )
    sink = tracking.json_lines(tmp_path, resume_step=None)
    with pytest.raises(OSError, match="No space left"):
        sink.write(0, {"a": 1.0})


def test_all_sinks_get_everything_and_are_closed(tmp_path):
    seen = []

    def recorder(name, fails=False):
        def close():
            seen.append((name, "close"))
            if fails:
                raise OSError(name)

        return tracking.Sink(
            lambda step, row: seen.append((name, step, row)),
            lambda step, table: seen.append((name, step, len(table))),
            close,
        )

    sink = tracking.combine(iter([recorder("a", fails=True), recorder("b")]))
    sink.write(1, {"x": 2.0})
    sink.samples(1, table(1))
    with pytest.raises(OSError, match="a"):
        sink.close()
    assert seen == [
        ("a", 1, {"x": 2.0}), ("b", 1, {"x": 2.0}), ("a", 1, 3), ("b", 1, 3),
        ("a", "close"), ("b", "close"),
    ]  # fmt: skip


# ---- TensorBoard and Weights & Biases


def events(folder):
    """Every event in a folder, oldest file first."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = []
    for path in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            found.append(event_pb2.Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def test_tensorboard_events_read_back(tmp_path):
    pytest.importorskip("tensorboardX")
    sink = tracking.tensorboard(tmp_path)
    sink.write(3, {"reward/mean": np.float32(0.5), "perf/compiles": 4})
    sink.samples(3, {"prompt": ["p"] * 20, "output": [NASTY] * 20, "reward": [1.0] * 20})
    sink.close()
    values = [(e.step, v) for e in events(tmp_path) for v in e.summary.value]
    scalars = {(step, v.tag): v.simple_value for step, v in values if v.HasField("simple_value")}
    assert scalars == {(3, "reward/mean"): 0.5, (3, "perf/compiles"): 4.0}
    (text,) = [v.tensor.string_val[0].decode() for _, v in values if v.HasField("tensor")]
    lines = text.split("\n")
    assert lines[0] == "    prompt: p"
    assert sum(line.startswith("    output: [bold]x") for line in lines) == 16
    assert all(line.startswith("    ") for line in lines)
    assert "\x1b" not in text


def test_tensorboard_hides_what_a_resumed_run_writes_again(tmp_path):
    pytest.importorskip("tensorboardX")
    tracking.tensorboard(tmp_path / "new").close()
    assert not any(e.HasField("session_log") for e in events(tmp_path / "new"))
    tracking.tensorboard(tmp_path / "resumed", resume_step=7).close()
    assert [e.step for e in events(tmp_path / "resumed") if e.HasField("session_log")] == [8]


def fake_wandb(monkeypatch):
    """A module that records what it is asked to do."""
    calls = []
    run = types.SimpleNamespace(
        id="run7",
        log=lambda row, step: calls.append(("log", step, row)),
        finish=lambda: calls.append(("finish",)),
    )
    module = types.ModuleType("wandb")
    module.init = lambda **kwargs: calls.append(("init", kwargs)) or run
    module.Table = lambda columns, data: (columns, data)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module, calls


def test_wandb_gets_rows_and_tables(monkeypatch, tmp_path):
    _, calls = fake_wandb(monkeypatch)
    sink = tracking.wandb_sink(
        project="p", name="n", entity=None, group="g", tags=("t",), dir=tmp_path, config={"a": 1}
    )
    sink.write(2, {"reward/mean": np.float32(0.5)})
    sink.samples(2, {"prompt": ["x"], "output": ["\ud800y"], "reward": [1.0]})
    sink.close()
    (_, options), *rest = calls
    assert options == {
        "project": "p", "name": "n", "entity": None, "group": "g", "tags": ["t"],
        "dir": str(tmp_path), "config": {"a": 1}, "id": None, "resume": None,
    }  # fmt: skip
    columns = ["prompt", "output", "reward"]
    assert rest == [
        ("log", 2, {"reward/mean": 0.5}),
        ("log", 2, {"samples": (columns, [["x", "?y", 1.0]])}),
        ("finish",),
    ]


def test_wandb_goes_on_in_the_same_run(monkeypatch, tmp_path):
    _, calls = fake_wandb(monkeypatch)
    for resume_step in (None, 4, None):
        tracking.wandb_sink(project="p", dir=tmp_path, resume_step=resume_step).close()
    started = [(kw["id"], kw["resume"]) for kind, *(kw,) in calls[::2] if kind == "init"]
    assert started == [(None, None), ("run7", "allow"), (None, None)]


def test_missing_trackers_are_named_with_the_command(monkeypatch, tmp_path):
    for package in ("wandb", "tensorboardX"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(tracking.TrackerError, match="pip install wandb"):
        tracking.wandb_sink(project="p", dir=tmp_path)
    with pytest.raises(tracking.TrackerError, match="pip install tensorboardX"):
        tracking.tensorboard(tmp_path)


def test_wandb_that_will_not_start_is_explained(monkeypatch, tmp_path):
    module, _ = fake_wandb(monkeypatch)

    def init(**_):
        raise RuntimeError("no key")

    module.init = init
    with pytest.raises(tracking.TrackerError, match=r"no key.*wandb login"):
        tracking.wandb_sink(project="p", dir=tmp_path)


# ---- console


def show_everything(console, text=NASTY):
    tracking.show_plan(console, text, [(text, text), ("cycles", "3")])
    for total in (2, None):
        with tracking.phase(console, text, total) as advance:
            advance()
            advance(1)
    tracking.cycle_line(console, 1, 20, 8, ROW)
    samples = {"prompt": [text], "output": [text * 50], "reward": [1.5], text: [text]}
    tracking.show_samples(console, text, samples)
    tracking.show_summary(console, text, [(text, 0.5, 1.25), ("new", None, math.nan)])


def test_a_log_file_holds_no_control_codes():
    console, written = plain()
    show_everything(console)
    text = written()
    assert not CONTROL.search(text)
    assert not set("\u202e\u2066\u2028") & set(text)
    assert "[bold]x[/bold] [/] :smile: \\x1b[31mred\\x1b]0;t\\x07" in text
    assert len([line for line in text.splitlines() if line.startswith("cycle  1/20")]) == 1


def test_settings_that_force_colours_do_not_reach_a_log_file(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    console, written = plain()
    show_everything(console)
    assert not CONTROL.search(written())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
@pytest.mark.parametrize("make", [plain, lambda encoding: terminal(encoding=encoding)])
def test_no_encoding_stops_the_run(encoding, make):
    console, written = make(encoding=encoding)
    show_everything(console, NASTY + " 猫 ⏎ é 🙂")
    console.print("cœur — 猫")
    assert "\\u732b" in written()


def test_ascii_tables_stay_aligned():
    console, written = plain("ascii")
    samples = {"prompt": ["猫\n", "x"], "output": ["é" * 200, "y"], "reward": [1.0, 22.5]}
    tracking.show_samples(console, "samples", samples)
    lines = written().splitlines()[1:]
    assert len({len(line) for line in lines}) == 1
    assert "\\u732b\\n" in lines[3]
    assert any("..." in line for line in lines)


def test_a_terminal_gets_bars_and_only_our_own_codes():
    console, written = terminal(200)
    assert console.is_interactive
    show_everything(console)
    text = written()
    assert "\x1b[" in text
    assert "2/2" in text
    for code in ("\x1b[31m", "\x1b]0;", "\x07", "\x9b", "\u202e", "\u2066", "\u2028"):
        assert code not in text


def test_bars_say_how_far_and_leave_nothing_behind():
    console, written = terminal()
    with tracking.phase(console, "rollouts", 4) as advance:
        for _ in range(3):
            advance()
    assert written().endswith("\x1b[1A\x1b[2K")
    with pytest.raises(KeyboardInterrupt), tracking.phase(console, "x", None):
        raise KeyboardInterrupt


def test_a_terminal_that_went_away_does_not_stop_the_run():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError("gone")

        def flush(self):
            raise BrokenPipeError("gone")

    closed = io.StringIO()
    closed.close()
    for stream in (Gone(), closed):
        show_everything(tracking.make_console(stream))


def test_standard_output_is_the_default_and_keeps_its_settings(capsys):
    errors = sys.stdout.errors
    tracking.make_console().print("[bold] :smile: 1/3")
    assert capsys.readouterr().out == "[bold] :smile: 1/3\n"
    assert sys.stdout.errors == errors


def cycle_lines(console, written, rows):
    for number, row in enumerate(rows, 1):
        tracking.cycle_line(console, number, 1000, number * 8, row)
    return re.sub(r"\x1b\[[0-9;]*m", "", written()).splitlines()


def test_cycle_lines_have_stable_columns():
    odd = [1e-9, -1e-9, 0, -0.00012, 0.999999, -12.345, 12345.678, 1e12, math.nan, -math.inf]
    rows = [ROW, *(ROW | dict.fromkeys(list(ROW)[:5], value) for value in odd)]
    lines = cycle_lines(*plain(), rows)
    assert lines[0] == (
        "cycle    1/1000  step 8       reward   1.250  kl  0.0123  coef  0.0500  loss -0.2500"
        "  entropy  3.500  clip 0.010  length   40.0  ended 0.50     812 tok/s    12.3 s"
    )
    assert len(lines) == len(rows)
    for label in ("step", "reward", "kl", "coef", "loss", "entropy", "clip", "ended"):
        assert len({line.index(f"{label} ") for line in lines}) == 1, label


def test_cycle_line_skips_what_is_missing():
    (line,) = cycle_lines(*plain(), [{"policy/kl": np.float32(3), "other": 1.0}])
    assert line == "cycle    1/1000  step 8       kl  3.0000"
    (line,) = cycle_lines(*plain(), [{}])
    assert line.startswith("cycle    1/1000  step 8")


@pytest.mark.parametrize("width", [20, 60, 80, 100, 200])
def test_cycle_lines_fit_the_terminal(width):
    console, written = terminal(width)
    (line,) = cycle_lines(console, written, [ROW])
    assert len(line) <= max(width, 29)
    assert ("reward" in line) == (width >= 60)
    assert ("clip" in line) == (width == 200)


def test_samples_are_clipped_and_counted():
    console, written = plain()
    samples = {
        "prompt": ["p1\np2", "q"],
        "output": ["字" * 60, "short"],
        "reward": [0.123456, -1],
        "ok": [True, None],
    }
    tracking.show_samples(console, "step 3", samples, rows=1, clip=21)
    text = written()
    assert text.startswith("step 3\n")
    assert "p1⏎p2" in text
    assert "字" * 10 + "…" in text
    assert "字" * 11 not in text
    assert "0.1235" in text
    assert "True" in text
    assert "short" not in text


@pytest.mark.parametrize("rows", [0, -1, 4])
def test_samples_without_rows_are_a_title(rows):
    console, written = plain()
    empty = {"prompt": [], "output": [], "reward": []}
    tracking.show_samples(console, "step 3", empty if rows > 0 else table(0), rows=rows)
    assert written() == "step 3\n"


def test_summary_and_plan_hold_what_they_are_given():
    console, written = plain()
    tracking.show_plan(console, "jaxppo", [("cycles", "12"), ("model", "a/[b]")])
    tracking.show_summary(console, "8 steps", [("reward/mean", 0.5, 1.23456), ("n", 3, None)])
    rows = [re.split(r"[│┃ ]+", line.strip("│ ")) for line in written().splitlines()]
    for row in (
        ["cycles", "12"],
        ["model", "a/[b]"],
        ["reward/mean", "0.5", "1.235"],
        ["n", "3", "-"],
    ):
        assert row in rows


def test_visible_is_idempotent_and_leaves_ordinary_text():
    for text in ("", "plain \\x1b text", "naïve 猫 🙂 👨‍👩‍👧 می‌خواهم — …"):
        assert tracking.visible(text) == text
    assert tracking.visible("a\tb\r\n\x1b\u202e\ud800\U000e0041\ufeff") == (
        "a\\tb\\r⏎\\x1b\\u202e\\ud800\\U000e0041\\ufeff"
    )
    assert tracking.visible(tracking.visible(NASTY)) == tracking.visible(NASTY)


def test_a_closed_standard_output_is_no_obstacle(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    tracking.make_console().print("nobody reads this")

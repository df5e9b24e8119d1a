"""Checkpoints: one pytree and a little JSON a step, written atomically by Orbax.

A step's folder appears under its final name only when it is complete, so a process killed while it
saves leaves the checkpoint before intact.
"""

import hashlib
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp


class CheckpointError(RuntimeError):
    """A checkpoint that can't be written or read, and why."""


def latest_step(folder: str | Path) -> int | None:
    """The newest complete step in a folder, or None."""
    folder = Path(folder)
    if not folder.is_dir():
        return None
    steps = [
        int(child.name)
        for child in folder.iterdir()
        if child.name.isascii() and child.name.isdigit() and child.is_dir()
    ]
    return max(steps, default=None)


def forget_after(folder: str | Path, step: int) -> None:
    """Removes the checkpoints later than a step, those of a run that is about to take it again."""
    while (latest := latest_step(folder)) is not None and latest > step:
        shutil.rmtree(Path(folder) / str(latest))


def save(folder: str | Path, step: int, state: Any, meta: dict, *, keep: int) -> None:
    """Writes a checkpoint and removes all but the newest `keep`.

    Args:
      folder: of this series of checkpoints; made if need be.
      step: names the checkpoint. One that is there already is left as it is.
      state: a pytree of arrays. Typed keys are not arrays: derive them from a seed.
      meta: what JSON can hold, beside it.
      keep: how many steps stay.

    Raises:
      CheckpointError: the disk refuses; what was there before is unharmed.
    """
    try:
        with _interrupts_deferred(), _manager(folder, keep) as manager:
            if (Path(folder) / str(step)).is_dir():
                return
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)
                ),
                force=True,  # or Orbax passes over steps below the newest, and says nothing
            )
            manager.wait_until_finished()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {step} can't be written to {folder}: {error}") from error


def restore(folder: str | Path, step: int, like: Any) -> tuple[Any, dict]:
    """Reads a checkpoint back, bit for bit.

    Args:
      folder, step: as saved.
      like: a pytree of arrays (or `ShapeDtypeStruct`s) with the structure that is expected.

    Raises:
      CheckpointError: it is damaged, or its shapes are those of another model or optimizer.
    """
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    try:
        with _manager(folder, None) as manager:
            found = manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(abstract), meta=ocp.args.JsonRestore()
                ),
            )
    except Exception as error:  # Orbax and TensorStore raise many kinds
        text = str(error).strip() or type(error).__name__
        reason = shorten(text.splitlines()[0], 200)  # Orbax lists every tensor there is
        raise CheckpointError(
            f"checkpoint {Path(folder) / str(step)} can't be read: {reason}; it is damaged or "
            "belongs to another model or configuration: choose another --workdir or remove it"
        ) from error
    return found["state"], found["meta"]


def fingerprint(params: Any) -> str:
    """A short name of the parameters' bits, the same on every device and machine."""
    words = [  # sums of integers do not depend on the order in which a device adds
        jnp.sum(x.view(f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32), dtype=jnp.uint32)
        for x in jax.tree.leaves(params)
    ]
    return hashlib.sha256(np.asarray(words, np.uint32).tobytes()).hexdigest()[:16]


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Lets a Ctrl-C take effect only afterwards: Orbax writes in threads that it would strand."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted, and only it may set handlers
        return
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _manager(folder: str | Path, keep: int | None) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, create=True, enable_async_checkpointing=False
    )
    return ocp.CheckpointManager(Path(folder).absolute(), options=options)

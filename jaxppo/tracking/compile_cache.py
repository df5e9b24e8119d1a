"""Compiled programs kept on disk, so that the next run with the same shapes starts at once."""

import hashlib
import os
import platform
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def use_compile_cache(folder: str) -> Path | None:
    """Makes JAX keep compiled programs, unless it has been told where already.

    Args:
      folder: where; "auto": in the user's cache folder, apart for each kind of processor, since
        programs are compiled for the one at hand; "off": nothing is kept.

    Returns:
      The folder in use; None if there is none, because of "off" or because it can't be written.
    """
    if folder == "off":
        return None
    if (given := jax.config.jax_compilation_cache_dir) is not None:
        return Path(given)
    if folder == "auto":
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        place = Path(base) / "jaxppo" / f"{platform.machine()}-{_processor()}"
    else:
        place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        (place / ".writable").touch()
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    compilation_cache.reset_cache()  # JAX looks once, when it first compiles
    return place


def _processor() -> str:
    """A short name of what the processor can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        kind = sorted({line for line in lines if line.startswith(("flags", "Features", "model"))})
    except OSError:
        kind = [platform.processor()]
    return hashlib.sha256("\n".join(kind).encode()).hexdigest()[:8]

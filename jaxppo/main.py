"""The command line: `python -m jaxppo.main --config=configs/gpt2_sentiment.py`.

A config file is a Python file with two functions:

    get_config(arg=None) -> ConfigDict   # from `jaxppo.config.default_config()`
    make_task(config) -> Task            # prompts, reward function, and what else the run is about

`--config=FILE:arg` hands `arg` to `get_config`; `--config.section.option=value` changes an option;
`--workdir=FOLDER` sets the run folder; `--profile` writes a trace of the second cycle into it, for
TensorBoard or Perfetto. The same command again continues a run that was stopped.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxppo import config as configs
from jaxppo.collect import Task
from jaxppo.config import ConfigError
from jaxppo.train import USER_ERRORS, run_task


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a config; returns the exit code: 0 done, 1 stopped, 2 refused, 130 interrupted."""
    argv = list(sys.argv if argv is None else argv)
    try:
        config, module = _parse(argv)
        if config is None:
            print(__doc__)
            return 0
        configs.validate(config)
        run_task(config, _task(module, config))
    except ConfigError as error:
        return _say(error, 2)
    except USER_ERRORS as error:
        return _say(error, 1)
    except OSError as error:  # a full disk, a folder without write permission
        return _say(error, 1)
    except KeyboardInterrupt:
        return _say("interrupted; the same command continues from the last whole cycle", 130)
    return 0


def _parse(argv: list[str]) -> tuple[ConfigDict | None, ModuleType | None]:
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, flag_values=values)
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    flags.DEFINE_bool("profile", False, "", flag_values=values)
    if any(arg in ("-h", "--help", "-help", "--helpfull") for arg in argv[1:]):
        return None, None
    before, sys.argv = sys.argv, argv  # config_flags looks for its overrides there
    try:
        left = values(argv)
        if len(left) > 1:
            raise ConfigError(f"{left[1]!r} is not a flag; options are set as --config.name=value")
        if values.config is None:
            raise ConfigError("no config; give one, such as --config=configs/gpt2_sentiment.py")
    except OSError as error:  # an override of a config that could not be loaded
        reason = str(error).strip().splitlines()[-1].strip()
        raise ConfigError(f"the config can't be loaded: {reason}") from error
    except flags.Error as error:
        raise ConfigError(_reason(error)) from None
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        # perhaps an override of an option that there is not: let the config name the nearest
        names = {arg[9:].split("=")[0] for arg in argv if arg.startswith("--config.")}
        configs.make_config(dict.fromkeys(names - configs.option_names()))
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"the config file can't be used, it raised {reason}") from error
    finally:
        sys.argv = before
    filename, variant = _config_file(values)
    module = _module(filename)
    config = configs.make_config(values.config)
    if values.profile:
        config.train.profile = True
    if values.workdir:
        config.train.checkpoint_dir = values.workdir
    elif config.train.checkpoint_dir is None:
        name = Path(filename).stem + (f"_{variant}" if variant else "")
        config.train.checkpoint_dir = f"runs/{name}"
    return config, module


def _reason(error: flags.Error) -> str:
    """What went wrong, without the traceback that absl puts into errors of config files."""
    if "Traceback" not in str(error):
        return " ".join(str(error).split())
    first, *_, last = str(error).strip().splitlines()
    return last.split("ConfigError: ")[-1] if "ConfigError: " in last else f"{first} {last}"


def _config_file(values: flags.FlagValues) -> tuple[str, str]:
    """The file that --config names, and the argument after its colon."""
    filename, _, variant = config_flags.get_config_filename(values["config"]).partition(":")
    if not Path(filename).is_file():
        raise ConfigError(f"config file {filename} does not exist")
    if Path(filename).suffix != ".py":
        raise ConfigError(f"config file {filename} must be a Python file whose name ends in .py")
    return filename, variant


def _module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "make_task"):
        raise ConfigError(
            f"{path} has no make_task(config): it says what the prompts and the reward are"
        )
    return module


def _task(module: ModuleType, config: ConfigDict) -> Task:
    """Calls the config file's make_task; errors that have a sentence of their own pass."""
    try:
        task = module.make_task(config)
    except (*USER_ERRORS, OSError):
        raise
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"make_task of {module.__file__} raised {reason}") from error
    if not isinstance(task, Task):
        raise ConfigError(
            f"make_task of {module.__file__} returned a {type(task).__name__}, not a jaxppo.Task"
        )
    return task


def _say(error: object, code: int) -> int:
    print(f"jaxppo: {error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    exit_code = main()
    if exit_code == 130:
        # XLA may still compile in threads of its own, and crash while the interpreter is torn down
        sys.stdout.flush()
        os._exit(exit_code)
    sys.exit(exit_code)

"""Checkpoint folders: found here or on the hub, their JSON files, and their safetensors.

Weights are read from safetensors only: pickled `.bin` files run code when opened.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open

INDEX_FILE = "model.safetensors.index.json"
VALUE_HEAD_FILE = "value_head.safetensors"
DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")  # taken from the hub


class ModelError(ValueError):
    """A checkpoint that can't be used, and why."""


def find_folder(name_or_path: str | Path, patterns: Sequence[str] = _FILES) -> Path:
    """The local folder of a checkpoint; if it is not a path, its files come from the hub."""
    path = Path(name_or_path)
    if path.is_dir():
        return path
    name = str(name_or_path)
    looks_local = path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1
    if path.exists() or (looks_local and "/" in name):
        raise ModelError(f"model folder {name} does not exist or is not a folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # network, 404, gated, malformed id: all the same to the user
        raise ModelError(
            f"{name} is neither a folder here nor a model that the Hugging Face hub would give "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0]}); check the spelling "
            "or the connection"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file.parent} has no {file.name}: it is not a model folder") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} can't be read: {error}") from None
    if not isinstance(loaded, dict):
        raise ModelError(f"{file} does not hold a JSON object")
    return loaded


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes an object with sorted keys, so that equal ones are equal bytes."""
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    file.write_text(text, encoding="utf-8")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a model, in the order of their names."""
    index = folder / INDEX_FILE
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        names = weight_map.values() if isinstance(weight_map, dict) else [None]
        if not all(isinstance(name, str) and name == Path(name).name for name in names):
            raise ModelError(f"{index} has no weight_map from tensors to files beside it")
        files = [folder / name for name in sorted(set(names))]
    else:
        files = [folder / "model.safetensors"]
    missing = [file.name for file in files if not file.exists()]
    if missing and list(folder.glob("*.bin")):
        raise ModelError(
            f"{folder} holds pickled .bin weights, which are not read because opening them runs "
            "code: convert them with transformers' save_pretrained(..., safe_serialization=True)"
        )
    if missing:
        raise ModelError(
            f"{folder} lacks {', '.join(missing)}; only safetensors are read (where a model has "
            "none but pickled .bin weights, transformers' save_pretrained converts them)"
        )
    return files


def read_tensors(files: Iterable[Path]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every tensor as a view of its file. Only what is used of it is read from the disk, and
    it takes no memory once it is let go of."""
    for file in files:
        try:
            with safe_open(file, framework="numpy"):  # checks the header and the file's length
                pass
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                dtype, shape = np.dtype(DTYPES[entry["dtype"]]), tuple(entry["shape"])
                if 0 in shape:
                    yield name, np.zeros(shape, dtype)
                    continue
                begin = 8 + size + entry["data_offsets"][0]
                yield name, np.memmap(file, dtype, "r", begin, shape).view(np.ndarray)
        except KeyError as kind:
            raise ModelError(f"{file} holds tensors of the dtype {kind}: not supported") from None
        except Exception as error:  # safetensors raises its own kinds for torn headers and data
            raise ModelError(f"{file} can't be read: {error}") from error


def write_tensors(file: Path, tensors: Iterable[tuple[str, Any, tuple[int, ...], Any]]) -> None:
    """Writes safetensors one after the other, so that only one is held at a time.

    tensors: `(name, dtype, shape, make)`, of which `make()` gives the array when its turn comes.
    """
    kinds = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    # as the safetensors library orders them: wide dtypes first keep every tensor aligned
    ordered = sorted(tensors, key=lambda t: (-np.dtype(t[1]).itemsize, t[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape, _ in ordered:
        end = at + int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        kind = kinds[np.dtype(dtype)]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for *_, make in ordered:
            opened.write(np.ascontiguousarray(make()).reshape(-1).view(np.uint8))

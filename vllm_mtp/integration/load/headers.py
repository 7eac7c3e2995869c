"""Safetensors files of a checkpoint: which vLLM loads, what their headers promise."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from vllm.transformers_utils.config import get_safetensors_params_metadata

from vllm_mtp.config import ConfigError
from vllm_mtp.integration.load.weight_health import Header, read_headers

INDEX = "model.safetensors.index.json"

Headers = Mapping[str, Header]


def find_headers(model: str, revision: str | None) -> dict[str, Header]:
    """Headers of the safetensors files that vLLM loads; empty if there are none.

    Args:
        model: Folder or hub name.
        revision: Of the hub's; None for the newest.

    Raises:
        ConfigError: A file of the index is missing, or one cannot be read.
    """
    if Path(model).is_dir():
        return read_headers(_listed_files(Path(model)))
    return {
        name: Header(str(each["dtype"]), tuple(each["shape"]), None)
        for name, each in get_safetensors_params_metadata(
            model, revision=revision
        ).items()
    }


def unlisted_headers(
    model: str, files: Collection[str] | None = None
) -> dict[str, Header]:
    """Headers of the safetensors files in a folder that vLLM does not load.

    Args:
        model: Folder; for a hub name nothing is known.
        files: Names of those to read; None for all.
    """
    folder = Path(model)
    if not folder.is_dir():
        return {}
    others = {*folder.glob("*.safetensors")} - {*_listed_files(folder)}
    return read_headers(
        sorted(each for each in others if files is None or each.name in files)
    )


def _listed_files(folder: Path) -> list[Path]:
    """What the index, where there is one, does not list is not loaded by vLLM."""
    files = sorted(folder.glob("*.safetensors"))
    if not (folder / INDEX).is_file():
        return files
    weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    listed = {folder / file for file in weight_map.values()}
    if lost := sorted(file.name for file in listed - {*files}):
        raise ConfigError(
            f"model {str(folder)!r}: {INDEX} lists {', '.join(lost)}, which the folder "
            "does not hold. Use a complete checkpoint."
        )
    return [file for file in files if file in listed]

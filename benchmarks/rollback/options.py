"""What ``python -m benchmarks rollback`` measures: the options and their limits."""

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.options import check_output_folder
from vllm_mtp.config import MAX_DRAFT_LENGTH
from vllm_mtp.tools.option_checks import check_fields, check_name, refuse

DEVICES = ("auto", "cpu", "cuda")
MAX_BATCH = 4096
MAX_LAYERS = 256
MAX_REPEATS = 1000

# Of the stated targets; the centre of every sweep where it is among the options.
TARGET_BATCH = 256
TARGET_DRAFT_LENGTH = 4
TARGET_LAYERS = 61
DEFAULT_LAYERS = {"cpu": (4, 32), "cuda": (4, 32, TARGET_LAYERS)}


@dataclass(frozen=True)
class RollbackBenchOptions:
    """What the user chose.

    Attributes:
        device: Of ``DEVICES``; ``auto`` takes a GPU where there is one.
        batches: Requests of a step.
        draft_lengths: K of every request.
        layers: Numbers of layers whose caches are scrubbed; a few by default,
            which depend on the device.
        num_repeats: Times that each contender is measured in each case.
        output: Folder for the result files.
    """

    device: str = "auto"
    batches: tuple[int, ...] = (1, 8, 32, 128, 256, 512)
    draft_lengths: tuple[int, ...] = (1, 3, 4, 5)
    layers: tuple[int, ...] = ()
    num_repeats: int = 9
    output: Path = Path()

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ConfigError: One of them has a value that is not allowed.
        """
        check_name("device", self.device, DEVICES)
        if self.device == "cuda" and not torch.cuda.is_available():
            refuse("device", "cuda", "auto or cpu here: torch sees no CUDA device")
        _check_list("batches", self.batches, MAX_BATCH)
        _check_list("draft-lengths", self.draft_lengths, MAX_DRAFT_LENGTH)
        if self.layers:
            _check_list("layers", self.layers, MAX_LAYERS)
        check_fields(self, {"num_repeats": (1, MAX_REPEATS)})
        check_output_folder(self.output)

    @property
    def torch_device(self) -> torch.device:
        """The device to measure."""
        if self.device == "cpu" or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def layers_to_scrub(self) -> tuple[int, ...]:
        """Numbers of layers, the default ones filled in."""
        return self.layers or DEFAULT_LAYERS[self.torch_device.type]

    @property
    def centre_batch(self) -> int:
        """Batch at which the other axes are swept."""
        return _centre(self.batches, TARGET_BATCH)

    @property
    def centre_draft_length(self) -> int:
        """K at which the other axes are swept."""
        return _centre(self.draft_lengths, TARGET_DRAFT_LENGTH)

    @property
    def centre_layers(self) -> int:
        """Number of layers at which the other axes are swept."""
        return _centre(self.layers_to_scrub, TARGET_LAYERS)


def parse_options(
    *,
    device: str,
    batches: str,
    draft_lengths: str,
    layers: str | None,
    num_repeats: int,
    output: Path,
) -> RollbackBenchOptions:
    """Options as they are written on the command line.

    Raises:
        ConfigError: One of them has a value that is not allowed.
    """
    return RollbackBenchOptions(
        device=device,
        batches=_parse("batches", batches, MAX_BATCH),
        draft_lengths=_parse("draft-lengths", draft_lengths, MAX_DRAFT_LENGTH),
        layers=() if layers is None else _parse("layers", layers, MAX_LAYERS),
        num_repeats=num_repeats,
        output=output,
    )


def _parse(field: str, text: str, limit: int) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        refuse(field, text, _list_of(limit))


def _check_list(field: str, values: tuple[int, ...], limit: int) -> None:
    is_valid = all(1 <= value <= limit for value in values)
    if not values or not is_valid or len(set(values)) != len(values):
        refuse(field, ",".join(map(str, values)), _list_of(limit))


def _list_of(limit: int) -> str:
    return f"whole numbers from 1 to {limit}, each once, with commas between"


def _centre(values: tuple[int, ...], target: int) -> int:
    return target if target in values else max(values)

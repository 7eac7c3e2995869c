"""What ``python -m benchmarks rollback`` measures: the options and their limits."""

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.options import check_output_folder
from vllm_mtp.config import MAX_DRAFT_LENGTH
from vllm_mtp.tools.option_checks import check_name, refuse
from vllm_mtp.tools.options import Options, option

DEVICES = ("auto", "cpu", "cuda")

# Of the stated targets; the centre of every sweep where it is among the options.
TARGET_BATCH = 256
TARGET_DRAFT_LENGTH = 4
TARGET_LAYERS = 61
DEFAULT_LAYERS = {"cpu": (4, 32), "cuda": (4, 32, TARGET_LAYERS)}


@dataclass(frozen=True, kw_only=True)
class RollbackBenchOptions(Options):
    """Time KV rollback beside vLLM's own chain and the copy bandwidth."""

    device: str = option("auto", "auto, cpu or cuda; auto takes a GPU if there is one.")
    batches: tuple[int, ...] = option(
        (1, 8, 32, 128, 256, 512), "Requests of a step.", 1, 4096
    )
    draft_lengths: tuple[int, ...] = option(
        (1, 3, 4, 5), "Draft lengths K.", 1, MAX_DRAFT_LENGTH
    )
    layers: tuple[int, ...] | None = option(
        None,
        "Numbers of layers to scrub. Unset: 4,32 on a CPU, 4,32,61 on a GPU.",
        1,
        256,
    )
    num_repeats: int = option(
        9, "Measurements of each contender in each case.", 1, 1000, name="repeats"
    )
    output: Path = option(Path(), "Folder for rollback-<hardware>.json and .png.")

    def __post_init__(self) -> None:
        """Check every option; see `Options`."""
        super().__post_init__()
        check_name("device", self.device, DEVICES)
        if self.device == "cuda" and not torch.cuda.is_available():
            refuse("device", "cuda", "auto or cpu here: torch sees no CUDA device")
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


def _centre(values: tuple[int, ...], target: int) -> int:
    return target if target in values else max(values)

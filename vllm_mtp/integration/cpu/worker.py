"""The CPU worker, in a module of its own.

Importing vLLM's CPU worker puts placeholders in the place of ``torch.cuda.Stream``,
``torch.Event`` and others for the whole process: on a GPU nothing may import it.
"""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_mtp.integration.cpu import workarounds
from vllm_mtp.integration.v1.runner import MTPPlusRunner
from vllm_mtp.integration.worker.worker import ReplacesDrafter


class MTPPlusCPUWorker(ReplacesDrafter, CPUWorker):
    """CPU worker, with a workaround for chunked prompts of seeded requests."""

    def init_device(self) -> None:
        super().init_device()
        if isinstance(self.model_runner, MTPPlusRunner):
            prepare = workarounds.make_generators_rewindable
            self.model_runner.before_sampling = prepare

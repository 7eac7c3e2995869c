"""The CPU worker, in a module of its own.

Importing vLLM's CPU worker puts placeholders in the place of ``torch.cuda.Stream``,
``torch.Event`` and others for the whole process: on a GPU nothing may import it.
"""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_mtp.integration.cpu import workarounds
from vllm_mtp.integration.worker.worker import ReplacesDrafter


class MTPPlusCPUWorker(ReplacesDrafter, CPUWorker):
    """CPU worker, with vLLM's fault in chunked prompts of seeded requests mended."""

    def _mend_runner(self) -> None:
        if self.use_v2_model_runner:
            return
        runner, sample_tokens = self.model_runner, self.model_runner.sample_tokens

        def sample_tokens_of_step(grammar_output: Any) -> Any:
            workarounds.make_generators_rewindable(runner)
            return sample_tokens(grammar_output)

        runner.sample_tokens = sample_tokens_of_step

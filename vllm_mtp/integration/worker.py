"""The workers: vLLM's own, whose drafter is replaced before weights are loaded."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from vllm_mtp.integration import mends


def replace_drafter(model_runner: Any, use_v2_model_runner: bool) -> None:
    """Install our drafter in a model runner of either version."""
    # Imported here because the V2 modules need Triton, which a V1 worker may lack.
    if use_v2_model_runner:
        from vllm_mtp.integration.speculator_v2 import replace_speculator

        replace_speculator(model_runner)
    else:
        from vllm_mtp.integration import proposer_v1

        proposer_v1.replace_drafter(model_runner)


class MTPPlusWorker(Worker):
    """GPU worker."""

    def init_device(self) -> None:
        super().init_device()
        replace_drafter(self.model_runner, self.use_v2_model_runner)


class MTPPlusCPUWorker(CPUWorker):
    """CPU worker, with vLLM's two CPU faults in speculative sampling mended."""

    def init_device(self) -> None:
        mends.mend_expand_kernel()
        super().init_device()
        replace_drafter(self.model_runner, self.use_v2_model_runner)

    def sample_tokens(self, grammar_output: Any) -> Any:
        if not self.use_v2_model_runner:
            mends.make_generators_rewindable(self.model_runner)
        return super().sample_tokens(grammar_output)

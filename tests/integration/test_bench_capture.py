"""What is noted of the capture of CUDA graphs, with a runner that captures none."""

from inspect import signature
from types import SimpleNamespace

from vllm.compilation.counter import compilation_counter

from benchmarks.capture import noted_capture


class Runner:
    """Has three full graphs after its real capture, and one after a trial."""

    def capture_model(self, profile_only: bool = False) -> int:
        num_full = 1 if profile_only else 2
        self.cudagraph_manager = SimpleNamespace(graphs=dict.fromkeys(range(num_full)))
        draft = SimpleNamespace(graphs={0: None})
        self.speculator = SimpleNamespace(step=draft, mode=None, graphs_of=[])
        compilation_counter.num_cudagraph_captured += 2 if profile_only else 90
        return 100 if profile_only else 4096


def test_the_last_capture_is_noted() -> None:
    original = Runner.capture_model
    with noted_capture([Runner]) as captured:
        # The plugin looks up parameters when an engine starts.
        assert signature(Runner.capture_model) == signature(original)
        runner = Runner()
        assert runner.capture_model(profile_only=True) == 100
        assert runner.capture_model() == 4096
    assert captured.graph_bytes == 4096
    assert captured.num_graphs == 90
    assert captured.num_full_graphs == 3
    assert captured.graph_seconds > 0
    assert Runner.capture_model is original

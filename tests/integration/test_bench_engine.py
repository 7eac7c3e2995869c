"""What a benchmark's engine makes of a request, and what it counts."""

from tests.support.engines import ENGINE_ARGUMENTS
from tests.support.heldout import BUNDLED_CHECKPOINT
from vllm_mtp.integration.bench_engine import BenchEngine, _allowed_token_ids


def test_model_runner_v2_is_given_as_many_allowed_tokens_as_it_takes():
    half = list(range(8192, 16384))
    assert _allowed_token_ids(8192, 16383, is_v2=False) == half
    assert _allowed_token_ids(8192, 16383, is_v2=True) == half[:1024]
    assert _allowed_token_ids(50, 99, is_v2=True) == list(range(50, 100))


def test_the_host_time_of_a_round_is_that_of_its_decode_steps():
    speculation = {"method": "mtp_plus", "num_speculative_tokens": 2}
    arguments = {"model": str(BUNDLED_CHECKPOINT), "speculative_config": speculation}
    bench = BenchEngine(ENGINE_ARGUMENTS | arguments)
    try:
        sampling = {"temperature": 0.0, "max_tokens": 24}
        wave = [{"prompt": [5, 6, 7], "sampling": sampling}]
        bench.begin([wave], concurrency=1, timed="host")
        while not bench.step()["is_done"]:
            pass
        # Every step of these followed a pause, and counts for nothing.
        assert bench.result()["decode_split_seconds"]["worker"] == 0.0
        bench.begin([wave], concurrency=1, timed="host")
        bench.step(seconds=60.0)
        parts = bench.result()["decode_split_seconds"]
        assert 0 < parts["schedule"] < parts["worker"]
        assert 0 < parts["update"] < parts["worker"]
        assert "schedule" not in vars(bench.engine.engine_core.engine_core.scheduler)
    finally:
        bench.engine.engine_core.shutdown()

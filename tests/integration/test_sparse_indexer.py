"""DeepSeek-V3.2, which is not run here: what a start makes of its config."""

from collections.abc import Collection
from pathlib import Path

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.support.random_checkpoints import write_checkpoint
from tests.support.vllm_gaps import fill_gaps
from vllm_mtp.config import DEFAULT_DRAFT_LENGTH, DEFAULT_FIXED_DRAFT_LENGTH
from vllm_mtp.integration.load import engine_args

HOPPER = (1, 2, 4)
"""Rows of a request that the indexer's kernel takes there."""


@pytest.mark.parametrize(
    ("rows", "bound"),
    [(HOPPER, DEFAULT_FIXED_DRAFT_LENGTH), (range(32), DEFAULT_DRAFT_LENGTH)],
)
def test_k_is_bounded_where_the_indexer_takes_few_rows(
    rows: Collection[int],
    bound: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill_gaps()
    engine_args.install()
    monkeypatch.setattr(engine_args, "native_next_n_supported", lambda n: n in rows)
    config = EngineArgs(
        model=str(write_checkpoint(tmp_path, "deepseek_v32")),
        max_model_len=64,
        speculative_config={"method": "mtp_plus"},
    ).create_engine_config()
    speculative = config.speculative_config
    assert speculative.draft_model_config.architectures == ["DeepseekV32MTPModel"]
    assert speculative.num_speculative_tokens == bound

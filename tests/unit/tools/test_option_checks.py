"""Which model an option names, and which speculative configs can be judged."""

from pathlib import Path

import pytest

from vllm_mtp.config import ConfigError
from vllm_mtp.tools.option_checks import check_method, resolve_model


def test_a_missing_folder_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: .*/nowhere.* is neither a folder"):
        resolve_model(str(tmp_path / "nowhere"))


def test_a_folder_without_a_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: .* holds no config\.json"):
        resolve_model(str(tmp_path))


def test_a_hub_name_is_left_to_vllm() -> None:
    assert resolve_model("XiaomiMiMo/MiMo-7B-RL") == "XiaomiMiMo/MiMo-7B-RL"


@pytest.mark.parametrize("key", ["rejection_sample_method", "rejection-sample-method"])
def test_drafts_that_are_accepted_by_chance_are_not_judged(key: str) -> None:
    config = {"method": "mtp_plus", key: "synthetic"}
    with pytest.raises(ConfigError, match=f"{key} 'synthetic' is not allowed"):
        check_method(config)
    check_method(config | {key: "block"})

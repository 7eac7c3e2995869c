"""Which model an option names."""

from pathlib import Path

import pytest

from vllm_mtp.config import ConfigError
from vllm_mtp.tools.option_checks import resolve_model


def test_a_missing_folder_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: .*/nowhere.* is neither a folder"):
        resolve_model(str(tmp_path / "nowhere"))


def test_a_folder_without_a_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: .* holds no config\.json"):
        resolve_model(str(tmp_path))


def test_a_hub_name_is_left_to_vllm() -> None:
    assert resolve_model("XiaomiMiMo/MiMo-7B-RL") == "XiaomiMiMo/MiMo-7B-RL"

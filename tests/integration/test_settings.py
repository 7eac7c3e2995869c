"""Our options on their way to other processes and machines."""

import pickle

import pytest

from vllm_mtp.config import ConfigError
from vllm_mtp.integration.load import front_end, settings


def test_a_machine_with_another_version_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front_end, "install", lambda own: None)
    sent = pickle.dumps(settings.Carried(controller="fixed"))
    assert pickle.loads(sent) == {"controller": "fixed"}
    monkeypatch.setattr(settings, "__version__", "9.9")
    with pytest.raises(ConfigError, match=r"vllm-mtp 9\.9 is installed on .* 0\.\d"):
        pickle.loads(sent)

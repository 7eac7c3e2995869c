"""Everything that we rely on in vLLM is there, and a missing piece is named."""

import pytest

from vllm_mtp.integration.load import compat
from vllm_mtp.integration.load.compat import CompatibilityError
from vllm_mtp.integration.load.seams import Seam


@pytest.mark.parametrize("seam", compat.SEAMS, ids=lambda seam: seam.path)
def test_the_installed_vllm_has(seam: Seam) -> None:
    assert compat.find_problem(seam) is None


@pytest.mark.parametrize(
    ("seam", "words"),
    [
        (Seam("core", "vllm.config.NoSuchConfig"), "vllm.config.NoSuchConfig"),
        (Seam("core", "vllm.no_such_module.f"), "vllm.no_such_module.f"),
        (
            Seam("core", "vllm.engine.arg_utils.EngineArgs.add_cli_args", ("wings",)),
            "has no parameter wings",
        ),
    ],
)
def test_a_missing_seam_is_named_with_the_version(
    seam: Seam, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "SEAMS", (*compat.SEAMS, seam))
    with pytest.raises(CompatibilityError, match=words) as caught:
        compat.check({"core"})
    assert f"vllm {compat.version('vllm')}" in str(caught.value)


def test_a_missing_attribute_is_named_with_its_owner_and_the_version() -> None:
    class Runner:
        input_batch = None

    compat.check_attributes(Runner(), ("input_batch",))
    with pytest.raises(CompatibilityError, match="Runner has no speed, wings") as error:
        compat.check_attributes(Runner(), ("speed", "input_batch", "wings"))
    assert f"vllm {compat.version('vllm')}" in str(error.value)


def test_only_the_groups_in_use_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "SEAMS", (Seam("v2", "vllm.no_such_module.f"),))
    compat.check({"core", "v1"})
    with pytest.raises(CompatibilityError):
        compat.check({"v2"})


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.1", "0.33.2"])
def test_versions_in_the_range_pass(version: str) -> None:
    compat.check_version(version)

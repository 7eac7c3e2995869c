"""The benchmark of two checkouts without engines: options and the interval."""

from pathlib import Path

import pytest

from benchmarks.checkouts import HERE, CheckoutsBench
from benchmarks.spread import resampled_interval
from vllm_mtp.config import ConfigError


def test_another_folder_is_no_checkout(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a folder with a checkout"):
        CheckoutsBench(other=tmp_path, output=tmp_path)


def test_there_are_24_cells_and_each_checkout_runs_twice(tmp_path: Path) -> None:
    bench = CheckoutsBench(other=HERE, output=tmp_path)
    assert len({cell.name for cell in bench.cells}) == 24
    assert len(bench.contenders) == 5


def test_the_interval_holds_the_mean_and_narrows_with_more_cells() -> None:
    few = resampled_interval([0.9, 1.0, 1.1] * 2)
    many = resampled_interval([0.9, 1.0, 1.1] * 20)
    assert few[0] < many[0] < 0.9966 < many[1] < few[1]
    assert resampled_interval([0.97] * 5) == pytest.approx((0.97, 0.97))

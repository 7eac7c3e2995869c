"""The benches that share engines: which engines, and what they are asked."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from benchmarks.costs import CostsOptions
from benchmarks.graphs import FIGURES, GraphsBench
from benchmarks.grid.cells import Prompts
from benchmarks.launches import LaunchesBench
from vllm_mtp.config import ConfigError

PROMPTS = Prompts(own={"code": [[1, 2]]}, contexts={}, vocab_size=9)


def test_engines_of_a_name_are_the_same_engine(tmp_path: Path) -> None:
    benches = CostsOptions(output=tmp_path, draft_length=5).benches
    for bench in benches:
        for other in benches:
            shared = bench.contenders.keys() & other.contenders.keys()
            assert {"none", "mtp_plus"} <= shared
            for name in shared:
                assert bench.contenders[name] == other.contenders[name]
    assert benches[0].contenders["mtp"]["num_speculative_tokens"] == 5  # type: ignore[index]


def test_launches_are_counted_without_drafts_and_with_as_many_as_mtp(
    tmp_path: Path,
) -> None:
    options = CostsOptions(output=tmp_path, concurrency=(1, 32, 256))
    launches = [each for each in options.benches if isinstance(each, LaunchesBench)]
    pins = []
    for bench in launches:
        ((request,),) = next(bench.waves(PROMPTS, 1))
        pins.append(request["sampling"]["extra_args"]["mtp_plus"]["k"])
        assert list(bench.cells) == [1, 32]
    assert pins == [0, 3]
    assert len({bench.file_name for bench in options.benches}) == 4


def test_a_large_batch_alone_is_counted_all_the_same(tmp_path: Path) -> None:
    options = CostsOptions(output=tmp_path, concurrency=(256, 128))
    assert [bench.most_requests for bench in options.benches] == [256, 256, 128, 128]


def test_wrong_options_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype: 'int8' is not allowed"):
        CostsOptions(output=tmp_path, dtype="int8")
    with pytest.raises(ConfigError, match="output: '/nowhere' is not allowed"):
        CostsOptions(output=Path("/nowhere"))


class Facts:
    """Of an engine that captured some graphs."""

    def ask(self, command: str) -> dict[str, Any]:
        assert command == "facts"
        return dict.fromkeys(FIGURES, 3) | {"vocab_size": 9}


def test_graphs_are_what_the_engines_took_note_of(tmp_path: Path) -> None:
    bench = GraphsBench(output=tmp_path)
    engines = dict.fromkeys((*bench.contenders, "another"), Facts())
    group: Any = SimpleNamespace(engines=engines)
    found = bench.play(group, PROMPTS, Console(quiet=True))
    each = dict.fromkeys(FIGURES, 3)
    assert found == {"graphs": {"none": each, "mtp": each, "mtp_plus": each}}

"""The journal of the grid benchmark and what is made of it."""

import json
from collections.abc import Collection
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.grid import journal as grid_journal
from benchmarks.grid.bench import report_only, turns, write_results
from benchmarks.grid.cells import Cell, plan_cells
from benchmarks.grid.journal import ENGINE, ROUND, WARM_UP, Journal
from benchmarks.grid.options import PLUS, PLUS_AGAIN, GridOptions
from benchmarks.grid.race import (
    hopeless_contenders,
    spared_contenders,
    unmeasured_contenders,
    warm_up_groups,
)
from benchmarks.grid.repeats import Repeat, next_repeat
from benchmarks.grid.summary import (
    summarise,
    summarise_cell,
    summarise_overall,
)
from benchmarks.grid.targets import CLEAR, errors_above
from tests.unit.benchmarks.grid_records import (
    PROVENANCE,
    SECONDS,
    figures,
    tiny_options,
    write_journal,
)
from vllm_mtp.config import ConfigError

NONE_S = (5.0 * 4.8) ** 0.5
OTHER_NONE_S = (4.0 * 4.2) ** 0.5
"""Seconds of both engines without speculation, geometric means: of the second repeat of
the one cell, and of every repeat of the other."""

SLOW = {"over_none": {"median": 0.125}}


@pytest.fixture
def options(tmp_path: Path) -> GridOptions:
    """Those of the made-up measurement."""
    return tiny_options(tmp_path)


@pytest.fixture
def journal(tmp_path: Path, options: GridOptions) -> Journal:
    """A whole measurement."""
    journal = Journal(tmp_path / "grid.jsonl")
    write_journal(journal, options)
    return journal


def test_ratios_are_paired_within_a_repeat(journal: Journal) -> None:
    code, constrained = summarise(journal)["cells"]
    assert code["best_static"] == "mtp K=2"
    assert code["plus_over_none"]["each"] == pytest.approx([2.0, NONE_S / 2.5])
    assert code["plus_over_best_static"]["each"] == [1.0, 0.8]
    assert code["plus_over_best_static"]["median"] == pytest.approx(0.9)
    assert constrained["best_static"] == "mtp K=1"
    assert constrained["plus_over_none"]["each"] == pytest.approx(
        [OTHER_NONE_S / 4, OTHER_NONE_S / 5]
    )


def test_whole_rounds_count_where_all_computed_the_same_prompts(
    tmp_path: Path, options: GridOptions
) -> None:
    """Else an engine is as fast as what its prefix cache happens to hold."""
    plus = {}
    for fresh in (False, True):
        journal = Journal(tmp_path / f"{fresh}.jsonl")
        write_journal(journal, replace(options, whole_requests=fresh))
        plus[fresh] = summarise(journal)["cells"][0]["contenders"]["mtp_plus"]
    assert plus[False]["tokens_per_s"]["each"] == [50.0, 40.0]
    assert plus[True]["whole_tokens_per_s"]["each"] == [110 / 3.0, 110 / 3.5]
    whole = {"whole_tokens_per_s", "whole_over_none"}
    assert plus[True].keys() - plus[False].keys() == whole


def test_acceptance_and_draft_length_are_of_request_steps(journal: Journal) -> None:
    contenders = summarise(journal)["cells"][0]["contenders"]
    plus = contenders["mtp_plus"]
    assert plus["acceptance_per_position"] == [0.75, 0.25]
    assert plus["mean_draft_length"] == pytest.approx(60 / 60)
    assert plus["acceptance_length"] == 2.0
    assert contenders["none"]["acceptance_per_position"] == []
    assert plus["split_ms"] == pytest.approx(
        {"verify": 12, "draft": 4, "metrics": 0.04, "rest": 3.96}
    )
    assert summarise(journal)["overall"]["metrics_share"] == pytest.approx(0.002)


def test_the_best_single_static_k_is_best_over_the_whole_grid(journal: Journal) -> None:
    overall = summarise(journal)["overall"]
    means = overall["geometric_means"]
    # K=2 wins one cell, but loses more in the other.
    code = (4 + NONE_S) / 2
    assert means["mtp K=1"] == pytest.approx((code / 2.5 * OTHER_NONE_S / 5) ** 0.5)
    assert means["mtp K=2"] == pytest.approx((code / 2 * OTHER_NONE_S / 8) ** 0.5)
    assert overall["best_single_static"] == "mtp K=1"
    ratio = overall["plus_over_best_single_static"]
    assert ratio == pytest.approx(means["mtp_plus"] / means["mtp K=1"])


def test_how_much_the_machine_alone_does_is_told(journal: Journal) -> None:
    again = summarise(journal)["overall"]["again_over_none"]
    # 4 / 4 and 5 / 4.8 in the one cell, 4 / 4.2 in the other.
    assert again["each"] == pytest.approx([(1 + 5 / 4.8) / 2, 4 / 4.2])


def test_the_speed_of_mtp_plus_is_the_mean_of_both_engines(journal: Journal) -> None:
    overall = summarise(journal)["overall"]
    assert (
        overall["plus_again_over_plus"] is None
    )  # a journal from before there were two
    journal.add(ENGINE, contender=PLUS_AGAIN, has_mended_sampling=True)
    for cell, times in SECONDS.items():
        for repeat, seconds in enumerate(times[PLUS]):
            faster = figures(seconds / 1.21, drafted=[], accepted=[])
            journal.add(ROUND, cell=cell, repeat=repeat, contender=PLUS_AGAIN, **faster)
    result = summarise(journal)
    code = result["cells"][0]
    assert code["plus_over_none"]["each"] == pytest.approx([2.2, 1.1 * NONE_S / 2.5])
    assert code["plus_over_best_static"]["each"] == pytest.approx([1.1, 0.88])
    speeds = [
        code["contenders"][name]["tokens_per_s"]["each"] for name in (PLUS, PLUS_AGAIN)
    ]
    assert speeds[0] == pytest.approx([55.0, 44.0])
    assert speeds[1] == pytest.approx([60.5, 48.4])
    differ = result["overall"]["plus_again_over_plus"]["each"]
    assert differ == pytest.approx([1.21, 1.21])


def test_every_target_is_judged_and_says_where_it_was_missed(journal: Journal) -> None:
    static, none, single = summarise(journal)["targets"]
    assert not static["is_reached"]
    assert static["num_cells_missed"] == 1
    assert static["worst_cell"] == "code c=1 T=0 short"
    assert not none["is_reached"]
    assert none["value"] == pytest.approx((OTHER_NONE_S / 4 + OTHER_NONE_S / 5) / 2)
    # Two repeats that differ by a fifth prove nothing.
    assert none["num_cells_missed"] == 1
    assert none["num_cells_clearly_missed"] == 0
    assert none["worst_cell"] == "constrained c=1 T=0 short"
    assert single["is_reached"]


def test_more_than_chance_is_many_errors_of_the_median() -> None:
    assert errors_above([0.9, 0.91, 0.89], 0.98) < -CLEAR
    assert -CLEAR < errors_above([0.97, 0.98, 0.96], 0.98) < 0
    assert errors_above([0.98] * 3, 0.98) == 0
    assert errors_above([1.1, 1.11, 1.09], 0.98) > CLEAR


def test_texts_that_differ_are_noticed(journal: Journal) -> None:
    cell = "code c=1 T=0 short"
    assert summarise(journal)["cells"][0]["identical_texts"]
    changed = figures(1.0, drafted=[1], accepted=[1], text="another")
    journal.add(ROUND, cell=cell, repeat=1, contender="mtp_plus", **changed)
    first, second = summarise(journal)["cells"]
    assert not first["identical_texts"]
    assert second["identical_texts"]


def test_a_repeat_without_all_contenders_does_not_count(
    journal: Journal, options: GridOptions
) -> None:
    journal.records.pop()  # the last round of the last contender
    code, constrained = plan_cells(options)
    assert next_repeat(journal, code, options) is None
    assert next_repeat(journal, constrained, options) == (
        1,
        ["none", "none again", "mtp K=1", PLUS_AGAIN, PLUS],
    )
    over_none = summarise(journal)["cells"][1]["plus_over_none"]
    assert over_none["each"] == pytest.approx([OTHER_NONE_S / 4])


def without(
    journal: Journal, cell: Cell, contender: str, repeats: Collection[int]
) -> None:
    """Take rounds of a contender out of a journal."""
    journal.records = [
        record
        for record in journal.records
        if record["kind"] != ROUND
        or (record["cell"], record["contender"]) != (cell.name, contender)
        or record["repeat"] not in repeats
    ]


def test_a_static_length_far_behind_is_spared_the_other_repeats(
    journal: Journal, options: GridOptions
) -> None:
    cell = plan_cells(options)[1]
    assert hopeless_contenders(journal, cell.name) == set()
    assert spared_contenders(journal, cell.name) == {"mtp K=2"}
    without(journal, cell, "mtp K=2", {1})
    assert next_repeat(journal, cell, options) is None
    contenders = summarise(journal)["cells"][1]["contenders"]
    longer, shorter = (contenders[f"mtp K={k}"]["over_none"]["each"] for k in (2, 1))
    assert longer == pytest.approx([OTHER_NONE_S / 8])
    assert shorter == pytest.approx([OTHER_NONE_S / 5] * 2)


def test_a_static_length_hopeless_in_the_warm_up_is_measured_there_only(
    journal: Journal, options: GridOptions
) -> None:
    cell = plan_cells(options)[0]
    assert hopeless_contenders(journal, cell.name) == set()
    for record in journal.of_kind(WARM_UP):
        if (record["cell"], record["contender"]) == (cell.name, "mtp K=2"):
            record["full_seconds"] *= 2
    assert hopeless_contenders(journal, cell.name) == {"mtp K=2"}
    without(journal, cell, "mtp K=2", {0, 1})
    assert next_repeat(journal, cell, options) is None
    (summary, _) = summarise(journal)["cells"]
    hopeless = summary["contenders"]["mtp K=2"]
    assert hopeless["is_warm_up_only"]
    assert hopeless["over_none"]["each"] == pytest.approx([0.5])
    assert summary["best_static"] == "mtp K=1"
    assert summary["plus_over_best_static"]["each"] == [1.25, 1.0]


def test_static_lengths_longer_than_a_hopeless_one_are_not_measured(
    journal: Journal, tmp_path: Path
) -> None:
    options = tiny_options(tmp_path, draft_lengths=(1, 2, 3))
    cell = plan_cells(options)[1]
    journal.add(ENGINE, contender="mtp K=3", has_mended_sampling=True)
    assert unmeasured_contenders(journal, cell.name) == set()
    for record in journal.of_kind(WARM_UP):
        if (record["cell"], record["contender"]) == (cell.name, "mtp K=2"):
            record["full_seconds"] *= 2
    assert unmeasured_contenders(journal, cell.name) == {"mtp K=3"}
    without(journal, cell, "mtp K=2", {0, 1})
    assert next_repeat(journal, cell, options) is None
    more = tiny_options(tmp_path, draft_lengths=(1, 2, 3), num_repeats=3)
    repeat = next_repeat(journal, cell, more)
    assert repeat == Repeat(2, ["none", "none again", "mtp K=1", PLUS_AGAIN, PLUS])
    summary = summarise_cell(journal, cell.name)
    assert list(summary["contenders"]) == [
        "none",
        "none again",
        "mtp K=1",
        "mtp K=2",
        "mtp_plus",
    ]
    overall = summarise_overall([summary])
    assert overall["at_most"] == []
    means = summarise_overall(
        [summary, summary | {"contenders": summary["contenders"] | {"mtp K=3": SLOW}}]
    )
    assert means["at_most"] == ["mtp K=3"]
    of_shorter = summary["contenders"]["mtp K=2"]["over_none"]["median"]
    assert means["geometric_means"]["mtp K=3"] == pytest.approx(
        (0.125 * of_shorter) ** 0.5
    )


def test_warm_ups_begin_with_the_shortest_static_lengths() -> None:
    names = ["none", "none again", *(f"mtp K={k}" for k in (2, 1, 3, 4, 5)), PLUS]
    first, *others = warm_up_groups(names)
    assert first == ["none", "none again", "mtp K=2", "mtp K=1", "mtp K=3", PLUS]
    assert others == [["mtp K=4", "mtp K=5"]]


def test_a_later_warm_up_does_not_change_who_is_hopeless(
    journal: Journal, options: GridOptions
) -> None:
    cell = plan_cells(options)[0]
    slow = figures(9.0, drafted=[1], accepted=[1])
    journal.add(WARM_UP, cell=cell.name, contender="mtp K=2", **slow)
    assert hopeless_contenders(journal, cell.name) == set()


def test_more_repeats_continue_a_finished_measurement(
    journal: Journal, tmp_path: Path
) -> None:
    more = tiny_options(tmp_path, num_repeats=3)
    Journal(journal.path).begin(more.as_json(), PROVENANCE)
    repeat = next_repeat(journal, plan_cells(more)[0], more)
    assert repeat is not None
    assert repeat.number == 2


def play(
    journal: Journal, cell: Cell, repeat: Repeat, seconds: dict[str, float]
) -> None:
    """Measure a repeat in which each contender takes so long."""
    for name in repeat.names:
        round_figures = figures(seconds[name], drafted=[1], accepted=[1])
        journal.add(
            ROUND, cell=cell.name, repeat=repeat.number, contender=name, **round_figures
        )


@pytest.mark.parametrize(
    ("speeds", "num_repeats"),
    [
        ([0.985, 0.995, 0.975] * 3, 9),
        ([0.975, 0.985, 0.965] * 3, 9),
        ([1.1, 1.11, 1.09] * 3, 3),
        ([0.7, 0.705, 0.695] * 3, 3),
        ([1.1, 0.9, 1.0] * 3, 9),
    ],
    ids=["just above", "just below", "clearly above", "clearly below", "scattered"],
)
def test_a_cell_is_measured_until_it_is_clear_where_it_lies(
    speeds: list[float], num_repeats: int, tmp_path: Path
) -> None:
    options = tiny_options(tmp_path, draft_lengths=(1,), num_repeats=3, max_repeats=9)
    journal = Journal(tmp_path / "grid.jsonl")
    write_journal(journal, options)
    cell = plan_cells(options)[0]
    for contender in ("none", "none again", "mtp K=1", "mtp_plus", "mtp K=2"):
        without(journal, cell, contender, {0, 1})
    journal.records = [r for r in journal.records if r.get("contender") != "mtp K=2"]
    seconds = {"none": 1.0, "none again": 1.0, "mtp K=1": 1.2}
    players = []
    while repeat := next_repeat(journal, cell, options):
        ours = dict.fromkeys((PLUS, PLUS_AGAIN), 1.0 / speeds[repeat.number])
        play(journal, cell, repeat, seconds | ours)
        players.append(repeat.names)
    assert len(players) == num_repeats
    assert players[:3] == [["none", "none again", "mtp K=1", PLUS_AGAIN, PLUS]] * 3
    assert all("mtp K=1" not in names or speeds[0] > 1 for names in players[3:])


def test_a_line_cut_short_is_dropped_and_the_next_one_is_whole(
    journal: Journal, options: GridOptions
) -> None:
    num_records = len(journal.records)
    with journal.path.open("a") as file:
        file.write('{"kind": "round", "cel')
    again = Journal(journal.path)
    assert len(again.records) == num_records
    again.begin(options.as_json(), PROVENANCE)
    again.add(ROUND, cell="x")
    assert len(Journal(journal.path).records) == num_records + 1


def test_other_options_are_refused_in_one_sentence(
    journal: Journal, tmp_path: Path
) -> None:
    other = tiny_options(tmp_path, dtype="bfloat16")
    with pytest.raises(ConfigError) as error:
        Journal(journal.path).begin(other.as_json(), PROVENANCE)
    assert "dtype: 'bfloat16' is not 'float32', with which" in str(error.value)


def test_another_temperature_may_be_added_later(
    journal: Journal, tmp_path: Path
) -> None:
    more = tiny_options(tmp_path, temperatures=(0.0, 1.0))
    again = Journal(journal.path)
    again.begin(more.as_json(), PROVENANCE)
    following = [next_repeat(again, cell, more) for cell in plan_cells(more)]
    assert [repeat and repeat.number for repeat in following] == [None, None, 0, 0]
    assert Journal(journal.path).header["options"]["temperatures"] == [0.0, 1.0]


def test_without_a_measurement_other_options_begin_anew(
    tmp_path: Path, options: GridOptions
) -> None:
    journal = Journal(tmp_path / "grid.jsonl")
    journal.begin(options.as_json(), PROVENANCE)
    again = Journal(journal.path)
    again.begin(tiny_options(tmp_path, dtype="bfloat16").as_json(), PROVENANCE)
    (header,) = Journal(journal.path).records
    assert header["options"]["dtype"] == "bfloat16"


def test_other_code_is_refused_in_one_sentence(
    journal: Journal, options: GridOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid_journal, "code_sha256", lambda: "other")
    with pytest.raises(ConfigError, match=r"begun with other code \(commit abc\)"):
        Journal(journal.path).begin(options.as_json(), PROVENANCE)


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "grid.jsonl"
    path.write_text('{"kind": "round"}\n')
    with pytest.raises(ConfigError, match="is no journal of this benchmark"):
        Journal(path)
    with pytest.raises(ConfigError, match="holds nothing to report"):
        report_only(tmp_path / "missing.jsonl", Console(file=StringIO()))


def test_another_contender_begins_each_repeat() -> None:
    orders = ["".join(turns(list("abc"), shift)) for shift in range(4)]
    assert orders == ["abc", "bca", "cab", "abc"]


def test_the_report_is_written_and_printed_from_the_journal(journal: Journal) -> None:
    text = StringIO()
    report_only(journal.path, Console(file=text, width=80))
    result = json.loads(journal.path.with_suffix(".json").read_text())
    assert [cell["name"] for cell in result["cells"]] == list(SECONDS)
    picture = journal.path.with_name("grid-ratios.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = text.getvalue()
    for words in ("constrained c=1 T=0 short", "MISSED", "reached", "mended", "12.0"):
        assert words in printed
    assert "…" not in printed  # every column fits a terminal


def test_the_report_says_whose_mean_is_only_a_bound(
    journal: Journal, options: GridOptions
) -> None:
    code, constrained = plan_cells(options)
    journal.add(ENGINE, contender="mtp K=3", has_mended_sampling=True)
    for record in [*journal.of_kind(WARM_UP), *journal.of_kind(ROUND)]:
        if (record["cell"], record["contender"]) == (code.name, "mtp K=2"):
            journal.add(**record | {"contender": "mtp K=3"})
    for record in journal.of_kind(WARM_UP):
        if (record["cell"], record["contender"]) == (constrained.name, "mtp K=2"):
            record["full_seconds"] *= 9
    without(journal, constrained, "mtp K=2", {0, 1})
    text = StringIO()
    folder = journal.path.parent
    result = write_results(journal, folder / "bound", Console(file=text, width=80))
    assert result["overall"]["at_most"] == ["mtp K=3"]
    assert "<= " in text.getvalue()

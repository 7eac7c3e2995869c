"""Plans from files: an evaluation, the doctor's probe, a machine and a model."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.unit.tools.report_samples import evaluation
from vllm_mtp.cli.main import app
from vllm_mtp.tools.eval_file import EvalFile
from vllm_mtp.tools.plan_cost import H100, MOE_671B, RooflineCost
from vllm_mtp.tools.plan_inputs import read_acceptance, read_hardware, read_model

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "gpu.md").read_text()
PROBED = ROOT / "docs/results/doctor/probe-expanded-amd-epyc.json"


def described(name: str) -> dict[str, Any]:
    """The example of the guide."""
    start = GUIDE.index(f'    {{"name": "{name}"')
    return dict(json.JSONDecoder().raw_decode(GUIDE[start:].lstrip())[0])


MACHINE, MOE = described("L40S"), described("GLM-4.5-Air")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def planned(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "plan.json"
    result = run(*arguments, "--output", str(path))
    assert result.exit_code == 0, result.output
    written: dict[str, Any] = json.loads(path.read_text())
    return written


def saved(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "given.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_acceptance_is_what_an_evaluation_counted(tmp_path: Path) -> None:
    file = evaluation()
    path = saved(tmp_path, file.model_dump_json())
    expected = [
        sum(record.accepted[j] for record in file.records)
        / sum(record.tested[j] for record in file.records)
        for j in range(3)
    ]
    assert read_acceptance(path) == pytest.approx(expected)
    written = planned(tmp_path, "--acceptance", path)
    assert written["options"]["acceptance"] == pytest.approx(expected)
    length = 1 + expected[0] + expected[0] * expected[1]
    assert written["rows"][2]["acceptance_length"] == pytest.approx(length)


def test_positions_that_no_draft_reached_are_not_taken_for_rejected(
    tmp_path: Path,
) -> None:
    whole = evaluation()
    records = [
        record.model_copy(update={"tested": (9, 5, 0), "accepted": (5, 0, 0)})
        for record in whole.records
    ]
    shorter = records[0].model_copy(update={"tested": (9,), "accepted": (9,)})
    file = whole.model_copy(update={"records": (*records, shorter)})
    path = saved(tmp_path, file.model_dump_json())
    expected = (len(records) * 5 + 9) / (len(records) * 9 + 9)
    assert read_acceptance(path) == pytest.approx((expected, 0.0))


def test_a_probe_gives_its_acceptance_and_its_times(tmp_path: Path) -> None:
    seen = json.loads(PROBED.read_text())["probe"]
    written = planned(tmp_path, "--probe", str(PROBED))
    assert "doctor's probe" in written["assumptions"]
    rows = {row["draft_length"]: row for row in written["rows"]}
    for probed in seen["lengths"]:
        row = rows[probed["draft_length"]]
        assert row["acceptance_length"] == pytest.approx(probed["acceptance_length"])
        # The probe's forecast is a median of ratios, this is a ratio of its medians.
        assert row["speedup"] == pytest.approx(probed["predicted_speedup"], rel=0.02)
        drafts_cost = 1 - probed["draft_seconds"] / probed["step_seconds"]
        free = row["speedup_if_drafts_were_free"] * drafts_cost
        assert free == pytest.approx(row["speedup"])
    # K = 7 was not probed.
    between = sum(rows[k]["acceptance_length"] / rows[k]["speedup"] for k in (6, 8))
    time = rows[7]["acceptance_length"] / rows[7]["speedup"]
    assert time == pytest.approx(between / 2)


def test_other_acceptance_than_the_probes_can_be_given(tmp_path: Path) -> None:
    written = planned(tmp_path, "--probe", str(PROBED), "--acceptance", "0.5")
    assert written["rows"][1]["acceptance_length"] == 1.5


def test_machine_and_model_of_ones_own(tmp_path: Path) -> None:
    machine, model = tmp_path / "l40s.json", tmp_path / "glm.json"
    machine.write_text(json.dumps(MACHINE))
    model.write_text(json.dumps(MOE))
    own = ["--hardware", str(machine), "--model", str(model), "--num-gpus", "8"]
    written = planned(tmp_path, *own, "--batch", "1,64")
    assert written["options"]["hardware"] == {**MACHINE, "memory_bytes": None}
    assert written["options"]["model"] == MOE
    assert "8 x L40S, GLM-4.5-Air, batch 64" in run(*own, "--batch", "64").stdout
    known = planned(tmp_path, "--num-gpus", "8", "--batch", "1,64")
    assert known["rows"] != written["rows"]


def test_a_description_of_a_known_one_gives_the_same_plan(tmp_path: Path) -> None:
    known = planned(tmp_path, "--hardware", "h100", "--model", "moe-671b")
    options = known["options"]
    for name in ("hardware", "model"):
        (tmp_path / f"{name}.json").write_text(json.dumps(options[name]))
    assert read_hardware(str(tmp_path / "hardware.json")) == H100
    assert read_model(str(tmp_path / "model.json")) == MOE_671B
    own = [f"--{name}={tmp_path / name}.json" for name in ("hardware", "model")]
    assert planned(tmp_path, *own)["rows"] == known["rows"]


def test_fewer_bytes_a_weight_are_read_faster(tmp_path: Path) -> None:
    four_bits = read_model(saved(tmp_path, MOE | {"bytes_per_weight": 0.5}))
    whole = read_model(saved(tmp_path, MOE))
    seconds = [
        RooflineCost(H100, model, launch_s=0, all_to_all_s=0).draft_s(1, 1, 0) - 0.12e-3
        for model in (four_bits, whole)
    ]
    assert seconds[1] == pytest.approx(4 * seconds[0], rel=0.01)


def evaluation_without_drafts() -> EvalFile:
    file = evaluation()
    nothing = {"tested": (), "accepted": (), "num_drafts": 0, "num_draft_tokens": 0}
    records = tuple(record.model_copy(update=nothing) for record in file.records)
    return file.model_copy(update={"records": records})


@pytest.mark.parametrize(
    ("option", "content", "words"),
    [
        ("acceptance", "{", "is no evaluation of this version"),
        ("acceptance", evaluation_without_drafts().model_dump_json(), "no draft was"),
        ("probe", {"findings": []}, "is no report of the doctor of this version"),
        ("probe", {"probe": None}, "must be a report of the doctor with --probe"),
        (
            "probe",
            {"probe": {"survival": [0.5], "lengths": [
                {"draft_length": k, "step_seconds": 1, "draft_seconds": 0}
                for k in (1, 2)
            ]}},
            "draft lengths must rise from 0",
        ),
        ("hardware", MACHINE | {"bytes_per_s": 0}, "bytes_per_s: Input should be gr"),
        ("hardware", '{"name": "x", "flops_per_s": 1}', "bytes_per_s: Field required"),
        ("hardware", MACHINE | {"watts": 1}, "watts: Unexpected keyword argument"),
        ("model", MOE | {"dense_weights": "many"}, "dense_weights: Input should be a"),
        ("model", MOE | {"draft_weights": 1e6}, "head_weights: at most draft_weights"),
        ("model", MOE | {"experts": MOE["experts"] | {"top_k": 129}}, "most num_exp"),
        ("model", json.dumps(MOE).replace("188416", "NaN"), "kv_bytes_per_token: "),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_sentence(
    tmp_path: Path, option: str, content: Any, words: str
) -> None:
    result = run(f"--{option}", saved(tmp_path, content))
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["acceptance", "probe", "hardware", "model"])
def test_a_file_that_is_not_there_is_one_sentence(option: str) -> None:
    result = run(f"--{option}", "/nowhere/given.json")
    assert result.exit_code == 2
    assert "/nowhere/given.json cannot be read: No such file" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-draft-length", "9"], "must be at most 8, the longest that was probed"),
    ],
)
def test_what_a_probe_does_not_go_with(arguments: list[str], words: str) -> None:
    result = run("--probe", str(PROBED), *arguments)
    assert result.exit_code == 2
    assert words in result.stderr

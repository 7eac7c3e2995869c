"""``vllm-mtp eval --ray`` and ``tune --ray`` on a real Ray cluster of this machine.

Files are run in the order of their names, two at a time: this one is far from
`test_ray`, because two clusters at once take several times as long.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from rich.console import Console
from typer.testing import CliRunner

from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.ray_cluster import ray_cluster
from tests.support.tuning import BothRanks
from vllm_mtp.cli.main import app
from vllm_mtp.config import DEFAULT_DRAFT_LENGTH, ConfigError
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.eval import EvalOptions, _journal_of
from vllm_mtp.tools.eval_backends import Sampling, started_engine
from vllm_mtp.tools.eval_file import PromptRecord, read_eval_file, record_of
from vllm_mtp.tools.prompts import load_prompts
from vllm_mtp.tools.ray_engines import HostedEngine, RayEngines
from vllm_mtp.tools.server_process import ServerError
from vllm_mtp.tools.tune import TEXTS_FOLDER, speculation
from vllm_mtp.tools.tune_texts import Answering, collect_texts
from vllm_mtp.tools.tune_train import RUN_FOLDER
from vllm_mtp.tune.checkpoint import TUNING_FILE, Checkpoint
from vllm_mtp.tune.plan import TuningPlan
from vllm_mtp.tune.shards import Texts
from vllm_mtp.tune.train import JOURNAL_FILE

NUM_PROMPTS, NUM_KEPT, MAX_TOKENS, CONCURRENCY = 24, 4, 32, 4
KEPT_SECONDS = 123.0
SIZE = EngineSize(str(BUNDLED_CHECKPOINT), 512, CONCURRENCY, "float32", 64)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_cluster(num_cpus=2):
        yield


def counts(records: Sequence[PromptRecord]) -> list[Any]:
    return [(each.id, each.tested, each.accepted) for each in records]


@pytest.fixture(scope="module")
def one_engine() -> list[PromptRecord]:
    """Of each prompt, by an engine that Ray has nothing to do with."""
    config = {"method": "mtp_plus", "draft_vocab": "full"}
    prompts = load_prompts(None, SIZE.model, NUM_PROMPTS)
    with started_engine(SIZE, config, Sampling(3, 0.0, MAX_TOKENS)) as engine:
        answers = dict(
            (prompt.id, answer) for prompt, answer in engine.answers(prompts)
        )
    return [
        record_of(each, answers[each.id].metrics, 3, answers[each.id].num_tokens, 1.0)
        for each in prompts
    ]


class Murder:
    """Kills an engine that has just finished an order and been given the next one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        """After so many results of all engines."""
        self.engines: Any = None
        self.victim: psutil.Process | None = None
        self._num_results = 0
        results = RayEngines.results

        def watched(engines: RayEngines, *orders: Any) -> Iterator[Any]:
            for each in results(engines, *orders):
                self._num_results += 1
                if self._num_results == after:
                    self.engines = engines
                    self.victim = psutil.Process(engines.last_pid)
                    self.victim.send_signal(signal.SIGKILL)
                yield each

        monkeypatch.setattr(RayEngines, "results", watched)

    def check(self) -> None:
        """It was one, and it is gone."""
        assert self.victim is not None
        assert not self.victim.is_running()
        assert self.engines.num_lost == 1


def test_a_killed_engine_and_a_resumed_run_change_no_prompts_counts(
    one_engine: list[PromptRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "eval.json"
    arguments = {
        "model": SIZE.model,
        "num_prompts": NUM_PROMPTS,
        "max_tokens": MAX_TOKENS,
    }
    options = EvalOptions(output=path, **arguments)  # type: ignore[arg-type]
    prompts = load_prompts(None, SIZE.model, NUM_PROMPTS)
    with _journal_of(options, SIZE.model, prompts) as journal:
        for each in one_engine[:NUM_KEPT]:
            journal.add(each.model_copy(update={"seconds": KEPT_SECONDS}), 1.0)
    murder = Murder(monkeypatch, after=1)
    result = CliRunner().invoke(
        app,
        [
            *("eval", str(path), "--ray", "2", "--dtype", "float32"),
            *("--concurrency", str(CONCURRENCY), "--max-model-len", "512"),
            *(
                word
                for name, value in arguments.items()
                for word in (f"--{name.replace('_', '-')}", str(value))
            ),
        ],
    )
    assert result.exit_code == 0, result.output
    assert "an engine on Ray is lost" in result.output
    murder.check()
    records = read_eval_file(path).records
    assert counts(records) == counts(one_engine)
    kept = [each.id for each in records if each.seconds == KEPT_SECONDS]
    assert kept == [each.id for each in one_engine[:NUM_KEPT]]
    assert [file.name for file in tmp_path.iterdir()] == ["eval.json"]


def test_too_small_a_cluster_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["eval", str(tmp_path / "e.json"), "--model", SIZE.model, "--ray", "3"]
    )
    assert result.exit_code == 2
    assert "ray: 3 engines want a CPU each; the cluster has 2" in result.stderr


def idle_engines(num_engines: int) -> RayEngines:
    """Actors without an engine: what is asked of them needs none."""

    class Idle(HostedEngine):
        def __init__(self) -> None:
            pass

    actor: Any = ray.remote(Idle)
    return RayEngines([actor.remote() for _ in range(num_engines)], lambda line: None)


def test_when_no_engine_is_left_a_sentence_says_so() -> None:
    engines = idle_engines(2)
    with pytest.raises(ServerError, match="no engine on Ray is left; the last one: "):
        list(engines.results(lambda engine, order: os._exit(order), [1, 2, 3]))
    assert engines.num_lost == 2


def test_what_an_engine_refuses_is_a_users_error_here_too() -> None:
    def refuse(engine: Any, order: str) -> None:
        raise ConfigError(f"prompts: {order}")

    with pytest.raises(ConfigError, match=r"^prompts: too long$"):
        list(idle_engines(1).results(refuse, ["too long"]))


ANSWERING = Answering(24, 256, 2, 1.0, 0.0, "float32", speculation(None))
"""All answers greedy: they are the same whoever gives them."""


def tokens_of(folder: Path) -> dict[str, list[int]]:
    texts = Texts(folder)
    names = [place.name for place in texts.places]
    assert len(set(names)) == len(names), "a text is there twice"
    return {
        place.name: texts.read(place, 0, 512).token_ids.tolist()
        for place in texts.places
    }


@pytest.fixture(scope="module")
def one_engines_texts(
    one_engine: list[PromptRecord], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[int]]:
    folder = tmp_path_factory.mktemp("texts")
    prompts = load_prompts(None, SIZE.model, NUM_PROMPTS)
    collect_texts(SIZE.model, prompts, ANSWERING, folder, 512, Console(quiet=True))
    return tokens_of(folder)


def assert_same_texts(
    found: dict[str, list[int]], wanted: dict[str, list[int]]
) -> None:
    """Recorded is what was verified: of the last step it may be more or less."""
    assert found.keys() == wanted.keys()
    for name, ids in wanted.items():
        shorter = min(len(ids), len(found[name]))
        assert found[name][:shorter] == ids[:shorter], name
        assert max(len(ids), len(found[name])) - shorter <= DEFAULT_DRAFT_LENGTH, name


def losses_of(journal: Path) -> list[float]:
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    return [entry["loss"] for entry in entries if "loss" in entry]


def tune_command(head: Path) -> list[str]:
    options = {
        "output": head,
        "num-prompts": NUM_PROMPTS,
        "answer-tokens": ANSWERING.answer_tokens,
        "max-model-len": ANSWERING.max_model_len,
        "concurrency": ANSWERING.concurrency,
        "sampled-share": 0,
        "dtype": "float32",
        "batch-tokens": 256,
        "draft-steps": 2,
        "draft-rows": 0,
        "eval-prompts": 0,
        "ray": 2,
    }
    words = [w for name, value in options.items() for w in (f"--{name}", str(value))]
    return ["tune", SIZE.model, *words]


def losing_rank_1(is_lost: Path, begun: Path) -> Callable[..., None]:
    """What ranks do: every update is saved, and one rank is lost before the second."""

    def train_rank(options: Any, folder: Path, command: Sequence[str]) -> None:
        from vllm_mtp.tools import tune_train
        from vllm_mtp.tune.train import Trainer

        rate_share = Trainer._rate_share  # asked once before each update

        def watched(run: Trainer) -> float:
            if run.rank == 0:
                with begun.open("a") as file:
                    file.write(f"{run.progress.update}\n")
            elif run.progress.update == 1 and not is_lost.exists():
                while "1" not in begun.read_text().split():
                    time.sleep(0.05)  # by then rank 0 has saved the first one, too
                is_lost.touch()
                os._exit(1)
            return rate_share(run)

        Trainer._rate_share = watched  # type: ignore[method-assign]
        tune_train.MEASURE_EVERY = 1
        tune_train.train(options, folder, command, Console(quiet=True))

    return train_rank


def losses_of_one_process(texts: Path, tuning: dict[str, Any]) -> list[float]:
    """Which takes the batches of both ranks."""
    model = Checkpoint(BUNDLED_CHECKPOINT)
    one = BothRanks(
        model.drafter(False),
        model.target(torch.device("cpu"), None),
        Texts(texts),
        TuningPlan.model_validate(tuning["plan"]),
        texts,
    )
    return one.run_both(tuning["num_updates"])


@pytest.mark.long
def test_engines_and_ranks_that_are_lost_tune_as_one_process_does(
    one_engines_texts: dict[str, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The first result is the prompts' tokens; then one is killed while it answers.
    murder = Murder(monkeypatch, after=2)
    head, is_lost, begun = (tmp_path / name for name in ("head", "is-lost", "begun"))
    monkeypatch.setattr(
        "vllm_mtp.tools.tune_train._train_rank", losing_rank_1(is_lost, begun)
    )
    command = tune_command(head)
    monkeypatch.setattr("sys.argv", ["vllm-mtp", *command])
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    murder.check()
    assert_same_texts(tokens_of(head / TEXTS_FOLDER), one_engines_texts)

    assert is_lost.exists()
    updates = begun.read_text().split()
    assert updates == ["0", "1", *map(str, range(1, len(updates) - 1))]
    tuning = json.loads((head / TUNING_FILE).read_text())
    losses = losses_of_one_process(head / TEXTS_FOLDER, tuning)
    assert len(losses) >= 3
    found = losses_of(head / RUN_FOLDER / JOURNAL_FILE)
    assert found == pytest.approx(losses, rel=1e-3)
    assert tuning["provenance"]["command"] == ["vllm-mtp", *command]

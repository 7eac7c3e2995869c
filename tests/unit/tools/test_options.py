"""Options as dataclasses, and the commands that are made of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from vllm_mtp.cli.command import command_of
from vllm_mtp.config import ConfigError
from vllm_mtp.tools.options import Options, argument, option, required


@dataclass(frozen=True)
class Example(Options):
    """What is tried
    here.

    Second paragraph.
    """

    model: str = argument("A model.")
    key: str = required("A key.")
    num_rounds: int = option(3, "How many.", 1, 9, name="rounds")
    lengths: tuple[int, ...] = option((1, 2), "Each once.", 1, 8)
    some: tuple[int, ...] | None = option(None, "Unset or a list.", 1, 8)
    config: dict[str, Any] = option({"a": 1}, "JSON.")
    is_fast: bool = option(True, "Or slow.")
    output: Path | None = option(None, "A file.")


SEEN: list[Example] = []


def call(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(command_of(Example, lambda chosen, _: SEEN.append(chosen), "try"))
    app.command("other")(lambda: None)
    return CliRunner().invoke(app, ["try", *arguments])


def chosen(*arguments: str) -> Example:
    result = call("m", "--key", "k", *arguments)
    assert result.exit_code == 0, result.output
    return SEEN.pop()


def test_fields_are_options_with_their_defaults() -> None:
    assert chosen() == Example("m", "k")


def test_every_kind_of_field_is_read() -> None:
    found = chosen(
        *("--rounds", "4", "--lengths", "3,8", "--some", "7", "--no-is-fast"),
        *("--config", '{"b": [2]}', "--output", "x/y.json"),
    )
    assert found.num_rounds == 4
    assert (found.lengths, found.some) == ((3, 8), (7,))
    assert found.config == {"b": [2]}
    assert not found.is_fast
    assert found.output == Path("x/y.json")
    # Folders are this machine's.
    assert found.as_json()["output"] == "y.json"
    assert found.as_json()["lengths"] == [3, 8]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rounds", "10"), "rounds: 10 is not allowed; must be a number from 1 to 9"),
        (("--lengths", "1,9"), "lengths: '1,9' is not allowed; must be numbers from"),
        (("--lengths", "2,2"), "lengths: '2,2' is not allowed"),
        (("--lengths", "x"), "lengths: 'x' is not allowed; must be whole numbers"),
        (("--lengths", ""), "lengths: '' is not allowed"),
        (("--some", "0"), "some: '0' is not allowed"),
        (("--config", "[1]"), "config: '[1]' is not allowed; must be a JSON object"),
    ],
)
def test_a_wrong_option_is_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    result = call("m", "--key", "k", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_what_is_required_is_missed() -> None:
    assert call("m").exit_code == 2
    assert call("--key", "k").exit_code == 2


def test_the_help_is_the_docstring_and_the_fields() -> None:
    text = " ".join(call("--help").output.split())
    for words in ("What is tried here.", "Second paragraph.", "How many.", "--rounds"):
        assert words in text


def test_not_a_number_is_beyond_all_limits() -> None:
    @dataclass(frozen=True)
    class Share(Options):
        value: float = option(0.5, "Of all.", 0, 1)

    with pytest.raises(ConfigError, match="value: nan is not allowed"):
        Share(float("nan"))


def test_interrupted_and_failing_commands_end_with_a_sentence() -> None:
    def stop(chosen: Example, console: Console) -> None:
        raise KeyboardInterrupt

    app = typer.Typer()
    app.command()(command_of(Example, stop, "try", "stopped"))
    result = CliRunner().invoke(app, ["m", "--key", "k"])
    assert (result.exit_code, result.stderr) == (130, "stopped\n")

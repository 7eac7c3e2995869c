"""``vllm-mtp rounds``: the page of `/mtp_plus` for one prompt, as a file.

An engine of its own answers the prompt; its rounds are embedded in the page, which then
needs no server and no network.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_mtp.config import DEFAULT_FIXED_DRAFT_LENGTH, MAX_DRAFT_LENGTH, METHOD
from vllm_mtp.page.document import document
from vllm_mtp.tools.demo import max_model_len_tokens
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.engine_process import START_TIMEOUT_S, EngineGroup
from vllm_mtp.tools.eval_backends import EngineBackend, Sampling
from vllm_mtp.tools.option_checks import check_output, refuse, resolve_model
from vllm_mtp.tools.options import MODEL_HELP, Options, argument, option, required
from vllm_mtp.tools.prompts import Prompt
from vllm_mtp.tools.provenance import replacing
from vllm_mtp.tools.server_process import exit_on_signals, log_folder


@dataclass(frozen=True)
class RoundsOptions(Options):
    """Write a page that steps through the rounds of one answer: open it in a browser.

    Exit code 1: the engine failed. 2: wrong input.
    """

    model: str = argument(MODEL_HELP)
    prompt: str = required("To be continued.")
    output: Path = option(Path("rounds.html"), "Page to write.")
    max_tokens: int = option(96, "Longest answer.", 1, 512)
    temperature: float = option(0.0, "Of the answer.", 0, 2)
    draft_tokens: int = option(
        DEFAULT_FIXED_DRAFT_LENGTH, "K of every round.", 1, MAX_DRAFT_LENGTH
    )
    adaptive: bool = option(False, "Let K be chosen, as in a server that has started.")
    dtype: str = option("auto", "Of the engine.")

    def __post_init__(self) -> None:
        """Check every option; see `Options`."""
        super().__post_init__()
        if not self.prompt:
            refuse("prompt", self.prompt, "a text that is not empty")
        check_output(self.output)

    @property
    def config(self) -> dict[str, Any]:
        """The speculative config."""
        fixed = {"num_speculative_tokens": self.draft_tokens}
        return {"method": METHOD, "show_rounds": 1, **({} if self.adaptive else fixed)}


def write_rounds(options: RoundsOptions, console: Console) -> dict[str, Any]:
    """Ask, write and say what was written.

    Raises:
        ConfigError: An option is wrong; nothing was started.
        ServerError: The engine failed.
    """
    model = resolve_model(options.model)
    request = _answer(model, options)
    # Of a folder its name, since folders are this machine's.
    data = {"model": Path(options.model).name, "requests": [request]}
    with replacing(options.output) as pending:
        pending.write_text(document(data), encoding="utf-8")
    num_rounds, sums = len(request["rounds"]), request["sums"]
    num_tokens = sums["num_committed_tokens"]
    console.print(
        f"{num_tokens} tokens in {num_rounds} rounds, {num_tokens / num_rounds:.2f} a "
        f"round; {sums['num_accepted_tokens']} of {sums['num_draft_tokens']} draft "
        "tokens accepted"
    )
    console.print(f"Written: {options.output}", markup=False)
    return request


def _answer(model: str, options: RoundsOptions) -> dict[str, Any]:
    """The request with its rounds (``page/texts.py``)."""
    length = max_model_len_tokens(model, options.max_tokens)
    size = EngineSize(model, length, 1, options.dtype)
    draft_length = None if options.adaptive else options.draft_tokens
    sampling = Sampling(draft_length, options.temperature, options.max_tokens)
    with log_folder() as logs, exit_on_signals(), EngineGroup() as group:
        engine = group.launch(METHOD, options.config, size, logs)
        engine.answer(START_TIMEOUT_S)
        prompt = Prompt(id="prompt", text=options.prompt)
        backend = EngineBackend(engine, sampling, 1, length)
        list(backend.answers([prompt]))
        request: dict[str, Any]
        (request,) = engine.ask("rounds")["requests"]
        return request | {"name": "prompt"}

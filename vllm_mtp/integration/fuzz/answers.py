"""What an engine has answered to one request of the fuzzer, piece by piece."""

from collections.abc import Mapping
from typing import Any

from vllm.sampling_params import RequestOutputKind

_KIND = {kind.name: kind for kind in RequestOutputKind}


class Answer:
    """Pieces put together, whatever kind of stream they came in."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        """Nothing has come yet.

        Args:
            request: See ``tools/fuzz_requests.py``.
        """
        self.is_open = True
        self.is_closing = False
        """A session that has been told that no chunk follows."""
        self.was_aborted = False
        self.refused = ""
        """Why it never ran."""
        self.num_ends = 0
        """Chunks that are answered; 1 at the end of an ordinary request."""
        self.num_prompt_tokens: int | None = None
        self.problems: list[str] = []
        """What a stream must not do."""
        self._outputs: dict[int, dict[str, Any]] = {}
        self._prompt_logprobs: Any = None
        self._prompt_token_id_logprobs: Any = None
        kind = request["chunks"][0]["sampling"].get("output_kind", "CUMULATIVE")
        self.output_kind = _KIND.get(kind, RequestOutputKind.CUMULATIVE)

    def add(self, output: Any) -> None:
        """Take vLLM's ``RequestOutput``."""
        if not self.is_open:
            self.problems.append("a piece came after the end")
        self.num_prompt_tokens = len(output.prompt_token_ids)
        if output.prompt_logprobs:
            self._prompt_logprobs = list(map(_entries, output.prompt_logprobs))
        if output.prompt_token_id_logprobs is not None:
            self._prompt_token_id_logprobs = output.prompt_token_id_logprobs.tolist()
        for completion in output.outputs:
            self._add_completion(completion)
        if output.finished:
            self.is_open = False

    def _add_completion(self, piece: Any) -> None:
        kept = self._outputs.setdefault(
            piece.index, {"token_ids": [], "text": "", "logprobs": None, "ends": []}
        )
        is_delta = self.output_kind == RequestOutputKind.DELTA
        token_ids, text = list(piece.token_ids), piece.text
        logprobs = None if piece.logprobs is None else list(piece.logprobs)
        if is_delta:
            kept["token_ids"] += token_ids
            kept["text"] += text
            if logprobs is not None:
                kept["logprobs"] = (kept["logprobs"] or []) + list(
                    map(_entries, logprobs)
                )
        else:
            if token_ids[: len(kept["token_ids"])] != kept["token_ids"]:
                self.problems.append("a token that had come was taken back")
            if not text.startswith(kept["text"]):
                self.problems.append("text that had come was taken back")
            kept |= {"token_ids": token_ids, "text": text}
            if logprobs is not None:
                kept["logprobs"] = list(map(_entries, logprobs))
        kept["cumulative_logprob"] = piece.cumulative_logprob
        if piece.finish_reason is not None:
            self.num_ends += 1
            kept["ends"].append(
                (str(piece.finish_reason), piece.stop_reason, len(kept["token_ids"]))
            )

    def as_dict(self) -> dict[str, Any]:
        """What is compared; plain data."""
        return {
            "refused": self.refused,
            "was_aborted": self.was_aborted,
            "problems": self.problems,
            "num_prompt_tokens": self.num_prompt_tokens,
            "prompt_logprobs": self._prompt_logprobs,
            "prompt_token_id_logprobs": self._prompt_token_id_logprobs,
            "outputs": self._outputs,
        }


def _entries(position: Any) -> dict[int, tuple[float, int | None]] | None:
    """Logarithmic probability and rank of the tokens of one position."""
    if position is None:
        return None
    return {token: (entry.logprob, entry.rank) for token, entry in position.items()}

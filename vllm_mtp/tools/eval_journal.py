"""What an evaluation has found so far, kept line by line: nothing is lost."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from vllm_mtp.config import ConfigError
from vllm_mtp.tools.eval_file import PromptRecord
from vllm_mtp.tools.prompts import Prompt


class EvalJournal:
    """A file with a header and a line for each finished prompt."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Read what is there, or begin.

        Raises:
            ConfigError: The file is of another evaluation.
        """
        self.header = dict(header)
        self.records: dict[str, PromptRecord] = {}
        self.seconds = 0.0
        self._path = path
        is_new = not path.exists()
        if not is_new:
            self._read()
        self._file = path.open("a", encoding="utf-8")
        if is_new:
            self._write({"header": self.header})

    def __enter__(self) -> Self:
        """Ready to be added to."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """What is written stays."""
        self._file.close()

    def _read(self) -> None:
        lines = self._path.read_text(encoding="utf-8").splitlines()
        try:
            header = json.loads(lines[0])["header"]
        except (IndexError, ValueError, KeyError, TypeError):
            raise ConfigError(f"output: {self._path} is no evaluation") from None
        if header != self.header:
            differing = [
                key for key in self.header if header.get(key) != self.header[key]
            ]
            raise ConfigError(
                f"output: {self._path} holds an unfinished evaluation of something "
                f"else ({', '.join(differing)} differ); finish that one, or name "
                "another output"
            )
        for line in lines[1:]:
            try:
                entry = json.loads(line)
                record = PromptRecord.model_validate(entry["record"])
            except (ValueError, KeyError, ValidationError):
                continue  # the line that was being written when it was interrupted
            self.records[record.id] = record
            self.seconds += entry["seconds"]

    def missing(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Prompts that are not answered yet."""
        return [prompt for prompt in prompts if prompt.id not in self.records]

    def add(self, record: PromptRecord, seconds: float) -> None:
        """A prompt is finished."""
        self.records[record.id] = record
        self.seconds += seconds
        self._write({"record": record.model_dump(), "seconds": seconds})

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def remove(self) -> None:
        """Everything is in the result."""
        self._path.unlink()

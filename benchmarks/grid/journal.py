"""What a grid benchmark has measured so far, a line each, to continue from.

The first line says what is measured and with which code; a benchmark that would
measure something else is refused. A line that was cut short by a crash is dropped.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import vllm_mtp
from vllm_mtp.config import ConfigError

HEADER, CALIBRATION, ENGINE, WARM_UP, SETTLING, ROUND = (
    "header",
    "calibration",
    "engine",
    "warm_up",
    "settling",
    "round",
)
MAY_DIFFER = frozenset(
    {"output", "num_repeats", "max_repeats", "workloads", "temperatures"}
)
"""Options that may change from one session to the next: they add cells or repeats and
leave the engines as they are."""


NOT_MEASURED = frozenset({"cli", "tools", "tuning"})
MEASURING_FILES = tuple(
    Path(__file__).with_name(f"{name}.py")
    for name in ("bench", "cells", "engines", "prose", "race", "repeats")
)


def code_sha256() -> str:
    """Fingerprint of the source that is measured or measures.

    A commit does not tell of local edits, and those of a report do not matter.
    """
    package = Path(vllm_mtp.__file__).parent
    measured = [
        path
        for path in sorted(package.rglob("*.py"))
        if path.relative_to(package).parts[0] not in NOT_MEASURED
    ]
    digest = hashlib.sha256()
    for path in (*measured, *MEASURING_FILES):
        digest.update("/".join(path.parts[-2:]).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Journal:
    """The records of a benchmark and the file that keeps them."""

    def __init__(self, path: Path) -> None:
        """Read what is there; nothing is written.

        Raises:
            ConfigError: It is not a journal.
        """
        self.path = path
        self.records = _read(path) if path.is_file() else []
        if self.records and self.records[0].get("kind") != HEADER:
            raise ConfigError(f"journal: {path} is no journal of this benchmark")

    @property
    def header(self) -> dict[str, Any]:
        """The first record.

        Raises:
            ConfigError: There is none.
        """
        if not self.records:
            raise ConfigError(f"journal: {self.path} holds nothing to report")
        return self.records[0]

    def begin(self, options: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        """Write the header, or check that what it says still holds.

        Raises:
            ConfigError: The journal is of another benchmark.
        """
        code = code_sha256()
        if not self.of_kind(ROUND):
            # Nothing that could be lost: whoever mistyped an option starts again.
            self.records.clear()
            self.path.unlink(missing_ok=True)
            self._append(
                kind=HEADER,
                options=dict(options),
                code_sha256=code,
                provenance=dict(provenance),
            )
            return
        _check_same(self.header, options, code, self.path)
        self.header["options"] = dict(options)
        self._rewrite()

    def add(self, kind: str, **content: Any) -> None:
        """Keep a record, at once and for good."""
        self._append(kind=kind, **content)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """All records of a kind, in the order in which they were measured."""
        return [record for record in self.records if record["kind"] == kind]

    def _append(self, **record: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)

    def _rewrite(self) -> None:
        """Without a last line that was cut short, or the next one would join it."""
        pending = self.path.with_suffix(".jsonl.pending")
        pending.write_text("".join(json.dumps(each) + "\n" for each in self.records))
        pending.replace(self.path)


def _check_same(
    header: Mapping[str, Any], options: Mapping[str, Any], code: str, path: Path
) -> None:
    advice = f"give the same, or another --output, or remove {path}"
    # As JSON has them: a tuple comes back as a list.
    options = json.loads(json.dumps(options))
    for name, value in header["options"].items():
        if name not in MAY_DIFFER and options.get(name) != value:
            raise ConfigError(
                f"{name.replace('_', '-')}: {options.get(name)!r} is not {value!r}, "
                f"with which the benchmark in {path} was begun; {advice}"
            )
    if header["code_sha256"] != code:
        commit = (header["provenance"]["git"] or {}).get("commit")
        raise ConfigError(
            f"output: the benchmark in {path} was begun with other code (commit "
            f"{commit}) and cannot be continued; {advice}"
        )


def _read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(_parse(lines, path))


def _parse(lines: list[str], path: Path) -> Iterable[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            assert isinstance(record, dict)
        except (ValueError, AssertionError, RecursionError):
            if number == len(lines):
                return  # cut short
            raise ConfigError(f"journal: {path}:{number} is no JSON object") from None
        yield record

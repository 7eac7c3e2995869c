"""The files that `vllm-mtp report` is given: read, and told apart by what they hold.

Results name neither their command nor a format, so a kind is known by keys that its
writer always writes and no other one does together.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_mtp.config import ConfigError
from vllm_mtp.tools.checked_file import first_problem

EVAL = "eval"
KEYS: dict[str, frozenset[str]] = {
    EVAL: frozenset({"model", "prompts_sha256", "draft_length", "records"}),
    "compare": frozenset({"is_failure", "num_prompts", "figures"}),
    "plan": frozenset({"rows", "best", "stops_paying_at", "assumptions"}),
    "doctor": frozenset({"is_healthy", "findings", "probe"}),
    "verify": frozenset({"is_exact", "greedy", "sampled", "verified"}),
    "verify requests": frozenset({"num_compared", "num_failures", "kinds", "engines"}),
    "verify HTTP": frozenset({"is_exact", "statuses", "held", "verified"}),
    "soak": frozenset({"is_sound", "requests", "memory", "counters"}),
    "demo": frozenset({"model", "methods", "num_compared", "differences"}),
    "grid": frozenset({"cells", "engines", "overall", "targets"}),
    "rollback": frozenset({"centre", "metadata", "payload", "targets"}),
    "steps": frozenset({"baseline", "contenders", "identical_texts", "options"}),
    "crossing": frozenset({"contenders", "identical_texts", "options"}),
    "drafting": frozenset({"cells", "contenders", "identical_texts", "options"}),
    "off": frozenset({"cells", "identical_texts", "options"}),
    "host": frozenset({"cells", "parts", "options"}),
    "replay": frozenset({"runs", "costs", "targets"}),
    "held-out": frozenset({"summaries", "differences", "scores"}),
    "vocab build": frozenset({"vocab_size", "token_ids", "counts", "num_counted"}),
    "vocab compare": frozenset({"rounds", "in_domain", "other_domain", "num_rows"}),
}
"""Keys of each kind; where several fit, the one with the most is meant."""
COMMANDS = (
    "`vllm-mtp eval`, `compare`, `plan`, `doctor --json`, `verify`, `soak`, "
    "`demo --json`, `vocab build` or `python -m benchmarks`"
)
JOURNAL_SUFFIXES = (".jsonl", ".partial")


class DamagedError(ConfigError):
    """A file has the keys of a result, but not what belongs there."""


@dataclass(frozen=True)
class Source:
    """A result.

    Attributes:
        path: Of the file.
        name: Short, and different from those of the other files.
        kind: Of `KEYS`.
        content: What the file holds.
    """

    path: Path
    name: str
    kind: str
    content: Mapping[str, Any]


def read_sources(paths: Sequence[Path]) -> list[Source]:
    """Read all results; a file that is named twice counts once.

    Raises:
        ConfigError: No file is given, or one cannot be read or is no result.
    """
    if not paths:
        raise ConfigError(f"result: no file is given; must be what {COMMANDS} wrote")
    by_file: dict[str, Path] = {}
    for path in paths:
        by_file.setdefault(os.path.realpath(path), path)
    once = list(by_file.values())
    names = short_names(once)
    return [_read(path, name) for path, name in zip(once, names, strict=True)]


def _read(path: Path, name: str) -> Source:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refusal(path, f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise _refusal(path, "is not a text") from None
    except (ValueError, RecursionError):
        raise _refusal(path, _why_not_json(path)) from None
    kind = kind_of(content)
    if kind is None:
        raise _refusal(path, "is JSON, but no result of ours")
    return Source(path, name, kind, content)


def _refusal(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"result: {path} {problem}; must be what {COMMANDS} wrote")


def damaged(sources: Sequence[Source], error: Exception) -> DamagedError:
    """What to raise for results that cannot be shown.

    Args:
        sources: Of a section.
        error: What it was.
    """
    paths = ", ".join(str(source.path) for source in sources)
    if isinstance(error, ValidationError):
        what = first_problem(error)
    else:
        words = str(error).partition("\n")[0] or type(error).__name__
        what = f"there is no {words}" if isinstance(error, KeyError) else words
    return DamagedError(
        f"result: {paths} is damaged or of another version ({what}); must be what "
        f"{COMMANDS} of this version wrote"
    )


def _why_not_json(path: Path) -> str:
    if path.suffix in JOURNAL_SUFFIXES:
        return "is a journal, from which the same command makes the result (.json)"
    return "is not JSON"


def kind_of(content: object) -> str | None:
    """Which command wrote something, by its keys; None for none of ours."""
    if not isinstance(content, dict):
        return None
    fitting = [kind for kind, keys in KEYS.items() if keys <= content.keys()]
    return max(fitting, key=lambda kind: len(KEYS[kind]), default=None)


def short_names(paths: Sequence[Path]) -> list[str]:
    """As few of the last parts of each path as tell it from the others."""
    absolute = [path.absolute() for path in paths]
    return [_short_name(path, absolute) for path in absolute]


def _short_name(path: Path, all_paths: Sequence[Path]) -> str:
    for number in range(1, len(path.parts)):
        tail = path.parts[-number:]
        if sum(other.parts[-number:] == tail for other in all_paths) == 1:
            return "/".join(tail)
    return str(path)

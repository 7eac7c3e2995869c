"""The training corpus: Python's own standard library.

It is on every machine that can run this project, its licence allows it, and
it is real text with a long tail of rare tokens. Files, not lines, are held
out, by a hash of their name, so that the split stays the same when files are
added and no held-out function has its neighbour in the training half.
"""

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

MAX_FILE_BYTES = 400_000

# Why each is left out: installed packages are not the standard library; the
# bundled wheels and test data are not all valid Python; build records name
# paths of the machine on which the interpreter was built.
_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "data", "_bundled"}
)
_EXCLUDED_PREFIXES = ("_sysconfigdata", "bad_", "badsyntax")


class SourceFile(NamedTuple):
    """One file of the corpus.

    Attributes:
        name: Path relative to the corpus root, with forward slashes.
        text: Content, decoded as UTF-8.
    """

    name: str
    text: str


class CorpusSplit(NamedTuple):
    """Files to train on, and files that training never sees."""

    train: list[SourceFile]
    held_out: list[SourceFile]


def standard_library_root() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def _is_wanted(relative: Path) -> bool:
    if _EXCLUDED_FOLDERS.intersection(relative.parts[:-1]):
        return False
    return not relative.name.startswith(_EXCLUDED_PREFIXES)


def collect_sources(root: Path) -> list[SourceFile]:
    """Reads every usable `.py` file under `root`, sorted by name.

    Files that are empty, larger than `MAX_FILE_BYTES`, not UTF-8, or equal to
    an earlier file are left out: an equal file on both sides of the split
    would leak.

    Raises:
        ValueError: If `root` is no folder or holds no usable file.
    """
    if not root.is_dir():
        raise ValueError(f"corpus: {root} is not a folder; expected Python sources")
    files: list[SourceFile] = []
    seen: set[str] = set()
    relative_paths = (path.relative_to(root) for path in root.rglob("*.py"))
    for relative in sorted(relative_paths, key=lambda path: path.as_posix()):
        if not _is_wanted(relative):
            continue
        content = (root / relative).read_bytes()
        if not content.strip() or len(content) > MAX_FILE_BYTES:
            continue
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text not in seen:
            seen.add(text)
            files.append(SourceFile(relative.as_posix(), text))
    if not files:
        raise ValueError(f"corpus: {root} holds no usable .py file")
    return files


def is_held_out(name: str, held_out_permille: int) -> bool:
    """Whether a file is held out. Depends on its name alone."""
    digest = hashlib.sha256(name.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < held_out_permille


def split_by_file(
    files: Sequence[SourceFile], held_out_permille: int = 30
) -> CorpusSplit:
    """Splits files into a training half and a held-out half.

    Args:
        files: The corpus.
        held_out_permille: Share of files to hold out, in thousandths.

    Raises:
        ValueError: If the share is not within 1..999 or a half comes out empty.
    """
    if not 1 <= held_out_permille <= 999:
        raise ValueError(f"held_out_permille: {held_out_permille} is not within 1..999")
    split = CorpusSplit([], [])
    for file in files:
        held_out = is_held_out(file.name, held_out_permille)
        (split.held_out if held_out else split.train).append(file)
    if not split.train or not split.held_out:
        raise ValueError(
            f"corpus: {len(files)} files leave one half of the split empty; "
            "expected at least one file to train on and one to hold out"
        )
    return split


def corpus_hash(files: Iterable[SourceFile]) -> str:
    """SHA-256 over names and contents, in the given order."""
    digest = hashlib.sha256()
    for file in files:
        for part in (file.name, file.text):
            encoded = part.encode("utf-8")
            digest.update(len(encoded).to_bytes(8, "big"))
            digest.update(encoded)
    return digest.hexdigest()

"""What a server has learned, in a file that the next one starts from.

A file belongs to one model, one set of options and one kind of hardware (`identity`),
and is named after them, so servers of all kinds may share a folder. It is replaced
whole, by whoever writes last; a file that cannot be used is ignored with one line in
the log, and the server starts cold. Nothing in it is run: it is JSON, checked field by
field, and at most `MAX_STATE_BYTES` are read.
"""

import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from vllm.logger import init_logger

from vllm_mtp.config import ConfigError

# Below "vllm", so that its log settings apply to our lines, too.
logger = init_logger("vllm.mtp_plus")

MAX_STATE_BYTES = 2**20
"""Of a file: 48 sizes of batch at K_max = 16 take a third of it."""
SAVE_PERIOD_S, MIN_NEW_STEPS = 10.0, 64
"""Between two writes, both. A server that is killed loses what it learned since."""
STALE_S = 600.0
"""Age of what a writer that was killed has left."""
LAST_SAVE_TIMEOUT_S = 5.0
"""Storage that does not answer must not keep a server from ending."""


class State(BaseModel):
    """What a file holds; subclasses add fields. No number is infinite or NaN."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    identity: dict[str, str]


Content = TypeVar("Content", bound=State)


class StateFile(Generic[Content]):
    """One file of a shared folder."""

    def __init__(
        self, folder: Path, name: str, kind: type[Content], identity: dict[str, str]
    ) -> None:
        """Name the file; nothing is read or written.

        Args:
            folder: It may be missing: the first write makes it.
            name: Of the file.
            kind: What it holds.
            identity: What the state belongs to.
        """
        self.path = folder / name
        self._kind, self._identity = kind, identity
        self._next_save_s, self._next_save_steps = 0.0, MIN_NEW_STEPS
        self._writer: threading.Thread | None = None

    def read(self) -> Content | None:
        """What is in the file, if it is there and belongs to this server."""
        try:
            return self._checked(self._bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "file"
            self.ignore(f"{where}: {first['msg']}")
        except OSError as error:
            self.ignore(error.strerror or "cannot be read")
        except ValueError as error:
            self.ignore(str(error))
        return None

    def _bytes(self) -> bytes:
        with self.path.open("rb") as file:
            text = file.read(MAX_STATE_BYTES + 1)
        if len(text) > MAX_STATE_BYTES:
            raise ValueError(f"has more than {MAX_STATE_BYTES} bytes")
        return text

    def _checked(self, text: bytes) -> Content:
        content = self._kind.model_validate_json(text)
        if content.identity != self._identity:
            raise ValueError("is of another model, options or hardware")
        return content

    def ignore(self, reason: str) -> None:
        """Say why the server starts cold."""
        logger.warning("mtp_plus starts cold: %s: %s", self.path, reason)

    def save_if_due(self, num_steps: int, take: Callable[[], Content]) -> None:
        """Write, now and then, in a thread: storage may be slow.

        Args:
            num_steps: That something was learned from, since the start.
            take: What to write; called at once, if at all.
        """
        if num_steps < self._next_save_steps:
            return
        now_s = time.monotonic()
        if now_s < self._next_save_s or (self._writer and self._writer.is_alive()):
            return
        self._next_save_s = now_s + SAVE_PERIOD_S
        self._next_save_steps = num_steps + MIN_NEW_STEPS
        self.save(take())

    def save(self, content: Content) -> None:
        """Begin to write."""
        self._writer = threading.Thread(target=self._write, args=[content], daemon=True)
        self._writer.start()

    def wait(self) -> None:
        """Until it is written, for some seconds."""
        if self._writer is not None:
            self._writer.join(LAST_SAVE_TIMEOUT_S)

    def _write(self, content: Content) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            remove_stale(self.path)
            replace_file(self.path, content.model_dump_json().encode())
        except (OSError, ValueError) as error:
            logger.warning_once("mtp_plus cannot write %s: %s", self.path, str(error))


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; readers see the old one or the new one.

    Raises:
        OSError: The folder cannot be written to, or is full.
    """
    descriptor, pending = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # Temporary files are private; other replicas may run as other users.
        os.chmod(pending, 0o644)
        os.replace(pending, path)
    except BaseException:
        Path(pending).unlink(missing_ok=True)
        raise


def remove_stale(path: Path) -> None:
    """Remove what writers of a file have left that were killed meanwhile."""
    for pending in path.parent.glob(f".{path.name}.*"):
        with suppress(FileNotFoundError):  # another server removes it, too
            if time.time() - pending.stat().st_mtime > STALE_S:
                pending.unlink()


def check_folder(path: str) -> None:
    """Refuse a folder that is none, before an engine starts.

    Raises:
        ConfigError: There is a file of that name.
    """
    if Path(path).exists() and not Path(path).is_dir():
        raise ConfigError(
            f"speculative_config.warm_start_path={path!r} is not allowed: must be a "
            "folder, or a name that is free."
        )

"""Acceptance and step times: kept by the scheduler, for the next server."""

from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from vllm_mtp.control.controller import Controller
from vllm_mtp.control.goodput import GoodputController
from vllm_mtp.integration.load.settings import settings_of
from vllm_mtp.integration.warm_start import beliefs
from vllm_mtp.integration.warm_start.identity import file_name, identity_of
from vllm_mtp.integration.warm_start.state_file import StateFile

# Below "vllm", so that its log settings apply to our lines, too.
logger = init_logger("vllm.mtp_plus")


class KeptController:
    """What a controller has learned, in a file."""

    def __init__(
        self, controller: GoodputController, folder: Path, identity: dict[str, str]
    ) -> None:
        """Let the controller begin with what is there."""
        self._controller, self._identity = controller, identity
        name = file_name(identity, "controller")
        self._file = StateFile(folder, name, beliefs.ControllerState, identity)
        state = self._file.read()
        if state is None:
            return
        try:
            beliefs.restore(controller, state)
        except ValueError as error:
            self._file.ignore(str(error))
            return
        logger.info("mtp_plus starts warm: %s", self._file.path)

    def save_if_due(self) -> None:
        """Called where steps are delivered."""
        self._file.save_if_due(self._controller.cost._num_steps, self._take)

    def close(self) -> None:
        """The engine ends."""
        if self._controller.cost._num_steps:
            self._file.save(self._take())
            self._file.wait()

    def _take(self) -> beliefs.ControllerState:
        return beliefs.take(self._controller, self._identity)


def keep(controller: Controller, vllm_config: Any) -> KeptController | None:
    """Begin warm, and keep what is learned, where the user has named a folder.

    Args:
        controller: Just made.
        vllm_config: vLLM's.
    """
    path = settings_of(vllm_config).warm_start_path
    # A trace is written by a controller around the one that decides.
    deciding = getattr(controller, "controller", controller)
    if path is None or not isinstance(deciding, GoodputController):
        return None
    return KeptController(deciding, Path(path), identity_of(vllm_config))

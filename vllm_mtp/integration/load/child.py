"""Answers a question in a forked child: what it imports and changes goes with it."""

import logging
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

TIMEOUT_S = 120.0

Answer = TypeVar("Answer")


def in_child(ask: Callable[[], Answer]) -> Answer | str:
    """Answer something in a forked child.

    Returns:
        Why there is no answer, where there is none.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_send_answer, args=(sender, ask), daemon=True)
    try:
        child.start()
    except (AssertionError, OSError) as error:
        # A daemonic process may have no children.
        return f"no process can be started: {error}"
    sender.close()
    try:
        if not receiver.poll(TIMEOUT_S):
            return f"no answer in {TIMEOUT_S:.0f} s"
        answer: Answer | str = receiver.recv()
        return answer
    except EOFError:
        return "the process that should have answered has ended"
    finally:
        child.kill()
        child.join()


def _send_answer(sender: Connection, ask: Callable[[], Any]) -> None:
    # What vLLM logs here the engine logs, too.
    logging.disable()
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    torch.set_num_threads(1)  # threads do not survive a fork
    try:
        answer = ask()
    except Exception as error:
        answer = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    sender.send(answer)

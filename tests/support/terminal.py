"""Processes as a terminal starts them."""

import signal


def hear_ctrl_c() -> None:
    """For ``preexec_fn``: what a shell starts in the background ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

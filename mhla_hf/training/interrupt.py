"""Ctrl-C during training."""

import signal
import threading
from typing import Any


class Interrupt:
    """Defers Ctrl-C in the main thread: the first one sets `requested`, the second one stops at once.

    If the block ends without an error after the first one, KeyboardInterrupt is raised then.
    """

    requested = False

    def __enter__(self) -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        self.previous_handler = signal.signal(signal.SIGINT, self._handle) if in_main_thread else None

    def __exit__(self, error_type: type[BaseException] | None, _error: Any, _traceback: Any) -> None:
        if self.previous_handler is not None:  # SIG_DFL is 0
            signal.signal(signal.SIGINT, self.previous_handler)
        if self.requested and error_type is None:
            raise KeyboardInterrupt("stopped; the run had just finished and is saved")

    def _handle(self, _number: int, _frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

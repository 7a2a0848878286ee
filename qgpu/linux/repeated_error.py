"""Operations that are tried again and again: an error is logged when it comes, and again only when it changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class RepeatedError:
    """The error of one such operation."""

    def __init__(self, log: Any, event: str, level: str = "error") -> None:
        """Log with ``log``, a structlog logger, under the name ``event``."""
        self._log, self._event, self._level = log, event, level
        #: The last try's error as text; empty if it succeeded.
        self.text = ""

    @contextmanager
    def logged(self, *kinds: type[Exception], **context: object) -> Iterator[None]:
        """Try once; errors of these kinds are logged, with ``context``, and go no further."""
        try:
            yield
        except kinds as error:
            if str(error) != self.text:
                getattr(self._log, self._level)(self._event, error=str(error), **context)
            self.text = str(error)
        else:
            self.text = ""

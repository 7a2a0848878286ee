"""How our programs end: an error is one line on stderr (what, where, remedy) and a documented exit code."""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from qgpu.errors import ExitCode, InvalidValueError, QgpuError, full

_N = TypeVar("_N")


class Directory(click.Path):
    """A directory's path. Rejects an empty path, as from an unset variable: it means the current directory."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read it."""
        if value == "":
            self.fail("it is empty", param, ctx)
        return super().convert(value, param, ctx)


class IntRange(click.IntRange):
    """A whole number within bounds; help and errors call it an integer."""

    name = "integer"


class Seconds(click.FloatRange):
    """Seconds within bounds, named in the error. Rejects "nan", which click's own range accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert a value; fail with a usage error."""
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not float(self.min or 0) <= seconds <= float(self.max or math.inf):
            self.fail(f"'{value}' is not a number of seconds from {self.min:g} to {self.max:g}", param, ctx)
        return seconds


class Quantity(click.ParamType[_N]):
    """A quantity with its unit, such as 16GiB. ``read`` converts text; a number stays as it is."""

    def __init__(self, name: str, read: Callable[[str], _N]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> _N:
        """Convert a value; fail with a usage error."""
        try:
            found: _N = self._read(value) if isinstance(value, str) else value
            return found
        except InvalidValueError as error:
            self.fail(str(error), param, ctx)


#: Where examples begin in a help text.
EXAMPLES = "Examples:"


def show_examples(command: click.Command, lines: Sequence[str]) -> None:
    """Append examples to a command's help, each on a line of its own."""
    command.help = "\n".join(
        (f"{inspect.cleandoc(command.help or '')}\n\n\b", EXAMPLES, *(f"  {line}" for line in lines))
    )


def run(name: str, command: click.Command) -> None:
    """Run a command with this process's arguments. If it fails, exit with its error line and code."""
    output = sys.stdout
    try:
        command.main(prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        where = context.command_path if context is not None else name
        _end(where, f"{' '.join(error.format_message().split()).rstrip('.')}; see {where} --help", error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(ExitCode.INTERRUPTED)
    except QgpuError as error:
        _end(name, str(error), error.code)
    except BrokenPipeError:  # the reader of our output has closed it
        _forget_output()
        sys.exit(ExitCode.BROKEN_PIPE)
    except SystemExit:
        if sys.stdout is not output:  # click found the output closed, and put another in its place
            _forget_output()
            sys.exit(ExitCode.BROKEN_PIPE)
        raise
    except OSError as error:  # the output's disk is full, or no descriptor is left
        _forget_output()
        place = error.filename or ("standard output" if full(error) else None)
        _end(name, ": ".join(str(part) for part in (place, error.strerror or error) if part), ExitCode.FAILED)


def _forget_output() -> None:
    """Discard unwritten output. Otherwise the interpreter would retry at exit and report the failure."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end(where: str, line: str, code: int) -> None:
    click.echo(f"{where}: {' '.join(line.splitlines())}", err=True)  # an argument may have several
    sys.exit(code)

"""All errors. Nothing heavy is imported here, so that the command line starts fast.

The error tree:

    TesttimeError            something failed at run time (exit code 1)
    ├── Interrupted          stopped by Ctrl-C (exit code 130)
    └── InputError           the input or the options are wrong (exit code 2)
        ├── UnknownName      no method, encoder, dataset or setting of that name
        ├── SettingError     a setting's value is out of its range
        ├── FeatureError     features or a feature file that cannot be used
        ├── ImageError       an image that cannot be read
        ├── StateError       a saved session that does not fit
        └── MissingPart      an extra, a checkpoint or a capability that is missing
"""

from __future__ import annotations

UNENCODABLE = "backslashreplace"  # error handler for writing file names that are not UTF-8


class TesttimeError(Exception):
    """Something failed at run time."""

    exit_code = 1


class Interrupted(TesttimeError):
    """Stopped by Ctrl-C; the message says what was saved and how to resume."""

    exit_code = 130


class InputError(TesttimeError):
    """The input or the options are wrong; the message names the value and how to fix it."""

    exit_code = 2


class UnknownName(InputError):
    """No method, encoder, dataset or setting of that name."""


class SettingError(InputError):
    """A setting's value is out of its range."""


class FeatureError(InputError):
    """Features, or a feature file, that cannot be used."""


class ImageError(InputError):
    """An image that cannot be read."""


class StateError(InputError):
    """A saved session that does not fit this task, or cannot be read."""


class MissingPart(InputError):
    """An extra, a checkpoint or a capability that is missing."""

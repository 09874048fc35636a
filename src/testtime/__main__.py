"""`testtime`, and `python -m testtime`."""

import sys


def main() -> None:
    """The command line; an interrupt while it is loading ends it without a traceback."""
    try:
        from testtime.cli.app import main as command
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()

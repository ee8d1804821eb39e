"""What a rank's program expects to fail."""


def caught(kind, act, *arguments):
    """The exception of this kind that `act` raises."""
    try:
        act(*arguments)
    except kind as error:
        return error
    raise AssertionError(f"{act} has raised no {kind}")

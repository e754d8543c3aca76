"""What commands print."""


def say(text: str) -> None:
    """One piece of a report, at once: a run takes minutes."""
    print(text, flush=True)  # noqa: T201 -- what a command says

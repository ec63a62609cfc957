"""Stages named on the command line."""

from __future__ import annotations

from headrace.topics import STAGES, Stage


def parse_stages(text: str) -> tuple[Stage, ...]:
    """Parse adjacent stages in the order in which a request passes them, as in `batcher,executor`.

    Raises:
        ValueError: an unknown stage, a repeated one, or stages that are not adjacent and in order.
    """
    names = [name.strip() for name in text.split(",")]
    path = [stage.value for stage in STAGES]
    for name in names:
        if name not in path:
            raise ValueError(f"expected stages out of {', '.join(path)}, got {name!r}")
    first = path.index(names[0])
    if names != path[first : first + len(names)]:
        raise ValueError(
            f"expected adjacent stages in the order of {', '.join(path)}, each once, "
            f"got {', '.join(names)}"
        )
    return STAGES[first : first + len(names)]

"""Dead letters: requests that failed permanently, and tools to show and redrive them.

- `dead_letter`: parsing, selection and formatting
- `reading`: the dead letters of a topic, up to its current end
- `copies`: the request made from a dead letter, and a user's transform of it
- `redrive`: sending dead letters as requests, each at most once
- `redrive_state`: the record of what was redriven
"""

from headrace.tools.dead_letters.dead_letter import DeadLetter, DeadLetterSelection
from headrace.tools.dead_letters.reading import read_dead_letters
from headrace.tools.dead_letters.redrive import Redrive, RedriveJob, RedriveResult

__all__ = [
    "DeadLetter",
    "DeadLetterSelection",
    "Redrive",
    "RedriveJob",
    "RedriveResult",
    "read_dead_letters",
]

"""Dead letters: requests that failed permanently as they were, and tools to redrive them.

- `letter`: parsing and selection of letters;
- `reading`: the letters of a topic, up to its current end;
- `showing`: a letter as text, and as data for files;
- `copies`: the request made from a letter;
- `remembering`: the record of redriven letters;
- `redriving`: sending letters as requests, each at most once.
"""

from headrace.tools.dead_letters.letter import Letter, Selection, parse_letter
from headrace.tools.dead_letters.reading import read_letters
from headrace.tools.dead_letters.redriving import Order, Redrive, Tally

__all__ = [
    "Letter",
    "Order",
    "Redrive",
    "Selection",
    "Tally",
    "parse_letter",
    "read_letters",
]

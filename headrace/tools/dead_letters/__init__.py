"""Dead letters: requests that could not succeed as they were, and how they get a second chance.

- `letter`: what one says of itself, and which ones are meant;
- `reading`: the letters of a topic, up to where it ends now;
- `showing`: a letter for people, and for files;
- `copies`: the request that is made of a letter;
- `remembering`: which letters were redriven already;
- `redriving`: sending them, each at most once.
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

"""Words, names and sentences to fill sample files with."""

from __future__ import annotations

from random import Random


def _listed(words: str) -> tuple[str, ...]:
    return tuple(words.split())


NOUNS = _listed(
    "account address archive battery branch bridge budget cable calendar camera channel client "
    "column contract customer device district engine field filter forest garden gauge harbour "
    "invoice journal ledger library machine market meter mirror network number office "
    "packet parcel pipeline platform pressure process product profile queue record region "
    "report river sample schedule sensor server signal station storage student supplier "
    "ticket timer tower track turbine valve vehicle village voltage warehouse window worker"
)
VERBS = _listed(
    "accept adjust build cancel check clear close collect compare convert copy count deliver "
    "encode fetch find format group join load measure merge move notify open parse print "
    "publish read refresh remove render repair reset resolve schedule search select send sort "
    "split start store submit trace transfer update validate verify write"
)
ADJECTIVES = _listed(
    "active annual blue careful central cold common daily deep early empty exact fast final "
    "fresh green heavy hidden large late local long narrow new old open partial plain quiet "
    "recent remote round short single slow small spare stable strong upper warm weekly wide"
)
FIRST_NAMES = _listed(
    "Ada Bruno Carla Daniel Edith Farid Greta Hugo Ines Jonas Karin Leo Mara Nils Olga Pavel "
    "Rosa Simon Tessa Ursula Viktor Wanda Yusuf Zoe"
)
LAST_NAMES = _listed(
    "Adler Berger Castro Dietz Ekström Fischer Garcia Haas Ivanova Jensen Keller Lindt Moreau "
    "Novak Okafor Petit Quiroga Rossi Silva Tanaka Urban Varga Weber Yilmaz Zimmer"
)


class Words:
    """Draws words from a seeded source."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def noun(self) -> str:
        return self.random.choice(NOUNS)

    def nouns(self, count: int) -> list[str]:
        """Return different nouns."""
        return self.random.sample(NOUNS, count)

    def verb(self) -> str:
        return self.random.choice(VERBS)

    def adjective(self) -> str:
        return self.random.choice(ADJECTIVES)

    def person(self) -> str:
        return f"{self.random.choice(FIRST_NAMES)} {self.random.choice(LAST_NAMES)}"

    def number(self, low: int = 0, high: int = 1000) -> int:
        return self.random.randint(low, high)

    def amount(self) -> float:
        return round(self.random.uniform(0.5, 950), 2)

    def date(self) -> str:
        """Return a day of the form 2024-03-17."""
        return f"{self.number(2019, 2025)}-{self.number(1, 12):02}-{self.number(1, 28):02}"

    def title(self) -> str:
        return f"{self.adjective()} {self.noun()} {self.noun()}".capitalize()

    def sentence(self) -> str:
        forms = (
            f"the {self.adjective()} {self.noun()} must {self.verb()} each {self.noun()} before "
            f"the {self.noun()} can {self.verb()} it",
            f"{self.person()} will {self.verb()} the {self.noun()} of the {self.adjective()} "
            f"{self.noun()} on {self.date()}",
            f"every {self.noun()} has {self.number(2, 90)} {self.adjective()} {self.noun()}s, "
            f"which {self.verb()} the {self.noun()}",
            f"after the {self.noun()} was {self.adjective()}, we had to {self.verb()} and "
            f"{self.verb()} {self.number(2, 50)} of them again",
        )
        text = self.random.choice(forms)
        return f"{text[0].upper()}{text[1:]}."

    def paragraph(self, sentences: int = 4) -> str:
        return " ".join(self.sentence() for _ in range(sentences))

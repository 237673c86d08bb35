"""The words of the built-in workloads, written for this project: a coding assistant, a chat, four documents."""

from __future__ import annotations

CODING_SYSTEM = '''You are the coding assistant of a small team that maintains a bicycle rental service. Answer in short, plain
sentences. When code has to change, name the file and the function, say what is wrong, and propose the smallest edit.
Never invent functions that are not shown below. Amounts are whole cents, times are UTC, identifiers are strings.

House rules of the repository:
1. Public functions have type hints and a docstring of one or two lines.
2. Errors that a customer can cause raise RentalError with a message that can be shown to the customer.
3. A module under storage/ may not import a module under web/.
4. Prices are computed in pricing.py and nowhere else.
5. Tests live beside the module and are named test_<module>.py.

File: storage/bikes.py

"""Where the bikes are, and who has them."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta


class RentalError(Exception):
    """A customer asked for something that is not possible right now."""


@dataclass
class Bike:
    """One bike. `rider` is the customer who has it, or None while it stands at `station`."""

    number: str
    station: str
    rider: str | None = None
    since: datetime | None = None
    kilometres: int = 0
    faults: list[str] = field(default_factory=list)


class Fleet:
    """All bikes by number. A bike is either at a station or with a rider, never both."""

    def __init__(self) -> None:
        self._bikes: dict[str, Bike] = {}

    def add(self, bike: Bike) -> None:
        if bike.number in self._bikes:
            raise ValueError(f"bike {bike.number} is already registered")
        self._bikes[bike.number] = bike

    def free_at(self, station: str) -> list[Bike]:
        """Bikes that can be taken at a station, the least used first."""
        found = [b for b in self._bikes.values() if b.station == station and b.rider is None and not b.faults]
        return sorted(found, key=lambda b: b.kilometres)

    def take(self, number: str, rider: str, now: datetime) -> Bike:
        """Hand a bike to a rider."""
        bike = self._bikes[number]
        if bike.rider is not None:
            raise RentalError("This bike has just been taken. Please choose another one.")
        if bike.faults:
            raise RentalError("This bike is waiting for repair.")
        bike.rider, bike.since = rider, now
        return bike

    def bring_back(self, number: str, station: str, kilometres: int, now: datetime) -> timedelta:
        """Return a bike; gives back how long it was away."""
        bike = self._bikes[number]
        if bike.rider is None or bike.since is None:
            raise RentalError("This bike was not rented.")
        away = now - bike.since
        bike.station, bike.rider, bike.since = station, None, None
        bike.kilometres += kilometres
        return away

    def report_fault(self, number: str, text: str) -> None:
        self._bikes[number].faults.append(text.strip())

File: pricing.py

"""What a ride costs, in cents."""

from datetime import timedelta

START_FEE = 100
PER_MINUTE = 15
DAY_LIMIT = 1900
MEMBER_FREE_MINUTES = 30


def price(away: timedelta, member: bool = False) -> int:
    """Cents for one ride. Started minutes count in full, and a day never costs more than the limit."""
    minutes = -(-int(away.total_seconds()) // 60)
    if member:
        minutes = max(0, minutes - MEMBER_FREE_MINUTES)
        start = 0
    else:
        start = START_FEE
    days, rest = divmod(minutes, 24 * 60)
    return days * DAY_LIMIT + min(DAY_LIMIT, start + rest * PER_MINUTE)
'''

CODING_QUESTIONS = (
    "A rider brought a bike back to a station that does not exist, and nothing complained. "
    "Which function should check this, and which error should it raise for the customer?",
    "In pricing.py, what does a member pay for a ride of twenty-five minutes, and what does a guest pay for the same ride? "
    "Show the two sums.",
    "Bikes with a reported fault never come back to the street. "
    "Propose a method for the Fleet class that marks a bike as repaired, with a docstring.",
    "What happens when two riders try to take the same bike within one second, "
    "and which line of storage/bikes.py decides who gets it?",
    "Write a short test for the function price that fails if started minutes are no longer counted in full. Name the file it belongs to.",
)

CHAT_SYSTEM = (
    "You help people who grow vegetables on a small balcony. Be friendly and practical, and keep each answer to two "
    "or three sentences. If you are not sure, say so."
)

CHAT_TURNS = (
    "Hi! My balcony is two metres wide and faces south. What could I plant in May if I have never grown anything before?",
    "Tomatoes sound good. How large does the pot have to be, and how many plants fit along one railing?",
    "I am away every second weekend. How do I keep them from drying out in July?",
    "The lower leaves of one plant are turning yellow, but the top looks healthy. Should I worry?",
    "My neighbour says basil keeps insects away when it grows next to tomatoes. Is that true?",
    "Please put everything we decided into a short shopping list, with amounts.",
)

RAG_SYSTEM = "Answer the question from the documents below. If they do not hold the answer, say that you do not know."

RAG_DOCUMENTS = (
    "Document A: Opening of the observatory. The observatory on Fennel Hill opens to the public on every clear Friday "
    "from September to April. The dome is unheated, so visitors should bring warm clothes; blankets can be borrowed at "
    "the desk. The evening starts with a talk of twenty minutes in the lecture room, after which groups of twelve go up "
    "to the telescope one after another. Children under six may look through the small refractor on the terrace, but are "
    "not allowed on the stairs of the dome. When clouds come up after the start of an evening, the tickets stay valid "
    "until the end of the season. Tickets cost nine for adults and four for pupils. The car park closes at midnight, and "
    "the last bus down to the town leaves the gate at a quarter past eleven.",
    "Document B: The large telescope. The main instrument is a reflector with a mirror of eighty centimetres, built in "
    "1961 by the workshop of the local technical school. The mirror was coated again in 2009 and in 2021, each time by a "
    "firm in the next valley, and the drive was replaced by two motors that are steered from the desk below. On a night "
    "of average air the instrument separates stars that are one second of arc apart. A camera can be fixed behind the "
    "mirror, but only members who have passed the evening course may do so. The dome turns on twenty-four rubber wheels, "
    "of which at least four have to be changed each spring. A spare motor is kept in the cellar behind the lecture room.",
    "Document C: Becoming a member. Anyone above fourteen can join the society that runs the observatory. The yearly fee "
    "is sixty, or thirty for students, and has to be paid before the end of February. Members may use the two portable "
    "telescopes for a week at a time and get the quarterly paper by post. After the evening course, which is held on five "
    "Tuesdays in October and November, a member can apply for a key to the dome. The board decides on each key in its "
    "January meeting. Members give at least two evenings a year at the desk or as guides; whoever cannot do so may help "
    "with the garden instead. A member who leaves during the year does not get the fee back.",
    "Document D: Visits of schools. Schools can book the observatory on weekday mornings. A visit takes two hours and "
    "holds at most thirty pupils with two teachers. In the first hour the class builds a sundial or a simple spectroscope "
    "in the lecture room; in the second it sees the dome and, when the sky is clear, the sun through a filter. The price is "
    "ninety for a class, with all material included. Bookings are made by telephone at least three weeks ahead, and a "
    "class that does not come without notice pays half. Schools from the county pay nothing in the week before the "
    "summer holidays. Lunch can be eaten on the terrace, but there is no kitchen.",
)

RAG_REQUESTS = (
    ((0, 1, 2, 3), "May a child of five look through a telescope, and through which one?"),
    ((2, 0, 3, 1), "When does a new member who has finished the course learn whether there will be a key?"),
    ((0, 1, 3, 2), "What happens to my ticket when clouds come up after the evening has begun?"),
    ((2, 0, 1, 3), "Does a member who leaves in June get a part of the fee back?"),
    ((0, 1, 2, 3), "In which years did the large mirror get a new coating?"),
    ((3, 2, 1, 0), "How much does a class pay that does not come without notice?"),
)
"""(order of the documents, question). Orders come back in part or in full, as they do behind a retriever."""

CONCURRENT_SYSTEM = (
    "You write short notes for the visitors of a lighthouse museum. Each note is friendly, names one object, and ends with "
    "a question that makes the reader look again. The museum has three floors. On the ground floor stand the fog bell, the "
    "oil store and the keeper's bicycle. On the first floor there are the log books from 1874 to 1968, a brass barometer, "
    "two oilskin coats and a letter from a rescued captain. On the second floor visitors see the spare lens, the clockwork "
    "that turned it, and a telephone with a crank. The lamp room above is open on calm days only. Do not mention prices, do "
    "not promise guided tours, and never say that an object may be touched. A note must be understood by a child of ten and "
    "must not bore a sailor. Write numbers below twelve as words. Use the past tense for the people and the present tense "
    "for the things. If a visitor's remark names an object that the museum does not have, write about the nearest object "
    "that it has, and do not correct the visitor. If the remark is empty, write about the fog bell. Notes are printed on "
    "cards of postcard size, so nothing but the note itself may be written: no title, no greeting, no signature. The "
    "museum is run by volunteers, and the island has no shop; the ferry leaves at four."
)

CONCURRENT_REMARKS = (
    "We came with the first ferry and stood in front of the barometer for a long time, because my daughter thought it was a clock.",
    "My grandfather rode a bicycle like that one to the post office of our village, in any weather, until he was seventy.",
    "What a heavy bell! I wonder who rang it when the keeper was ill, and whether they heard it on the other side of the bay.",
    "I read three pages of the log book of 1911 and now I would like to know what became of the dog they kept writing about.",
    "The stairs were steep, but the lens at the top of them was worth every step; it looked like a glass beehive to me.",
    "Somebody should write a story about the captain's letter; the last line of it made all of us quiet for a moment.",
    "Is the telephone with the crank still connected to anything, or is it only there to make children turn the handle?",
    "The oilskin coats smell of tar even behind the glass, or perhaps I only remember the smell from my uncle's boat.",
)

DATA_QUESTIONS = (
    "Say in two sentences what this text is about.",
    "Which part of it would you read first if you had to find a mistake, and why?",
    "Name the three most important names in the text and what each of them stands for.",
    "What is the last thing that happens in the text?",
    "Which question does the text leave open?",
)
"""Asked over texts from the data folder that come without questions of their own."""

"""Made-up word problems: short stories about amounts, prices, rates and shares, put together from word lists."""

from __future__ import annotations

import random

NAMES = (
    "Adam", "Aisha", "Alex", "Amara", "Anna", "Ben", "Bella", "Carlos", "Carmen", "Chloe", "Dana", "Daniel", "David",
    "Diego",
    "Elena", "Ella", "Emma", "Ethan", "Fatima", "Felix", "Gabriel", "Grace", "Hannah", "Hassan", "Henry", "Ian",
    "Ines", "Isaac",
    "Jack", "Jamal", "Jane", "Jenny", "John", "Jorge", "Julia", "Kai", "Karen", "Kevin", "Laura", "Leo", "Lily",
    "Lucas", "Luna",
    "Maria", "Mark", "Maya", "Mei", "Mia", "Mohamed", "Nadia", "Nina", "Noah", "Olga", "Oliver", "Omar", "Paul",
    "Peter", "Priya",
    "Rachel", "Ravi", "Rosa", "Ruth", "Sam", "Sara", "Sofia", "Tariq", "Thomas", "Tina", "Tom", "Uma", "Victor",
    "Wei", "Yara",
    "Yusuf", "Zoe", "Mr. Brown", "Mrs. Lopez", "Ms. Kim", "Grandma", "The coach", "The teacher", "A shopkeeper",
)  # fmt: skip
OPENING_VERBS = (
    "has", "bought", "buys", "sells", "sold", "is", "was", "wants to", "went to", "works", "earns", "makes", "baked",
    "collects",
    "runs", "drives", "reads", "spends", "saved", "needs", "plays", "planted", "picked", "is making", "is planning",
    "decided to",
    "and", "gave", "can", "walks", "owns", "ordered", "found", "started", "takes", "studies", "gets", "invited",
    "weighs", "eats",
)  # fmt: skip
THINGS = (
    "apples", "oranges", "marbles", "stickers", "books", "pencils", "cookies", "cupcakes", "shells", "stamps",
    "coins", "cards",
    "flowers", "eggs", "balloons", "toy cars", "candles", "bracelets", "magnets", "buttons", "photos", "plants",
    "tickets",
    "sandwiches", "muffins", "ribbons", "beads", "stones", "crayons", "notebooks", "pears", "carrots", "postcards",
    "lemons",
)  # fmt: skip
GOODS = (
    ("notebook", "notebooks"), ("pen", "pens"), ("shirt", "shirts"), ("hat", "hats"), ("mug", "mugs"), ("pizza",
    "pizzas"),
    ("ticket", "tickets"), ("lamp", "lamps"), ("chair", "chairs"), ("bag of rice", "bags of rice"),
    ("bottle of juice", "bottles of juice"),
    ("toy", "toys"), ("plate", "plates"), ("candle", "candles"), ("scarf", "scarves"), ("cake", "cakes"), ("ball",
    "balls"),
    ("box of tea", "boxes of tea"), ("pair of socks", "pairs of socks"), ("poster", "posters"), ("battery",
    "batteries"),
)  # fmt: skip
GAINS = (
    "{who} finds {n} more", "{who} buys {n} more", "A friend gives {who} {n} more", "{who} wins {n} at the fair",
    "{who} makes {n} more", "The next day {who} gets {n} more", "{who}'s uncle sends {n} more",
    "{who} then picks up another {n}",
)  # fmt: skip
LOSSES = (
    "{who} gives {n} to a neighbor", "{who} loses {n}", "{who} uses {n} for a project", "{who} sells {n}",
    "{who} gives away {n}",
    "{n} of them break", "{who} shares {n} with classmates", "{who} puts {n} aside for later",
)  # fmt: skip
ASKS = (
    "How many {things} does {who} have now?", "How many {things} does {who} have left?",
    "How many {things} are there in the end?",
    "What is the total number of {things} that {who} has?", "How many {things} does {who} have at the end of the day?",
)  # fmt: skip


def _ledger(rng: random.Random) -> str:
    """A starting amount and one to four changes."""
    who, things = rng.choice(NAMES), rng.choice(THINGS)
    amount = rng.randint(8, 150)
    parts = [rng.choice((f"{who} has {amount} {things}.", f"{who} starts the week with {amount} {things}."))]
    for _ in range(rng.randint(1, 4)):
        if rng.random() < 0.5 or amount < 6:
            n = rng.randint(2, 60)
            parts.append(rng.choice(GAINS).format(who=who, n=n) + ".")
            amount += n
        else:
            n = rng.randint(1, amount - 2)
            parts.append(rng.choice(LOSSES).format(who=who, n=n) + ".")
            amount -= n
    return " ".join([*parts, rng.choice(ASKS).format(who=who, things=things)])


def _shopping(rng: random.Random) -> str:
    who = rng.choice(NAMES)
    picks = [(rng.randint(2, 9), *good, rng.randint(2, 30)) for good in rng.sample(GOODS, rng.randint(2, 3))]
    listed = ", ".join(f"{n} {many} for ${price} each" for n, _, many, price in picks[:-1])
    n, _, many, price = picks[-1]
    total = sum(pick[0] * pick[3] for pick in picks)
    text = f"{who} buys {listed} and {n} {many} for ${price} each."
    paid = (total // 50 + 1) * 50
    return text + rng.choice(
        (
            f" How much does {who} spend in total?",
            f" {who} pays with ${paid}. How much change does {who} get?",
            f" There is a {rng.choice((5, 10, 20, 25))}% discount on the whole purchase. How much does {who} pay?",
            f" {who} had ${paid + rng.randint(1, 80)} at first. How much money is left?",
        )
    )


def _wages(rng: random.Random) -> str:
    who, rate, hours, days = rng.choice(NAMES), rng.randint(8, 40), rng.randint(2, 9), rng.randint(2, 6)
    base = f"{who} earns ${rate} an hour and works {hours} hours a day, {days} days a week."
    return base + rng.choice(
        (
            f" How much does {who} earn in {rng.randint(2, 8)} weeks?",
            f" {who} saves {rng.choice((10, 20, 25, 50))}% of the pay. How much does {who} save each week?",
            f" How many weeks does {who} need to work to afford a bicycle that costs ${rate * hours * days * 2}?",
            f" If every hour after the first {max(1, hours - 1)} is paid double, what is the weekly pay?",
        )
    )


def _distance(rng: random.Random) -> str:
    who, speed, hours = rng.choice(NAMES), rng.randint(3, 90), rng.randint(2, 7)
    way = rng.choice(("drives", "cycles", "travels by train", "walks", "sails"))
    return rng.choice(
        (
            f"{who} {way} at {speed} miles per hour for {hours} hours and then at {speed + 5} miles per hour for "
            f"{rng.randint(1, 4)} "
            "hours. What is the total distance?",
            f"{who} {way} {speed * hours} miles in {hours} hours. At the same speed, how long would "
            f"{speed * (hours + 2)} miles take?",
            f"{who} lives {speed} miles from work and makes the round trip {hours} times a week. How many miles is "
            "that in "
            f"{rng.randint(2, 10)} weeks?",
            f"Two towns are {speed * hours} miles apart. {who} has covered {rng.choice((10, 20, 25, 40))}% of the "
            "way. How many miles "
            "remain?",
        )
    )


def _groups(rng: random.Random) -> str:
    who, things = rng.choice(NAMES), rng.choice(THINGS)
    boxes, each = rng.randint(3, 20), rng.randint(3, 24)
    return rng.choice(
        (
            f"{who} packs {things} into {boxes} boxes with {each} in every box. {rng.randint(1, boxes - 1)} boxes "
            "are sold. How many "
            f"{things} are left?",
            f"There are {boxes * each} {things} to be shared equally among {boxes} children. {rng.randint(1, 3)} "
            "of the children give "
            f"their part to {who}. How many {things} does {who} get?",
            f"{who} has {rng.choice(('twice', 'three times', 'half', 'four times'))} as many {things} as "
            f"{rng.choice(NAMES)}, who has "
            f"{each * 2}. How many {things} do they have together?",
            f"A shelf holds {each} {things}. {who} fills {boxes} shelves and has {rng.randint(1, each - 1)} "
            f"{things} over. How many "
            f"{things} are there altogether?",
        )
    )


def _parts(rng: random.Random) -> str:
    total, part = rng.randint(4, 60) * 20, rng.choice((5, 10, 15, 20, 25, 30, 40, 60, 75))
    place = rng.choice(("A school", "A club", "A company", "A library", "A village", "A theater"))
    kind = rng.choice(("members", "students", "visitors", "workers", "readers", "people"))
    rest = rng.choice(("half", "a quarter", "a fifth", "10%", "a tenth"))
    return rng.choice(
        (
            f"{place} counts {total} {kind}. {part}% of them are children and {rest} of the others are over sixty. "
            f"How many {kind} are "
            "neither?",
            f"{place} had {total} {kind} last year. The number grew by {part}% this year. How many {kind} are "
            "there now?",
            f"Of {total} {kind}, {part}% came on Saturday and the rest on Sunday. How many more came on one day "
            "than on the other?",
            f"{place} needs ${total * 5}. It has raised {part}% so far. If each of {rng.choice((10, 20, 25, 50))} "
            f"{kind} gives the same "
            "amount, how much must each give to reach the goal?",
        )
    )


def _shapes(rng: random.Random) -> str:
    a, b, c = rng.randint(3, 30), rng.randint(3, 30), rng.randint(2, 15)
    return rng.choice(
        (
            f"A rectangular garden is {a} meters long and {b} meters wide. What does a fence around it cost at "
            f"${c} a meter?",
            f"A tank is {a} cm by {b} cm by {c} cm. It is filled at {rng.randint(2, 9)} cubic cm a second. How "
            "long until it is full?",
            f"A room is {a} feet by {b} feet. Tiles cover {c} square feet each. How many tiles are needed?",
            f"The sides of a triangle are {a}, {a + 1} and {a + 2}. What is its perimeter?",
            f"A square has a perimeter of {4 * a} cm. What is its area?",
        )
    )


def _ages(rng: random.Random) -> str:
    first, second = rng.sample(NAMES[:75], 2)
    age, gap, years = rng.randint(5, 40), rng.randint(2, 20), rng.randint(2, 15)
    return rng.choice(
        (
            f"{first} is {gap} years older than {second}. {second} is {age}. How old will {first} be in {years} years?",
            f"The sum of the ages of {first} and {second} is {2 * age + gap}. {first} is {gap} years older. How "
            f"old is {second}?",
            f"In {years} years {first} will be {rng.choice(('twice', 'three times'))} as old as {second}, who is "
            f"{age} now. How old is "
            f"{first} today?",
        )
    )


STORIES = (_ledger, _ledger, _shopping, _shopping, _wages, _distance, _groups, _parts, _shapes, _ages)


def story(rng: random.Random) -> str:
    """One word problem, at times two in one turn."""
    text = rng.choice(STORIES)(rng)
    return f"{text} {rng.choice(STORIES)(rng)}" if rng.random() < 0.05 else text

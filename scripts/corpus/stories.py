"""Stories from a simulated world: a cast, a plot that is simulated step by step, and a true sentence for each step.

Every statement of a sentence is true in the world, so questions about the story have exactly one right answer.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from scripts.corpus import words
from scripts.corpus.plots import PARAGRAPH, PLOTS, Plot


def article(phrase: str) -> str:
    """`phrase` with "a" or "an" before it. It depends on the first letter; the word lists avoid "hour", "unicorn" and the like."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


class Character:
    """A person or an animal of a story, as the sentence templates address it."""

    def __init__(self, name: str, female: bool, species: str | None, trait: str) -> None:
        self.name, self.female, self.species = name, female, species
        self.he, self.him, self.his = ("she", "her", "her") if female else ("he", "him", "his")
        self.He, self.His = self.he.capitalize(), self.his.capitalize()
        self.intro = article(f"{trait} {species or ('girl' if female else 'boy')} named {name}")
        self.Intro = self.intro[0].upper() + self.intro[1:]

    def __str__(self) -> str:
        return self.name


class Item:
    """A thing that a character holds or that lies somewhere. A sticker has no colour."""

    def __init__(self, noun: str, colour: str | None) -> None:
        self.noun, self.colour = noun, colour
        self.a = article(f"{colour} {noun}" if colour else noun)
        self.plain = article(noun)

    def __str__(self) -> str:
        return self.noun


class Location:
    """Somewhere outdoors: `at` "in the park", `to` "to the park"."""

    def __init__(self, preposition: str, noun: str) -> None:
        self.noun = f"the {noun}"
        self.at, self.to = f"{preposition} the {noun}", f"to the {noun}"
        self.At = self.at.capitalize()

    def __str__(self) -> str:
        return self.noun


@dataclass(frozen=True)
class Cast:
    """The characters and things of a story. Sentence templates can use `roles`; `key` identifies the combination."""

    roles: dict[str, Any]
    picked: int
    shared: int
    fruits: str
    key: str


def draw_cast(rng: random.Random, species: str | None = None, noun: str | None = None) -> Cast:
    """Draw a random cast. `species` and `noun`, if given, are the hero's animal and the first item."""
    people: list[Character] = []
    traits = rng.sample(words.TRAITS, 3)
    animals = rng.sample(words.ANIMALS, 3)
    for trait, animal in zip(traits, animals, strict=True):
        female = rng.random() < 0.5
        name = rng.choice(words.GIRLS if female else words.BOYS)
        while any(name == person.name for person in people):
            name = rng.choice(words.GIRLS if female else words.BOYS)
        kind = species if species and not people else animal if rng.random() < 0.5 else None
        people.append(Character(name, female, kind, trait))
    nouns, colours = rng.sample(words.ITEMS, 2), rng.sample(words.COLOURS, 2)
    item = Item(noun or nouns[0], colours[0])
    other = Item(nouns[nouns[1] != item.noun], colours[1])
    if rng.random() < 0.3:
        other = Item(f"{rng.choice(words.STICKERS)} sticker", None)
    spots, indoors = rng.sample(words.SPOTS, 3), rng.sample(words.INDOORS, 2)
    one, many = rng.choice(words.FRUITS)
    picked = rng.randint(3, 9)
    shared = rng.randint(1, picked - 1)
    roles = {
        "hero": people[0], "friend": people[1], "helper": people[2], "item": item, "other": other,
        "place": Location(*rng.choice(words.PLACES)), "spot": spots[0], "wrong": spots[1], "wrong2": spots[2],
        "indoors": indoors[0], "indoors2": indoors[1], "high": rng.choice(words.HIGH_SPOTS),
        "day": rng.choice(words.DAYS), "time": rng.choice(words.TIMES), "home": rng.choice(words.HOMES),
    }  # fmt: skip
    amounts = {"picked": picked, "shared": shared, "left": picked - shared}
    roles.update({name: f"{amount} {one if amount == 1 else many}" for name, amount in amounts.items()})
    key = f"story:{people[0]},{people[1]},{people[2]},{item.a},{other.a},{picked},{shared}"
    return Cast(roles, picked, shared, many, key)


@cache
def _mentions(template: str) -> tuple[str, ...]:
    """The roles of characters that a sentence template names."""
    return tuple(role for role in ("hero", "friend", "helper") if "{" + role in template)


class World:
    """The state of a story's world, and the facts that questions may ask about.

    `holder` maps an item to its holder and `lying` maps an item to its place; an item is in at most one of them. `facts`
    maps a question (a key of QUESTIONS and its arguments) to all answers that were true at any time. Only questions with
    exactly one answer are asked.
    """

    def __init__(self, cast: Cast) -> None:
        self.cast, self.roles = cast, cast.roles
        self.holder: dict[Item, Character] = {}
        self.lying: dict[Item, str] = {}
        self.facts: dict[tuple[str, ...], set[str]] = {}

    def fact(self, question: str, *arguments: object, answer: object) -> None:
        """Record one true answer to a question."""
        self.facts.setdefault((question, *map(str, arguments)), set()).add(str(answer))

    def act(self, action: str, *names: str) -> None:
        """Change the state by an action on roles. Raises ValueError if the action is impossible."""
        getattr(self, f"_{action}")(*(self.roles.get(name) for name in names))

    def take(self, item: Item, holder: Character) -> None:
        """Remove `item` from `holder`, who must hold it."""
        if self.holder.pop(item, None) is not holder:
            raise ValueError(f"{holder} does not hold the {item}")

    def _say(self, who: Character | None) -> None:
        """A sentence that changes nothing."""

    def _intro(self, who: Character) -> None:
        if who.species:
            self.fact("species", who, answer=article(who.species))

    def _see(self, item: Item) -> None:
        if item.colour:
            self.fact("colour", item, answer=item.colour)

    def _own(self, who: Character, item: Item) -> None:
        self._see(item)
        self.holder[item] = who
        self.fact("owner", item, answer=who)

    def _give(self, giver: Character, taker: Character, item: Item) -> None:
        self.take(item, giver)
        self.holder[item] = taker
        self.fact("gave what", giver, taker, answer=f"the {item}")
        self.fact("gave who", item, taker, answer=giver)
        self.fact("gave to", giver, item, answer=taker)

    def _swap(self, one: Character, two: Character, first: Item, second: Item) -> None:
        self._give(one, two, first)
        self._give(two, one, second)

    def _lend(self, giver: Character, taker: Character, item: Item) -> None:
        self.take(item, giver)
        self.holder[item] = taker
        self.fact("lent to", giver, item, answer=taker)

    def _lose(self, who: Character, item: Item, spot: str) -> None:
        self.take(item, who)
        self.lying[item] = spot
        self.fact("lost", item, answer=who)

    def _toss(self, who: Character, item: Item, spot: str) -> None:
        self.take(item, who)
        self.lying[item] = spot

    def _put(self, who: Character, item: Item, spot: str) -> None:
        self.take(item, who)
        self.lying[item] = spot
        self.fact("put", who, item, answer=spot)

    def _hide(self, item: Item, spot: str) -> None:
        self._see(item)
        self.lying[item] = spot

    def _move(self, who: Character, item: Item, spot: str) -> None:
        if item not in self.lying:
            raise ValueError(f"the {item} does not lie anywhere")
        self.lying[item] = spot
        self.fact("moved", item, answer=who)

    def _find(self, who: Character, item: Item) -> None:
        self.fact("found", item, answer=who)
        self.fact("found where", who, item, answer=self._pick_up(who, item))

    def _fetch(self, who: Character, item: Item) -> None:
        self.fact("fetched", item, answer=who)
        self._pick_up(who, item)

    def _collect(self, who: Character, item: Item) -> None:
        self._pick_up(who, item)

    def _pick_up(self, who: Character, item: Item) -> str:
        if item not in self.lying:
            raise ValueError(f"the {item} does not lie anywhere")
        self.holder[item] = who
        return self.lying.pop(item)

    def _go(self, who: Character, place: Location) -> None:
        self.fact("went", who, answer=place.to)

    def _win(self, who: Character) -> None:
        self.fact("won", answer=who)

    def _count(self, who: Character) -> None:
        self.fact("picked", who, self.cast.fruits, answer=self.cast.picked)

    def _share(self, giver: Character, taker: Character) -> None:
        self.fact("shared", giver, taker, self.cast.fruits, answer=self.cast.shared)
        self.fact("left", giver, self.cast.fruits, answer=self.cast.picked - self.cast.shared)

    def questions(self) -> list[tuple[tuple[str, ...], str]]:
        """Every question that has exactly one answer in the finished story, with that answer."""
        for item, who in self.holder.items():
            self.fact("holder", item, answer=who)
        for item, spot in self.lying.items():
            self.fact("where", item, answer=spot)
        return [(question, next(iter(answers))) for question, answers in self.facts.items() if len(answers) == 1]


class Narrator:
    """Tells a plot: applies each step to the world and writes one true sentence about it."""

    def __init__(self, rng: random.Random, world: World, short: bool) -> None:
        self.rng, self.world, self.short = rng, world, short
        self.paragraphs: list[list[str]] = [[]]
        self.last: tuple[str, tuple[str, ...]] = ("nobody", ())  # subject and mentioned roles of the last sentence

    def tell(self, plot: Plot) -> str:
        """Simulate `plot` and return the text."""
        self.steps(plot)
        return "\n".join(" ".join(sentences) for sentences in self.paragraphs if sentences)

    def steps(self, plot: Plot) -> None:
        """Tell the steps of a plot or of a branch."""
        for step in plot:
            if step is PARAGRAPH:
                if not self.short:
                    self.paragraphs.append([])
            elif isinstance(step, list):
                self.steps(self.rng.choice(step))
            elif isinstance(step[0], str):
                self.step(*step)
            else:
                self.steps(step)

    def step(self, action: str, sentences: Sequence[str]) -> None:
        """Tell one step. The random draws do not depend on the cast."""
        template, skip, pronoun = self.rng.choice(sentences), self.rng.random(), self.rng.random() < 0.6
        if action[0] == "?":
            if self.short or skip > 0.75:
                return
            action = action[1:]
        verb, *roles = action.split()
        self.world.act(verb, *roles)
        subject = self.subject(roles[0], template, pronoun)
        self.paragraphs[-1].append(template.format(S=subject, **self.world.roles))
        self.last = (roles[0], _mentions(template))

    def subject(self, role: str, template: str, pronoun: bool) -> str:
        """The text for `{S}`: the name, or a pronoun if the last sentence was about this character and mentioned no other of the
        same gender."""
        who = self.world.roles.get(role)
        if not isinstance(who, Character) or not self.paragraphs[-1] or not pronoun or role in _mentions(template):
            return str(who)
        subject, mentioned = self.last
        rivals = [self.world.roles[other] for other in mentioned if other != role]
        clear = subject == role and all(rival.female != who.female for rival in rivals)
        return who.He if clear else who.name


def tell_story(rng: random.Random, cast: Cast, short: bool = False, plots: Sequence[Plot] = PLOTS) -> tuple[str, World]:
    """Tell a random one of `plots` with `cast`. Returns the text, and the world at its end."""
    world = World(cast)
    return Narrator(rng, world, short).tell(rng.choice(plots)), world

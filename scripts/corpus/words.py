"""The vocabulary and the questions of the synthetic corpus. This file holds only data."""


def _split(text: str, separator: str | None = None) -> tuple[str, ...]:
    """The words of a line, or its phrases if a separator is given."""
    return tuple(text.split(separator))


GIRLS = _split(
    "Mia Anna Lily Rosa Nora Ella Clara Ruby Ivy Hana Amina Leila Maya Sara Tess Wren Zoë Åsa Chloé Renée Siân Inês "
    "Noémi Zoë Åsa Jördis Юля Мила ゆき 小美"
)
BOYS = _split(
    "Tom Ben Max Sam Leo Finn Omar Jack Noah Theo Hugo Ravi Kofi Milo Otis Jonas José Łukasz Björn Søren Håkon Noël "
    "Ömer André José Łukasz Žiga Ваня たろう 小明"
)

ANIMALS = _split(
    "fox bear rabbit mouse owl duck frog hedgehog badger otter squirrel turtle goose lamb kitten puppy pony crow beaver "
    "goat deer mole hen penguin elephant monkey donkey sparrow"
)

TRAITS = _split(
    "kind brave clever curious gentle cheerful quiet shy lively patient playful tiny small young friendly careful "
    "merry polite thoughtful eager"
)

ITEMS = _split(
    "kite|ball|lantern|drum|scarf|hat|book|cup|bell|toy boat|spoon|basket|blanket|whistle|ring|button|key|marble|shell|"
    "feather|mirror|doll|puzzle|flute|ribbon|mitten|umbrella|teapot|candle|pillow|wooden box|crayon|rope|wagon|bucket|"
    "shovel|map|coin|toy train|balloon|bottle|purse|stone|flag|toy robot",
    "|",
)

COLOURS = _split("red blue green yellow orange purple pink white black brown grey gold silver turquoise")

STICKERS = _split("⭐ 🍎 🐟 🌈 🐢 🍄 🌙 🎈 🐝 🦊 🌻 🚀 🐙 🍓 ❤️ 🦉")

PLACES = (
    ("in", "garden"), ("in", "park"), ("at", "beach"), ("in", "forest"), ("at", "market"), ("in", "meadow"),
    ("at", "pond"), ("by", "river"), ("at", "farm"), ("on", "hill"), ("in", "orchard"), ("at", "harbour"),
    ("in", "playground"), ("in", "valley"), ("by", "lake"), ("at", "lighthouse"), ("in", "village square"),
    ("at", "old mill"), ("by", "waterfall"), ("at", "castle"),
)  # fmt: skip

SPOTS = _split(
    "under the wooden bench|behind the big rock|in the tall grass|inside the hollow log|beside the stone wall|"
    "under the oak tree|near the old gate|behind the blue shed|in the pile of leaves|between the roots of a pine|"
    "under the little bridge|beside the well|behind the rose bush|in the empty barrel|near the signpost|"
    "under the apple cart|behind the haystack|in the muddy ditch",
    "|",
)

INDOORS = _split(
    "under the bed|in the top drawer|behind the sofa|on the high shelf|in the kitchen cupboard|inside the wardrobe|"
    "beside the fireplace|under the stairs|in the toy chest|on the window sill|behind the curtain|under the table|"
    "in the laundry basket|on the piano",
    "|",
)

HOMES = _split(
    "a little house by the sea|a cottage at the edge of the woods|a village in the hills|a small town with crooked "
    "streets|a house with a green door|a farmhouse near the mountains|a warm den under an old tree|a tall house by the canal",
    "|",
)

DAYS = _split("sunny windy misty warm cool bright quiet cloudy fresh")
TIMES = ("morning", "afternoon", "day")
FRUITS = (
    ("apple", "apples"), ("pear", "pears"), ("plum", "plums"), ("berry", "berries"), ("nut", "nuts"),
    ("cherry", "cherries"), ("mushroom", "mushrooms"), ("acorn", "acorns"), ("peach", "peaches"), ("🍎", "🍎"), ("🍓", "🍓"),
)  # fmt: skip

WORDS = _split(
    "apple moon river cloud stone bread green happy table garden window music sugar tiger lemon paper candle winter "
    "summer bridge silver forest pepper rocket button carrot dragon eagle flute grape honey island jacket kettle ladder "
    "mango needle ocean pencil queen rabbit saddle tunnel uncle violin wagon yellow zebra anchor basket cherry dinner "
    "engine feather goat hammer insect jungle king lion mirror night orange planet quilt ribbon school turtle umbrella "
    "valley water year zero arrow banana camel desert earth flower ginger harbour iron jelly lamp meadow north onion "
    "piano rain shadow train village whistle yard"
)
HIGH_SPOTS = ("at the top of a pine", "on the roof of a barn", "high up in an oak", "on top of a tall wall")
QUESTIONS: dict[str, tuple[str, ...]] = {
    "holder": ("Who has the {0} now?", "Who has the {0} at the end?"),
    "owner": ("Who had the {0} at first?", "Who was the first to have the {0}?"),
    "colour": ("What colour is the {0}?", "Which colour is the {0}?"),
    "where": ("Where is the {0} now?", "Where is the {0} at the end?"),
    "put": ("Where did {0} put the {1}?",),
    "gave what": ("What did {0} give to {1}?", "What did {1} get from {0}?"),
    "gave who": ("Who gave the {0} to {1}?", "From whom did {1} get the {0}?"),
    "gave to": ("Who did {0} give the {1} to?", "Who got the {1} from {0}?"),
    "lent to": ("Who did {0} lend the {1} to?", "Who borrowed the {1} from {0}?"),
    "lost": ("Who lost the {0}?",),
    "found": ("Who found the {0}?",),
    "found where": ("Where did {0} find the {1}?",),
    "fetched": ("Who got the {0} down?",),
    "moved": ("Who moved the {0}?",),
    "species": ("What kind of animal is {0}?", "What animal is {0}?"),
    "went": ("Where did {0} go?",),
    "won": ("Who won the race?",),
    "picked": ("How many {1} did {0} pick?",),
    "shared": ("How many {2} did {0} give to {1}?",),
    "left": ("How many {1} does {0} have now?", "How many {1} are left for {0}?"),
}

"""The plots of the synthetic corpus. This file holds only data.

A plot is a tuple of steps. A step is one of
  - `(action, sentences)`: the action changes the simulated world (see `World` in stories.py), and one of the
    sentences reports it. An action that starts with `?` is told only sometimes, and never in a short story. Later steps
    must not depend on it.
  - `PARAGRAPH`: a paragraph break in a long story.
  - a list of plots: one of them is chosen.

Sentences are `str.format` templates. Roles: `hero`, `friend`, `helper` (`{hero}` is the name; `.he`, `.him`, `.his`,
`.intro` "a shy girl named Mia", `.Intro`); things: `item`, `other` (`{item}` is the noun; `.a` "a red kite"); `place`
(`.at` "in the park", `.to` "to the park"); phrases: `spot`, `wrong`, `wrong2`, `indoors`, `indoors2`, `day`, `time`,
`home`, `high`, `picked`, `shared`, `left`. `{S}` is the acting character: its name, or a pronoun if that is unambiguous.
It is used only at the start of a sentence.
"""

from typing import Any

PARAGRAPH = None
Plot = tuple[Any, ...]

OPENING: Plot = (
    ("intro hero", (
        "Once upon a time there was {hero.intro}.", "There once was {hero.intro}.", "{hero.Intro} lived in {home}.",
        "This is a story about {hero.intro}.", "In {home} lived {hero.intro}.",
        "Long ago, in {home}, there lived {hero.intro}.",
    )),
    ("?say hero", (
        "{S} liked to sing on the way home.", "{S} was always ready for an adventure.",
        "{S} loved long walks and warm soup.", "Every morning {hero} opened the window and said hello to the birds.",
        "{S} could never sit still for long.", "{S} had a good heart and muddy feet.",
        "{S} knew every path for miles around.", "{S} liked {day} days best of all.",
    )),
)  # fmt: skip

OWN_ITEM = ("own hero item", (
    "{S} had {item.a}.", "{S} had {item.a} and took good care of it.", "{S} owned {item.a}.",
    "{S} had {item.a}, and it was the best thing in the world.", "For {hero.his} birthday {hero} got {item.a}.",
    "{S} loved one thing most of all, and that was {item.a}.",
))  # fmt: skip

FRIEND_ARRIVES = ("intro friend", (
    "Soon {hero} met {friend.intro}.", "Then {friend.intro} came by.", "Just then {friend.intro} walked past.",
    "Along the path came {friend.intro}.", "Before long {hero} saw {friend.intro}.",
))  # fmt: skip

GO_OUT = ("go hero place", (
    "One {day} {time}, {hero} went {place.to}.", "One {day} {time}, {hero} walked {place.to}.",
    "On a {day} {time}, {hero} set off {place.to}.", "One {day} {time}, {hero} ran all the way {place.to}.",
))  # fmt: skip

SCENERY = ("?say nobody", (
    "The birds were singing in every tree.", "The air smelled of grass and honey.",
    "Two butterflies danced in the air.", "Somewhere a bell was ringing.", "A little breeze played with the leaves.",
    "High above, the swallows flew in circles.",
))  # fmt: skip

THANKS = ("?say hero", (
    '"Thank you, {friend}!" said {hero}.', "{S} hugged {friend} and smiled.", '"You are a true friend," said {hero}.',
    "{S} was so happy that {hero.he} danced in a circle.", '"How can I ever thank you?" asked {hero}.',
))  # fmt: skip

ENDING = ("?say nobody", (
    "Then they both went home for supper.", "They laughed and talked until the stars came out.",
    "After that they were the best of friends.", "From that day on they met every week.",
    "That night they both slept very well.", "And so the {day} {time} had a happy end.",
))  # fmt: skip


def _moral(*sentences: str) -> Plot:
    """The steps that end a plot: a new paragraph, an ending, and one of `sentences` as the moral."""
    return PARAGRAPH, ENDING, ("?say nobody", sentences)


LOST: Plot = (
    *OPENING, OWN_ITEM, PARAGRAPH, GO_OUT, SCENERY,
    ("lose hero item spot", (
        "While {hero} was playing, the {item} fell {spot}, and {hero.he} did not notice.",
        "{S} jumped and skipped, and the {item} was left {spot}.",
        "{S} climbed and ran, and the {item} landed {spot} without a sound.",
    )),
    ("say hero", (
        "When it was time to go home, the {item} was gone.", '"Oh no! Where is my {item}?" cried {hero}.',
        "Later {hero} looked around, but the {item} was missing.", '"My {item} is gone!" said {hero} sadly.',
    )),
    PARAGRAPH,
    ("?say hero", (
        "{S} looked {wrong}, but it was not there.", "First {hero} searched {wrong}, but found nothing.",
    )),
    FRIEND_ARRIVES,
    ("?say hero", (
        '"I have lost my {item}," said {hero}. "Will you help me?"', '"Have you seen my {item}?" asked {hero}.',
        '"Please help me find my {item}," said {hero}.',
    )),
    ("?say friend", (
        '"Do not worry," said {friend}. "We will look together."', '"Let us search every corner," said {friend}.',
        '"Two pairs of eyes see more than one," said {friend}.',
    )),
    ("?say friend", (
        "{S} looked {wrong2} and saw only an old boot.", "{S} searched {wrong2}, but found just a snail.",
    )),
    [
        (
            ("find friend item", (
                "At last {friend} looked {spot}, and there was the {item}!", "{S} found the {item} {spot}.",
                'Then {friend} found the {item} {spot}. "Here it is!" {friend.he} called.',
            )),
            ("give friend hero item", (
                "{S} gave the {item} back to {hero}.", "{S} handed the {item} to {hero}.",
                "With a smile, {friend} gave the {item} to {hero}.",
            )),
            THANKS,
        ),
        (
            ("say friend", (
                '"Think of where you played," said {friend}.', '"Go back the way you came," said {friend}.',
            )),
            ("find hero item", (
                "{S} did so, and found the {item} {spot}.", "{S} walked back and found the {item} {spot}.",
            )),
            THANKS,
        ),
    ],
    *_moral(
        "What is lost can be found when friends look together.", "A good friend helps you search.",
        "After that {hero} always held the {item} tightly.", "It is easier to look together than alone.",
    ),
)  # fmt: skip

GIFT: Plot = (
    *OPENING, OWN_ITEM, PARAGRAPH, GO_OUT,
    ("intro friend", (
        "There {hero} met {friend.intro}, who was sitting all alone.", "There {hero} saw {friend.intro}, who was crying.",
        "{place.At} sat {friend.intro} with a sad face.",
    )),
    ("?say hero", ('"Why are you so sad?" asked {hero}.', '"What is wrong?" asked {hero}.')),
    ("say friend", (
        '"I have nothing to play with," said {friend}.', '"Nobody remembered my birthday," said {friend}.',
        '"I feel so lonely today," said {friend}.',
    )),
    ("?say hero", ("{S} thought for a moment.", "{S} looked at the {item} and then at {friend}.",
                   "{S} did not like to see anyone sad.")),
    ("give hero friend item", (
        "{S} gave the {item} to {friend}.", 'So {hero} gave {friend} the {item}. "It is yours now," {hero.he} said.',
        "Without another word, {hero} gave the {item} to {friend}.",
    )),
    ("?say friend", (
        "{S} could not believe it.", "{S} dried {friend.his} eyes and smiled.",
        '"For me?" asked {friend}. "What a lovely surprise!"',
    )),
    [
        (),
        (
            PARAGRAPH,
            ("own friend other", (
                "Now {friend} had something too: {other.a}.", "In {friend.his} bag {friend} had {other.a}.",
                "At home {friend} kept {other.a}.",
            )),
            ("give friend hero other", (
                "The next day {friend} gave the {other} to {hero}.", "{S} gave the {other} to {hero} to say thank you.",
            )),
        ),
    ],
    *_moral(
        "A gift makes two people happy.", "Kindness always finds its way home.",
        "Sharing is the shortest way to a friend.", "{hero} had one thing less and one friend more.",
    ),
)  # fmt: skip

TRADE: Plot = (
    *OPENING, OWN_ITEM,
    ("?say hero", ("But {hero} had grown a little tired of it.", "Still, {hero} wished for something new.")),
    PARAGRAPH, GO_OUT, SCENERY, FRIEND_ARRIVES,
    ("own friend other", (
        "{S} had {other.a}.", "{S} was carrying {other.a}.", "In {friend.his} arms {friend} held {other.a}.",
    )),
    ("?say friend", (
        '"What a fine {item} you have," said {friend}.', '"I have always wanted {item.plain}," said {friend}.',
    )),
    ("?say hero", ('"And I like your {other}," said {hero}.', '"Your {other} is lovely too," said {hero}.')),
    ("?say friend", ('"Shall we trade?" asked {friend}.', '"Then let us swap," said {friend}.')),
    ("swap hero friend item other", (
        "So {hero} gave {friend} the {item}, and {friend} gave {hero} the {other}.",
        "They agreed: {hero} gave the {item} to {friend}, and {friend} gave the {other} to {hero}.",
    )),
    ("?say nobody", ("Both of them were happy with the trade.", "They shook hands and laughed.",
                     "It was a fair trade.")),
    [
        (),
        (),
        (
            PARAGRAPH,
            ("intro helper", ("On the way home {friend} met {helper.intro}.", "Later {friend} saw {helper.intro}.")),
            ("give friend helper item", (
                "{helper} liked the {item} so much that {friend} gave it to {helper.him}.",
                "{helper} had no toys at all, so {friend} gave {helper.him} the {item}.",
            )),
        ),
    ],
    *_moral(
        "A fair trade makes both sides glad.", "Sometimes an old thing is new to somebody else.",
        "When you trade fairly, you trade twice.",
    ),
)  # fmt: skip

CHAIN: Plot = (
    *OPENING, OWN_ITEM, PARAGRAPH, GO_OUT, FRIEND_ARRIVES,
    ("?say friend", ('"I wish I had {item.plain}," said {friend}.', '"That is a fine {item}," said {friend}.')),
    ("give hero friend item", (
        "{S} gave the {item} to {friend}.", '"Take it," said {hero}, and gave {friend} the {item}.',
    )),
    ("?say friend", ('"I will take good care of it," said {friend}.', "{S} thanked {hero} three times.")),
    PARAGRAPH,
    ("intro helper", (
        "The next {time} {friend} met {helper.intro}.", "A week later {friend} visited {helper.intro}.",
        "Then {friend} went to see {helper.intro}.",
    )),
    ("?say helper", ('"I am so bored," said {helper}.', '"Nothing ever happens here," said {helper}.')),
    ("give friend helper item", (
        "So {friend} gave the {item} to {helper}.", "{S} smiled and gave {helper} the {item}.",
    )),
    ("?say helper", ("{S} jumped for joy.", '"This is the best day of my life," said {helper}.')),
    [
        (),
        (),
        (
            ("give helper hero item", (
                "But {helper} knew {hero} well, and gave the {item} back to {hero}.",
                "In the end {helper} gave the {item} to {hero}, and everyone laughed.",
            )),
        ),
    ],
    *_moral("A good gift never stops travelling.", "One kind act leads to another.",
            "Kindness goes from hand to hand."),
)  # fmt: skip

STUCK: Plot = (
    *OPENING, OWN_ITEM, PARAGRAPH, GO_OUT, SCENERY,
    ("toss hero item high", (
        "{S} threw the {item} into the air, and it got stuck {high}.",
        "A strong wind took the {item} and left it {high}.",
        "A cheeky magpie grabbed the {item} and dropped it {high}.",
    )),
    ("?say hero", ('"Come down, {item}!" called {hero}, but it did not move.', '"Oh dear," said {hero}.')),
    ("?say hero", ("{S} jumped as high as {hero.he} could, but it was too high.",
                   "{S} tried to reach it with a stick, but the stick broke.")),
    PARAGRAPH, FRIEND_ARRIVES,
    ("?say friend", ("{S} stood on {hero}'s shoulders, but they both fell over.",
                     "{S} tried to climb up, but slipped and slid down again.")),
    ("?say friend", ('"I cannot reach it," said {friend}. "But I know who can."',)),
    ("intro helper", (
        "Then {helper.intro} came with a ladder.", "They asked for help, and {helper.intro} came at once.",
        "Luckily, {helper.intro} had seen it all.",
    )),
    ("fetch helper item", (
        "{S} climbed up slowly and got the {item} down.", "{S} climbed up and took the {item}.",
        "Step by step {helper} went up and fetched the {item}.",
    )),
    [
        (("give helper hero item", ("{S} gave the {item} to {hero}.",
                                    "{S} came down and gave the {item} back to {hero}.")),),
        (("give helper friend item", ("{S} handed the {item} to {friend}.",)),
         ("give friend hero item", ("{S} passed it on to {hero}.", "Then {friend} gave it to {hero}."))),
        (("give helper friend item", ("{S} came down and gave the {item} to {friend}.",)),
         ("say hero", ('"You may keep it for today, {friend}," said {hero}.',))),
    ],
    *_moral("When one way fails, try another.", "It is no shame to ask for help.",
            "Nobody is good at everything, but everybody is good at something."),
)  # fmt: skip

TREASURE: Plot = (
    *OPENING,
    ("intro friend", ("{hero.His} best friend was {friend.intro}.", "Next door lived {friend.intro}.")),
    PARAGRAPH,
    ("say hero", ("One {day} {time} they found an old map with a cross on it.",
                  "One {day} {time} the wind blew a torn map to {hero}'s feet.",)),
    ("?say friend", ('"It is a treasure map!" cried {friend}.', '"Let us follow it," said {friend}.')),
    ("go hero place", ("The map led {hero} and {friend} {place.to}.",
                       "{S} and {friend} followed the map {place.to}.")),
    ("?say friend", ("{S} dug a hole {wrong}, but there were only worms.",
                     "{S} searched {wrong}, but there was nothing.")),
    ("?say hero", ('"Let us not give up," said {hero}.', "{S} turned the map around and laughed.",
                   '"We were holding it upside down," said {hero}.')),
    PARAGRAPH,
    ("hide item spot", ("A small chest was waiting {spot}, and inside was {item.a}.",
                        "There was a tin {spot}, and in the tin was {item.a}.")),
    [
        (("find hero item", ("{S} was the one who found it.", "It was {hero} who found it.")),),
        (("find friend item", ("{S} was the one who found it.", "It was {friend} who found it.")),
         ("give friend hero item", ("{S} gave the {item} to {hero}.",
                                    "{S} knew that {hero} would like it, and gave {hero.him} the {item}."))),
        (("find hero item", ("{S} was the one who found it.", "{S} pulled it out and cheered.")),
         ("give hero friend item", ("But {hero} gave the {item} to {friend}.",
                                    '"You read the map," {hero.he} said, and gave {friend} the {item}.'))),
    ],
    *_moral("The best treasure is a friend to share it with.", "Those who keep looking will find.",
            "They kept the map for another day."),
)  # fmt: skip

MOVED: Plot = (
    *OPENING, OWN_ITEM, PARAGRAPH,
    ("put hero item indoors", (
        "One {day} {time} {hero} put the {item} {indoors} and went out.",
        "Before lunch {hero} put the {item} {indoors}.", "{S} put the {item} {indoors} and went to the window.",
    )),
    ("intro friend", ("Then {friend.intro} came to visit.", "While {hero} was busy, {friend.intro} came in.",
                      "Later {friend.intro} came to tidy the room.")),
    ("move friend item indoors2", (
        "{S} took the {item} and put it {indoors2}.", "{S} moved the {item} and left it {indoors2}.",
    )),
    PARAGRAPH,
    ("say hero", ("When {hero} came back, {hero.he} looked {indoors}, but the {item} was not there.",
                  "{S} wanted to play and looked {indoors}, but the {item} was gone.")),
    ("?say hero", ('"How strange," said {hero}. "I put it right here."', '"Who took my {item}?" asked {hero}.')),
    [
        (
            ("say friend", ('"I put it {indoors2}," said {friend}.', '"Look {indoors2}," said {friend}.')),
            ("find hero item", ("{S} looked there and found the {item}.", "And that is where {hero} found it.")),
        ),
        (
            ("say friend", ('"It is {indoors2}," said {friend}. "It is safe there."',)),
            ("say hero", ('"Good," said {hero}. "Let it stay there."', "{S} nodded and left it there.")),
        ),
        (
            ("say friend", ('"I know where it is," said {friend}.',)),
            ("collect friend item", ("{S} went and got the {item}.",)),
            ("give friend hero item", ("{S} gave it back to {hero}.", "Then {friend} gave the {item} to {hero}.")),
        ),
    ],
    *_moral("Ask before you move what is not yours.", "A tidy room is nice, but a word is nicer.",
            "Always tell your friends where you put their things."),
)  # fmt: skip

RACE: Plot = (
    *OPENING,
    ("intro friend", ("In the same street lived {friend.intro}.", "{hero.His} neighbour was {friend.intro}.")),
    ("?say friend", ("{S} loved to boast about {friend.his} speed.", '"Nobody is faster than me," said {friend}.')),
    PARAGRAPH,
    ("go hero place", ("One {day} {time} {hero} and {friend} went {place.to} for a race.",)),
    ("intro helper", ("The judge was {helper.intro}.", "{helper.Intro} was the judge.")),
    ("own helper item", ("{S} had {item.a} as the prize.", "The prize was {item.a}, and {helper} held it up.")),
    ("say helper", ('"Ready, steady, go!" called {helper}.', '"Run!" called {helper}.')),
    ("?say friend", ("{S} was far ahead.", "{S} ran like the wind.")),
    [
        (
            ("say friend", ("But {friend} lay down {spot} and fell asleep.", "But {friend} stopped {spot} to rest.")),
            ("win hero", ("{S} kept going and won the race.", "{S} never stopped, and so {hero.he} won the race.")),
            ("give helper hero item", ("{S} gave the {item} to {hero}.", "So {helper} gave {hero} the {item}.")),
        ),
        (
            ("say hero", ("But {hero} tripped on a root.", "But {hero} took the wrong path.")),
            ("win friend", ("{S} won the race.", "{S} reached the line first and won the race.")),
            ("give helper friend item", ("{S} gave the {item} to {friend}.",)),
            [
                (),
                (("give friend hero item", ('"You ran well too," said {friend}, and gave the {item} to {hero}.',)),),
            ],
        ),
    ],
    *_moral("Slow and steady is a good way to run.", "A prize is nice, but a friend is nicer.",
            "It is fun to win, and it is fun to run."),
)  # fmt: skip

BORROW: Plot = (
    *OPENING, OWN_ITEM, FRIEND_ARRIVES,
    ("say friend", ('"May I borrow your {item}?" asked {friend}.', '"Will you lend me your {item}?" asked {friend}.')),
    ("lend hero friend item", (
        '"Of course," said {hero}, and lent {friend} the {item}.', "{S} lent the {item} to {friend}.",
    )),
    PARAGRAPH,
    ("go friend place", ("{S} took it {place.to}.", "With the {item}, {friend} went {place.to}.")),
    ("?say friend", ("{S} played there until the sun was low.", "{S} showed it to everyone.")),
    [
        (
            ("lose friend item spot", ("But {friend} forgot the {item} {spot}.",
                                       "On the way back {friend} left the {item} {spot}.")),
            [
                (
                    ("say friend", ('"I am sorry," said {friend}. "I do not know where it is."',)),
                    ("say hero", ('"Let us look tomorrow," said {hero}. "It is only {item.plain}."',
                                  '"I am not angry," said {hero}. "We will find it another day."')),
                ),
                (
                    ("intro helper", ("That evening {helper.intro} came that way.",)),
                    ("find helper item", ("{S} found the {item} {spot}.",)),
                    ("give helper hero item", ("{S} knew whose it was and gave it to {hero}.",
                                               "{S} gave the {item} to {hero}.")),
                    ("?say friend", ('"I am sorry," said {friend}. "I will be more careful."',)),
                ),
            ],
        ),
        (("give friend hero item", ("In the evening {friend} gave the {item} back to {hero}.",
                                    "The next day {friend} gave the {item} back.")), THANKS),
        (("say hero", ('"Keep it as long as you like," said {hero}.', "{S} did not mind waiting.")),
         ("say friend", ("{S} still plays with it every day.",))),
    ],
    *_moral("Take care of what you borrow.", "Trust is worth more than any toy.",
            "To lend is kind, and to be careful is kind too."),
)  # fmt: skip

HARVEST: Plot = (
    *OPENING, PARAGRAPH, GO_OUT, SCENERY,
    ("count hero", ("There {hero} picked {picked}.", "{S} filled a bag with {picked}.", "{S} gathered {picked}.")),
    ("?say hero", ('"What a good day," said {hero}.', "{S} hummed a little song.")),
    FRIEND_ARRIVES,
    ("?say friend", ('"I could not find any," said {friend}.', '"My bag is empty," said {friend}.')),
    ("share hero friend", ("{S} gave {friend} {shared}.", "So {hero} gave {shared} to {friend}.")),
    ("say hero", ("Then {hero} had {left} left.", "That left {hero} with {left}.", "{S} still had {left}.")),
    *_moral("There is always enough to share.", "Those who share are never poor.", "A shared meal tastes best."),
)  # fmt: skip

PLOTS: tuple[Plot, ...] = (LOST, GIFT, TRADE, CHAIN, STUCK, TREASURE, MOVED, RACE, BORROW, HARVEST)
ITEM_PLOTS: tuple[Plot, ...] = PLOTS[:-1]

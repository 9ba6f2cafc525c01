"""Texts made from our own word list, in three splits that share no text.

Which split a text belongs to is decided by its digest. So the splits are disjoint by construction: for every seed,
length and number of examples, and between two calls with different arguments.
"""

from __future__ import annotations

import hashlib
import random
from typing import Final, Literal

Split = Literal["train", "eval", "sft"]

SYSTEM_PROMPT: Final = "Reverse the text character by character."

# Of ten texts, by the last decimal of the digest: four train, two evaluate, four warm up.
_SPLIT_OF_DIGIT: Final[tuple[Split, ...]] = ("train",) * 4 + ("eval",) * 2 + ("sft",) * 4
_TRIES_PER_TEXT: Final = 200

_WORD_LIST: Final = """
able acid acorn actor adapt admit adult after again agent agree ahead alarm album alert alike alive alley
allow almond alone amber ample anchor angle animal ankle answer apple april apron arch arena argue armor
arrow artist ash aside atlas attic autumn awake award bacon badge baker balance ball bamboo banana band bank
barley barn basic basket battery beach beam bean bear beauty beetle begin bell belt bench berry better
beyond bicycle birch bird biscuit bishop bitter blanket blend block bloom blue board boat body bone book
boot border bottle bottom bowl box branch brave bread breath breeze brick bridge brief bright bring broad
bronze brook broom brother brown brush bucket build bundle burn bush butter button cabin cable cactus cake
calm camel camera camp canal candle canoe canvas captain carbon card cargo carpet carrot carry castle cattle
cave cedar cellar center chain chair chalk change chapel charm chart cheese cherry chess chest chief child
chimney choice circle city claim clay clean clear clever cliff climb clock cloth cloud clover coach coast
cobalt coffee coin cold color comet common compass copper coral corn corner cotton count country couple
courage cousin cover crab cradle craft crane cream creek cricket crisp crop cross crowd crown crystal cube
curtain curve cycle daily dairy daisy damp dance danger dark dawn deal deep deer delta depth desert desk
diamond dinner direct distant dive dock dolphin donkey door double dove dragon drama dream dress drift drink
drum dry duck dust eager eagle early earth east easy echo edge effort egg eight elbow elder elm ember empty
engine enjoy enter equal even evening exact exit extra fabric face fact fair falcon fall family famous farm
fast father feast feather fence fern ferry fiddle field figure filter final finger fire firm fish five flag
flame flat flavor fleet flight flint float flock floor flour flower flute focus fog folk food forest fork
form fossil fountain fox frame free fresh friend frog front frost fruit fuel full funny future galaxy
gallery game garage garden garlic gate gather gentle giant ginger girl give glacier glad glass globe glove
goat gold good goose grain grand granite grape grass gravel gray great green grid ground group grove guard
guest guide guitar habit hall hammer hand happy harbor hard harp harvest hat hawk hazel head heart heat
heavy hedge height helmet help herb hero heron hill hollow home honest honey hood hope horn horse hotel hour
house human hundred hunter ice idea inch indigo ink inner insect inside iron island ivory ivy jacket jade
jar jazz jelly jewel join journey judge juice july jump june jungle junior just kayak keen kettle key kind
king kitchen kite kitten knee knife knot label lace ladder lake lamp land lantern large lark laser last late
laugh laurel lava lawn layer leader leaf learn leather ledge left legend lemon lens letter level library
light lily limb lime linen lion liquid list little lizard local lock logic long loop lotus loud lucky lunar
lunch lute machine magic magnet maple marble march margin market marsh mask master match meadow meal medal
melody melon member memory merchant mercy metal meter middle mile milk mill mineral minor mint minute mirror
mist mixed model modern moment monkey month moon moral morning moss mother motor mountain mouse mouth museum
music mustard narrow nation native nature navy near neat needle nephew nest never nickel night nine noble
noise noon north nose note novel number nurse oak oasis oat object ocean office olive onion opal open opera
orange orbit orchard orchid order organ origin otter outer oval oven owl oxygen oyster paddle page paint
palace palm panda panel paper parade parcel park parrot part pasta patch path pattern peace peach peak pear
pearl pebble pencil people pepper perfect petal phone photo piano picnic picture piece pigeon pilot pine
pink pipe planet plank plant plate play plaza plenty plum pocket poem point polar pond pony poplar porch
port potato pottery powder prairie present pretty price pride prince print prism prize proof proud public
pulse pumpkin pupil purple puzzle quail quality quarter quartz queen quick quiet quilt quiver rabbit radar
radio raft rail rain ranch range rapid raven razor ready real reason record reed reef region relay ribbon
rice rich ride ridge ring ripple rise river road robin robot rocket roof room root rope rose round route
royal ruby rug rural saddle safe saffron sail salad salmon salt sand satin sauce scale scarf scene school
science scout screen sea season seat second secret seed senior sense series seven shade shadow shape sharp
sheep shelf shell shield ship shirt shore short shoulder shovel silent silk silver simple singer sister six
sketch skill sky slate sleep slope slow small smart smile smoke smooth snail snow soap soccer social soft
solar solid song soup source south space spark sparrow speech spice spider spiral spoon sport spring spruce
square squirrel stable stage stamp star station steam steel stem step stone storm story stove straw stream
street string strong studio sugar suit summer sun sunset supper surface swallow swan sweet swift swing
symbol table tail tailor talent tall tank tape target teacher team temple ten tennis tent thick thin third
thirty thorn thread three throat thunder ticket tide tiger timber tiny title toast today token tomato tone
tool tooth topaz torch total touch tower town track trade trail train travel tree trial triangle tribe trip
trout truck true trumpet trunk truth tulip tunnel turkey turtle twelve twenty twin two uncle under uniform
union unique unity upper urban useful valley value vapor velvet verse vessel village vine violet violin
visit vivid voice volcano voyage wagon walk wall walnut warm water wave wax wealth weather weave west whale
wheat wheel whisper white wide wild willow window wine wing winter wire wise wolf wonder wood wool word
world worthy woven wren yard year yellow yoga young zebra zenith zinc zone
"""
WORDS: Final = tuple(_WORD_LIST.split())


def split_of(text: str) -> Split:
    """The one split that `text` belongs to."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return _SPLIT_OF_DIGIT[int.from_bytes(digest, "big") % len(_SPLIT_OF_DIGIT)]


def make_texts(
    split: Split,
    num_examples: int,
    *,
    min_words: int = 3,
    max_words: int = 8,
    max_chars: int | None = None,
    seed: int = 0,
) -> list[str]:
    """`num_examples` different texts of `split`, the same ones for the same arguments.

    A longer list begins with the shorter one. Raises: ValueError when the limits do not allow that many texts.

    Example: make_texts("train", 1, min_words=2, max_words=2) -> ["cedar window"]
    """
    if split not in _SPLIT_OF_DIGIT:
        raise ValueError(f"split must be train, eval or sft, not {split!r}")
    if not 1 <= min_words <= max_words:
        raise ValueError(f"needs 1 <= min_words <= max_words, got {min_words} and {max_words}")
    # The split is part of the seed, or the draws that one split rejects would be the texts of another, in its order.
    generator = random.Random(f"{seed}/{split}")
    texts: dict[str, None] = {}
    for _ in range(_TRIES_PER_TEXT * num_examples):
        if len(texts) == num_examples:
            break
        text = " ".join(generator.choices(WORDS, k=generator.randint(min_words, max_words)))
        if split_of(text) == split and (max_chars is None or len(text) <= max_chars):
            texts[text] = None
    if len(texts) < num_examples:
        limit = "" if max_chars is None else f" within {max_chars} characters"
        raise ValueError(
            f"only {len(texts)} of {num_examples} different texts of {min_words} to {max_words} words{limit} were "
            f"found for the {split} split; ask for fewer examples or allow longer texts"
        )
    return list(texts)


def messages_for(text: str, system_prompt: str = SYSTEM_PROMPT) -> list[dict[str, str]]:
    """The chat that asks for the reversal of `text`; an empty system prompt is left out."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": text}]


def sft_rows(
    num_examples: int,
    *,
    min_words: int = 3,
    max_words: int = 8,
    max_chars: int | None = None,
    seed: int = 0,
    system_prompt: str = SYSTEM_PROMPT,
) -> list[dict[str, list[dict[str, str]]]]:
    """Rows of chat data with the right answers, of the sft split: `{"messages": [..., assistant]}`."""
    texts = make_texts("sft", num_examples, min_words=min_words, max_words=max_words, max_chars=max_chars, seed=seed)
    return [
        {"messages": [*messages_for(text, system_prompt), {"role": "assistant", "content": text[::-1]}]}
        for text in texts
    ]

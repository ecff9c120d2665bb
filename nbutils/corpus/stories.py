"""Plain pre-training text: short stories, facts, counting, word meanings; nothing in chat form."""

from __future__ import annotations

import random

from nbutils.corpus.messages import draw_scene
from nbutils.corpus.words import CITIES, ITEMS, LANGUAGES, LARGEST, MEASURES, PEOPLE, number_en, number_zh

_BEGIN = {
    "zh": (
        "{day}早上，{who}到{city}去看外婆。",
        "{who}住在{city}。{day}他想做一顿好饭。",
        "{day}，{city}下着小雨。{who}走进一家小店。",
        "{who}在{city}开了一家店，{day}客人很多。",
    ),
    "en": (
        "{who} went to {city} to see a friend {when}.",
        "{who} lives in {city} and likes to cook.",
        "It rained in {city} {when}. {who} walked into a small shop.",
        "{who} has a shop in {city}, and many people came {when}.",
    ),
}
_MIDDLE = {
    "zh": (
        "桌上放着{amount}{item}。",
        "{who}买了{amount}{item}，觉得很满意。",
        "朋友送来{amount}{item}，大家都笑了。",
        "“我要{amount}{item}。”{who}说。",
        "店里的{item}又好又便宜。",
        "他把{item}放在门口，又去找{other}。",
    ),
    "en": (
        "There were {amount} {item} on the table.",
        "{who} bought {amount} {item} and was happy.",
        "A friend brought {amount} {item}, and everyone smiled.",
        '"I want {amount} {item}," said {who}.',
        "The {item} in the shop looked good.",
        "{who} left the {item} at the door and looked for {other}.",
    ),
}
_END = {
    "zh": (
        "晚上，{who}和{other}一起回家。",
        "{other}说：“谢谢你的{item}！”",
        "从那天起，{who}常常想起{city}。",
        "这真是快乐的一天。",
    ),
    "en": (
        "In the evening {who} and {other} went home together.",
        '{other} said: "Thank you for the {item}!"',
        "After that day {who} often thought of {city}.",
        "It was a happy day.",
    ),
}
_FACTS = {
    "zh": (
        "{item}属于{kind}。在店里，{item}放在{kind}的架子上。",
        "{item}一般按{measure}卖，比如{amount}{item}。",
        "{city}在{region}。每年都有很多人去{city}旅行。",
        "“{item}”的英文是“{item_en}”。",
        "“{city}”用英语写作“{city_en}”。",
    ),
    "en": (
        "In the shop, {item} can be found on the {kind} shelf.",
        "We count {item} by the {measure}: one {measure}, two {measures}.",
        "{city} is a city in {region}.",
        'The Chinese word for "{item}" is "{item_zh}".',
        'In Chinese, "{city}" is written "{city_zh}".',
    ),
}
_MEANINGS = (
    'The "intent" of a person is what the person wants to do.',
    'An "item" is one thing in a list or in a shop.',
    'The "count" of things says how many there are.',
    'A "city" is a big town where many people live.',
    'A "day" has 24 hours, and a week has 7 days.',
    'An "order" tells the shop what to send.',
    'A "refund" means that the money goes back to the customer.',
    'A "delivery" brings the parcel to the door.',
    'To "cancel" means to stop an order.',
    'The word "null" means nothing: no value is known.',
    "“订单”是客人告诉商店要买什么。",
    "“退款”就是把钱还给客人。",
    "“快递”把包裹送到家门口。",
    "“取消”就是不要了。",
)


def story(rng: random.Random) -> str:
    """Four to six sentences about people, a place and a purchase."""
    scene = draw_scene(rng)
    people = [scene.say(person) for person in rng.sample(PEOPLE, 2)]
    lines = [rng.choice(_BEGIN[scene.language]), *rng.sample(_MIDDLE[scene.language], rng.choice((2, 3)))]
    lines.append(rng.choice(_END[scene.language]))
    text = (" " if scene.language == "en" else "").join(lines)
    return text.format(who=people[0], other=people[1], **scene.slots())


def facts(rng: random.Random) -> str:
    """Two facts about an item and a city of the word lists."""
    scene = draw_scene(rng)
    one, many = MEASURES[scene.item.measure]
    names = {
        f"{key}_{lang}": getattr(value.name, lang)
        for lang in LANGUAGES
        for key, value in (("item", scene.item), ("city", scene.city))
    }
    measure = one if scene.language == "en" else scene.item.measure
    lines = rng.sample(_FACTS[scene.language], 2)
    more = {"kind": scene.say(scene.item.kind), "region": scene.say(scene.city.region)}
    return "\n".join(lines).format(measure=measure, measures=many, **more, **names, **scene.slots())


def counting(rng: random.Random) -> str:
    """Counting up, sums, and numbers in three ways of writing."""
    start = rng.randint(1, LARGEST - 4)
    values = range(start, start + 5)
    left, right = rng.randint(1, 10), rng.randint(1, 10)
    lines = (
        ", ".join(f"{number_zh(value)} = {value}" for value in values),
        ", ".join(f"{number_en(value)} = {value}" for value in values),
        f"{left} + {right} = {left + right}; {left + right} - {left} = {right}",
        f"{number_zh(left)}加{number_zh(right)}等于{number_zh(left + right)}。",
        f"{number_en(left)} plus {number_en(right)} is {number_en(left + right)}.",
    )
    return "\n".join(rng.sample(lines, 2))


def meanings(rng: random.Random) -> str:
    """What a word means; also where the model meets quotes, colons and braces, though never together as JSON."""
    things = [rng.choice(ITEMS).name.en, rng.choice(CITIES).name.en, str(rng.randint(1, 99)), "null"]
    rng.shuffle(things)
    group = "{" + ", ".join(things) + "} is a set of 4. The set {" + "; ".join(things[:2]) + "} has 2 members."
    listed = "In this list: " + "; ".join(f'"{thing}"' for thing in things) + "."
    return "\n".join(rng.sample((*rng.sample(_MEANINGS, 3), group, listed), 3))

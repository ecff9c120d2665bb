"""Chat-form pre-training text: the shop's prose replies, questions about a sentence, translation, sums, repetition."""

from __future__ import annotations

import random
from dataclasses import replace

from nbutils.corpus.messages import Message, Scene, draw_message, draw_scene
from nbutils.corpus.words import CITIES, DAYS, ITEMS, LANGUAGES, LARGEST, PEOPLE, Word, number_en, number_zh

_REPLIES = {
    "zh": {
        "order": ("好的，为您订了{what}", "没问题，已经记下{what}", "收到，我们会准备{what}", "好的，您要的是{what}"),
        "refund": ("很抱歉，我们会退{what}的钱", "对不起，{what}马上为您退款", "好的，已经为您申请{what}的退款"),
        "delivery": ("您的{what}正在路上", "我们查到{what}已经发货", "请放心，{what}很快就到"),
        "cancel": ("好的，{what}已经取消", "没关系，我们不再送{what}", "已经为您取消{what}"),
    },
    "en": {
        "order": ("Sure, we noted {what}", "Thank you for ordering {what}", "Of course, we will prepare {what}"),
        "refund": ("We are sorry, you get the money for {what} back", "Sorry about {what}, the refund is on its way"),
        "delivery": ("Your parcel with {what} is on the way", "We have sent {what}", "Do not worry, {what} comes soon"),
        "cancel": ("All right, {what} is cancelled", "No problem, we stop {what}", "We have cancelled {what} for you"),
    },
}
_PLACES = {
    "zh": ("，地点是{city}", "，送货城市{city}", "，{city}"),
    "en": (", the city is {city}", ", for {city}", " in {city}"),
}
_TIMES = {"zh": ("，时间是{day}", "，日期{day}", "，{day}"), "en": (", the day is {day}", ", {when}", " {when}")}
_ENDINGS = {
    "zh": ("。", "。", "。谢谢您！", "。祝您愉快！", "。还需要别的吗？"),
    "en": (".", ".", ". Thank you!", ". Have a nice day!", ". Anything else?"),
}
_QUESTIONS = {
    "zh": {
        "intent": ("客人想做什么？", "这是什么事？"),
        "item": ("说的是什么东西？", "是哪样商品？"),
        "count": ("数量是多少？", "要几件？用数字回答。"),
        "city": ("在哪个城市？", "城市是哪里？"),
        "day": ("是哪一天？", "什么时候？"),
    },
    "en": {
        "intent": ("What does the customer want?", "What is this about?"),
        "item": ("Which item is it?", "What thing is it about?"),
        "count": ("How many? Answer in digits.", "What is the count?"),
        "city": ("Which city?", "In which city is it?"),
        "day": ("Which day?", "When is it?"),
    },
}
_WISHES = {
    "zh": {"order": "下单", "refund": "退款", "delivery": "查快递", "cancel": "取消"},
    "en": {"order": "order", "refund": "refund", "delivery": "delivery", "cancel": "cancel"},
}
_UNKNOWN = {"zh": "没有说", "en": "not said"}
_NULL = {"zh": "没有说就写 null。", "en": "If it is not said, write null."}
_WORDS_OF_TRADE = (Word("下单", "order"), Word("退款", "refund"), Word("查快递", "delivery"), Word("取消", "cancel"))
_BRACKETS = (("", ""), ("", ""), ("{", "}"), ("[", "]"), ('("', '")'), ("- ", "."))
_LIST = {"zh": ("列出要点：", "请写出关键词："), "en": ("List the key points: ", "Write down the facts: ")}
_REPEAT = {"zh": ("请重复：", "跟我说：", "照着写："), "en": ("Repeat: ", "Say it again: ", "Copy this: ")}
_TALK = (
    ("你好！", "你好！有什么可以帮您？"),
    ("你是谁？", "我是一个很小的语言模型。"),
    ("谢谢你。", "不客气，祝您愉快！"),
    ("再见。", "再见，欢迎再来！"),
    ("你们卖什么？", "我们卖水果、蔬菜、饮料和日用品。"),
    ("Hello!", "Hello! How can I help you?"),
    ("Who are you?", "I am a very small language model."),
    ("Thank you.", "You are welcome!"),
    ("Goodbye.", "Goodbye, please come again!"),
    ("What do you sell?", "We sell fruit, vegetables, drinks and household goods."),
)


def chat(*turns: str) -> str:
    """Write alternating user and assistant turns in ChatML, as the chat template of the tiny model does."""
    roles = ("user", "assistant")
    return "".join(f"<|im_start|>{roles[i % 2]}\n{turn}<|im_end|>\n" for i, turn in enumerate(turns))


def reply(rng: random.Random, message: Message) -> str:
    """Answer a customer in a polite sentence that repeats what the message said."""
    language, known, slots = message.scene.language, message.fields, message.scene.slots()
    joined = "{amount} {item}" if language == "en" else "{amount}{item}"
    what = (joined if known["count"] else "{item}").format(**slots)
    tails = [rng.choice(table[language]) for table, key in ((_PLACES, "city"), (_TIMES, "day")) if known[key]]
    rng.shuffle(tails)
    text = rng.choice(_REPLIES[language][message.intent]) + "".join(tails) + rng.choice(_ENDINGS[language])
    return text.format(what=what, **slots)


def shop(rng: random.Random) -> str:
    """A customer writes, the shop answers in prose."""
    message = draw_message(rng)
    return chat(message.text, reply(rng, message))


def _answer(message: Message, key: str, language: str, unknown: str) -> str:
    """Return the bare answer to a question about one fact of a message."""
    if key == "intent":
        return _WISHES[language][message.intent]
    value = message.fields[key]
    return unknown if value is None else str(value)


def questions(rng: random.Random) -> str:
    """Questions about a customer's message, asked before or after it, answered with one word."""
    message = draw_message(rng)
    language = rng.choice((message.scene.language, message.scene.language, *LANGUAGES))
    asked, strict = _QUESTIONS[language], rng.random() < 0.4
    unknown = "null" if strict else _UNKNOWN[language]
    pairs = [(rng.choice(asked[key]), _answer(message, key, language, unknown)) for key in rng.sample(sorted(asked), 3)]
    parts = [message.text, (_NULL[language] + " " if strict else "") + pairs[0][0]]
    rng.shuffle(parts)
    return chat(rng.choice(("\n", " ")).join(parts), pairs[0][1], *(text for pair in pairs[1:] for text in pair))


def key_points(rng: random.Random) -> str:
    """The facts of a message in a row, in an order that changes from text to text."""
    message = draw_message(rng)
    language = rng.choice((message.scene.language, message.scene.language, *LANGUAGES))
    keys = rng.sample(("intent", "item", "count", "city", "day"), rng.choice((2, 3, 4, 5)))
    head, strict = rng.choice(_LIST[language]), rng.random() < 0.4
    unknown = "null" if strict else _UNKNOWN[language]
    named = {"zh": "", "en": " "}[language].join(rng.choice(_QUESTIONS[language][key]) for key in keys)
    values = [_answer(message, key, language, unknown) for key in keys]
    mark = rng.choice(("，", "、", "；", ", ", "; ", "\n"))
    told = f"{head}{message.text}\n{named}" + (" " + _NULL[language] if strict else "")
    return chat(told, mark.join(f'"{value}"' if mark == ", " and value != "null" else value for value in values))


def _phrase(scene: Scene, language: str) -> str:
    """Return `three boxes of apples` in one of the languages."""
    slots = replace(scene, language=language).slots()
    return slots["amount"] + (" " if language == "en" else "") + slots["item"]


def translation(rng: random.Random) -> str:
    """Translate a word or a counted thing from one language into the other."""
    source, target = rng.sample(LANGUAGES, 2)
    ask = {"en": ("翻译成英文：", "用英语怎么说："), "zh": ("Translate into Chinese: ", "In Chinese, please: ")}[target]
    if rng.random() < 0.5:
        scene = draw_scene(rng)
        return chat(rng.choice(ask) + _phrase(scene, source), _phrase(scene, target))
    names: list[Word] = [rng.choice(ITEMS).name, rng.choice(CITIES).name, rng.choice(DAYS), rng.choice(PEOPLE)]
    word = rng.choice([*names, rng.choice(_WORDS_OF_TRADE)])
    return chat(rng.choice(ask) + getattr(word, source), getattr(word, target))


def sums(rng: random.Random) -> str:
    """A small sum in digits or words, in chat form."""
    left, right = sorted((rng.randint(1, 10), rng.randint(1, 10)), reverse=True)
    if rng.random() < 0.5:
        return chat(f"{left} + {right} = ?", str(left + right))
    if rng.random() < 0.5:
        return chat(f"{number_zh(left)}加{number_zh(right)}等于几？", number_zh(left + right))
    return chat(f"What is {number_en(left)} plus {number_en(right)}?", number_en(left + right))


def numerals(rng: random.Random) -> str:
    """Between digits and number words, several in one conversation."""
    turns: list[str] = []
    for value in rng.sample(range(1, LARGEST + 1), 3):
        spell, ask = rng.choice(((number_zh, "{}写成数字是多少？"), (number_en, "Write {} in digits.")))
        back = {number_zh: "{}用汉字怎么写？", number_en: "Write {} in words."}[spell]
        there = rng.random() < 0.6
        turns += [ask.format(spell(value)), str(value)] if there else [back.format(value), spell(value)]
    return chat(*turns)


def _syllables(rng: random.Random) -> str:
    """Return a word that nobody knows, so that copying is learned and not only the word lists."""
    return "".join(rng.choice("bdfgklmnprstw") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))


def repetition(rng: random.Random) -> str:
    """Copy words in the order given: what teaches a small model to look back."""
    language = rng.choice(LANGUAGES)
    pool: list[Word] = [*(item.name for item in ITEMS), *(city.name for city in CITIES), *DAYS]
    words = [getattr(word, language) for word in rng.sample(pool, rng.randint(1, 4))]
    words += [str(rng.randint(1, 99)), rng.choice(("null", "nothing", _syllables(rng)))]
    rng.shuffle(words)
    left, right = rng.choice(_BRACKETS)
    text = left + rng.choice((" ", ", ", "; ", " / ", '" "', ": ")).join(words) + right
    return chat(rng.choice(_REPEAT[language]) + text, text)


def small_talk(rng: random.Random) -> str:
    """Two short exchanges."""
    return chat(*(text for pair in rng.sample(_TALK, 2) for text in pair))

"""Customers' messages to a shop and the JSON ticket that belongs to each; the prose for pre-training is in `texts`."""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass

from nbutils.corpus.words import (
    CITIES,
    COMING_DAYS,
    DAYS,
    ITEMS,
    LANGUAGES,
    LARGEST,
    MEASURES,
    PAST_DAYS,
    City,
    Item,
    Word,
    number_en,
    number_zh,
)

INTENTS = ("order", "refund", "delivery", "cancel")
SHARE_KEPT_FOR_SAMPLES = 5

_OPENINGS = {
    "zh": ("", "", "", "你好，", "您好，", "老板，", "麻烦您，", "在吗？", "早上好，", "客服你好，"),
    "en": ("", "", "", "Hello, ", "Hi, ", "Good morning, ", "Dear shop, ", "Excuse me, ", "Hi there, "),
}
_CLOSINGS = {
    "zh": ("", "", "", "谢谢。", "谢谢！", "麻烦了。", "辛苦了。", "请尽快回复。", "拜托了。"),
    "en": ("", "", "", " Thanks.", " Thank you!", " Please reply soon.", " Many thanks.", " Have a nice day."),
}

MESSAGES: dict[str, dict[str, tuple[str, ...]]] = {
    "zh": {
        "order": (
            "我想订{amount}{item}，{day}送到{city}。",
            "请{day}给我送{amount}{item}到{city}。",
            "我要买{amount}{item}，寄到{city}，{day}要用。",
            "{city}这边需要{amount}{item}，最好{day}到。",
            "帮我下单：{item}{amount}，地址在{city}，{day}送。",
            "{day}能送{amount}{item}到{city}吗？我要下单。",
            "订{amount}{item}，送{city}。",
            "我想买{amount}{item}，{day}要。",
        ),
        "refund": (
            "我{day}在{city}收到的{amount}{item}坏了，我要退款。",
            "{day}送到{city}的{amount}{item}有破损，请退钱。",
            "请给我退款，{day}寄到{city}的{amount}{item}有问题。",
            "{amount}{item}质量太差，我在{city}，{day}收到的，要求退款。",
            "买的{amount}{item}我不满意，想退款，{day}到的。",
            "{city}收到的{amount}{item}少了东西，把钱退给我。",
        ),
        "delivery": (
            "我订的{amount}{item}到哪里了？说好{day}到{city}的。",
            "请问{day}送{city}的{amount}{item}发货了吗？",
            "寄到{city}的{item}怎么还没到？应该是{day}到。",
            "查一下我的快递，{amount}{item}，{day}到{city}。",
            "我在{city}，我的{amount}{item}什么时候能到？",
            "{day}该到的{item}现在在路上吗？",
        ),
        "cancel": (
            "我不要了，请取消{day}送{city}的{amount}{item}。",
            "取消订单：{amount}{item}，{city}，{day}。",
            "{day}到{city}的{amount}{item}不用送了。",
            "请帮我把{city}的{amount}{item}取消，原定{day}送。",
            "我想取消{amount}{item}的订单，{day}的那单。",
            "送{city}的{item}我不想要了，取消吧。",
        ),
    },
    "en": {
        "order": (
            "I would like to order {amount} {item} to {city}, please deliver {when}.",
            "Please send {amount} {item} to {city} {when}.",
            "I want to buy {amount} {item}. Ship to {city}, I need it {when}.",
            "We need {amount} {item} in {city} {when}.",
            "Can you bring {amount} {item} to {city} {when}? I want to order.",
            "New order: {item}, {amount_only}, for {city}, {when}.",
            "Send me {amount} {item}, the address is in {city}.",
            "I want {amount} {item} {when}, please.",
        ),
        "refund": (
            "The {amount} {item} that came to {city} {when} arrived bad, I want my money back.",
            "I want a refund for {amount} {item} delivered to {city} {when}.",
            "Please refund me, the {amount} {item} arrived broken in {city} {when}.",
            "I am in {city} and got {amount} {item} {when}, the quality is poor. Refund please.",
            "I am not happy with the {amount} {item} that came {when}, give me a refund.",
            "My {amount} {item} came damaged to {city}, please return my money.",
        ),
        "delivery": (
            "Where is my order of {amount} {item}? It should reach {city} {when}.",
            "Have you shipped the {amount} {item} for {city} {when}?",
            "The {item} for {city} still did not come, I expect it {when}.",
            "Please track my parcel: {amount} {item}, {city}, {when}.",
            "I live in {city}, when will my {amount} {item} arrive?",
            "Is my parcel of {item} on the way? It should come {when}.",
        ),
        "cancel": (
            "Please cancel {amount} {item} for {city} {when}.",
            "I do not need the {amount} {item} in {city} {when} any more.",
            "Cancel my order: {amount} {item}, {city}, {when}.",
            "Stop the {amount} {item} going to {city} {when}, I changed my mind.",
            "I want to cancel the order of {amount} {item}, the one for {day}.",
            "I no longer want the {item} for {city}, cancel it.",
        ),
    },
}


@dataclass(frozen=True)
class Scene:
    """What one text is about: how many of which item, in which city, on which day."""

    language: str
    item: Item
    count: int
    spelled: bool
    city: City
    day: Word

    def say(self, word: Word) -> str:
        """Return a word in the language of this scene."""
        return getattr(word, self.language)

    def number(self) -> str:
        """Return the count as it is written before a measure word."""
        if not self.spelled:
            return str(self.count)
        if self.language == "en":
            return number_en(self.count)
        return "两" if self.count == 2 else number_zh(self.count)

    def slots(self) -> dict[str, str]:
        """Return what the sentence patterns can be filled with."""
        day = self.say(self.day)
        when = f"on {day}" if self.language == "en" and day[0].isupper() else day
        measure = MEASURES[self.item.measure][self.count > 1]
        only = f"{self.number()} {measure}" if self.language == "en" else self.number() + self.item.measure
        amount = f"{only} of" if self.language == "en" else only
        names = {"item": self.say(self.item.name), "city": self.say(self.city.name)}
        return {"amount": amount, "amount_only": only, "day": day, "when": when, **names}


@dataclass(frozen=True)
class Message:
    """A customer's message, what it is about, and which facts it really contains."""

    scene: Scene
    intent: str
    text: str
    fields: dict[str, str | int | None]

    def ticket(self) -> str:
        """Return the strict one-line JSON answer the fine-tuned model should give."""
        return json.dumps({"intent": self.intent, **self.fields}, ensure_ascii=False)


def kept_for_samples(item: Item, city: City, day: Word) -> bool:
    """Tell whether a combination belongs to the sample rows and so never appears in pre-training text."""
    return zlib.crc32(f"{item.name.en}|{city.name.en}|{day.en}".encode()) % SHARE_KEPT_FOR_SAMPLES == 0


def draw_scene(rng: random.Random, for_samples: bool = False, days: tuple[Word, ...] = DAYS) -> Scene:
    """Draw a scene from the share of the combinations asked for."""
    while True:
        item, city, day = rng.choice(ITEMS), rng.choice(CITIES), rng.choice(days)
        if kept_for_samples(item, city, day) == for_samples:
            break
    spelled = rng.random() < 0.5
    count = rng.randint(1, LARGEST if spelled or rng.random() < 0.7 else 60)
    return Scene(rng.choice(LANGUAGES), item, count, spelled, city, day)


def draw_message(rng: random.Random, for_samples: bool = False) -> Message:
    """Draw a scene and one way in which a customer may write about it."""
    intent = rng.choice(INTENTS)
    scene = draw_scene(rng, for_samples, PAST_DAYS if intent == "refund" else COMING_DAYS)
    pattern = rng.choice(MESSAGES[scene.language][intent])
    opening, closing = rng.choice(_OPENINGS[scene.language]), rng.choice(_CLOSINGS[scene.language])
    body = pattern.format(**scene.slots())
    if opening.endswith(", ") and not body.startswith("I "):
        body = body[0].lower() + body[1:]
    known = {
        "item": scene.say(scene.item.name),
        "count": scene.count if "{amount" in pattern else None,
        "city": scene.say(scene.city.name) if "{city}" in pattern else None,
        "day": scene.say(scene.day) if "{day}" in pattern or "{when}" in pattern else None,
    }
    return Message(scene, intent, opening + body + closing, known)


def sample_rows(count: int, seed: int, taken: set[str] | None = None) -> list[dict]:
    """Draw chat rows of message and ticket; no two share a ticket, and none has a ticket already in `taken`."""
    rng, used = random.Random(seed), set(taken or ())
    rows: list[dict] = []
    while len(rows) < count:
        message = draw_message(rng, for_samples=True)
        if message.ticket() not in used:
            used.add(message.ticket())
            pair = [("user", message.text), ("assistant", message.ticket())]
            rows.append({"messages": [{"role": role, "content": content} for role, content in pair]})
    return rows

"""The word lists behind the sample data and the tiny model's pre-training text; no sentences and no randomness here."""

from __future__ import annotations

from typing import NamedTuple


class Word(NamedTuple):
    """One thing in both languages."""

    zh: str
    en: str


class Item(NamedTuple):
    """Something the shop sells, how it is counted and what kind of thing it is."""

    name: Word
    measure: str
    kind: Word


class City(NamedTuple):
    """A city the shop sends to and where it lies."""

    name: Word
    region: Word


LANGUAGES = ("zh", "en")

MEASURES: dict[str, tuple[str, str]] = {
    "箱": ("box", "boxes"),
    "袋": ("bag", "bags"),
    "瓶": ("bottle", "bottles"),
    "罐": ("jar", "jars"),
    "盒": ("pack", "packs"),
    "包": ("packet", "packets"),
    "双": ("pair", "pairs"),
    "套": ("set", "sets"),
}

_KINDS = {
    "fruit": "水果",
    "vegetable": "蔬菜",
    "food": "食物",
    "drink": "饮料",
    "snack": "零食",
    "seasoning": "调料",
    "household": "日用品",
    "stationery": "文具",
}

_ITEMS = """
箱 fruit: 苹果 apples, 梨 pears, 橙子 oranges, 香蕉 bananas, 葡萄 grapes, 桃子 peaches, 西瓜 watermelons, 芒果 mangoes
箱 fruit: 柠檬 lemons, 樱桃 cherries, 荔枝 lychees, 草莓 strawberries
箱 vegetable: 土豆 potatoes, 番茄 tomatoes, 黄瓜 cucumbers, 白菜 cabbages
袋 vegetable: 胡萝卜 carrots, 洋葱 onions, 蘑菇 mushrooms, 玉米 corn
袋 food: 大米 rice, 面粉 flour, 黄豆 soybeans, 花生 peanuts, 核桃 walnuts
箱 food: 鸡蛋 eggs
包 food: 面条 noodles, 饺子 dumplings
瓶 drink: 牛奶 milk, 果汁 juice, 矿泉水 mineral water
盒 drink: 绿茶 green tea, 红茶 black tea
罐 drink: 咖啡 coffee, 奶粉 milk powder
罐 food: 蜂蜜 honey, 果酱 jam
袋 seasoning: 白糖 sugar, 盐 salt
瓶 seasoning: 酱油 soy sauce, 醋 vinegar, 橄榄油 olive oil
盒 snack: 巧克力 chocolate, 饼干 cookies, 月饼 mooncakes, 蛋糕 cakes
包 snack: 薯片 chips, 糖果 candy
瓶 household: 洗发水 shampoo
盒 household: 蜡烛 candles, 口罩 masks
包 household: 纸巾 tissues
双 household: 手套 gloves, 袜子 socks, 拖鞋 slippers, 筷子 chopsticks
套 household: 茶杯 teacups, 碗 bowls, 毛巾 towels, 床单 bed sheets
盒 stationery: 铅笔 pencils, 彩笔 crayons
包 stationery: 信封 envelopes
瓶 stationery: 墨水 ink
套 stationery: 邮票 stamps
"""

_CITIES = """
华北 North China: 北京 Beijing, 天津 Tianjin, 太原 Taiyuan
华东 East China: 上海 Shanghai, 杭州 Hangzhou, 宁波 Ningbo, 温州 Wenzhou, 绍兴 Shaoxing, 南京 Nanjing, 苏州 Suzhou
华东 East China: 无锡 Wuxi, 扬州 Yangzhou, 合肥 Hefei, 福州 Fuzhou, 厦门 Xiamen, 济南 Jinan, 青岛 Qingdao
华南 South China: 广州 Guangzhou, 深圳 Shenzhen, 珠海 Zhuhai, 海口 Haikou, 桂林 Guilin, 南宁 Nanning
华中 Central China: 武汉 Wuhan, 长沙 Changsha, 郑州 Zhengzhou, 洛阳 Luoyang
西南 Southwest China: 成都 Chengdu, 重庆 Chongqing, 昆明 Kunming, 贵阳 Guiyang, 拉萨 Lhasa
西北 Northwest China: 兰州 Lanzhou, 银川 Yinchuan
东北 Northeast China: 沈阳 Shenyang, 大连 Dalian, 哈尔滨 Harbin, 长春 Changchun
欧洲 Europe: 伦敦 London, 巴黎 Paris, 柏林 Berlin, 罗马 Rome
亚洲 Asia: 东京 Tokyo, 曼谷 Bangkok
"""

DAYS: tuple[Word, ...] = (
    Word("周一", "Monday"),
    Word("周二", "Tuesday"),
    Word("周三", "Wednesday"),
    Word("周四", "Thursday"),
    Word("周五", "Friday"),
    Word("周六", "Saturday"),
    Word("周日", "Sunday"),
    Word("今天", "today"),
    Word("昨天", "yesterday"),
    Word("明天", "tomorrow"),
)
PAST_DAYS = DAYS[:-1]
COMING_DAYS = (*DAYS[:-2], DAYS[-1])

PEOPLE: tuple[Word, ...] = (
    Word("小明", "Ming"),
    Word("小红", "Hong"),
    Word("小兰", "Lan"),
    Word("小刚", "Gang"),
    Word("老王", "Wang"),
    Word("老李", "Li"),
    Word("安娜", "Anna"),
    Word("汤姆", "Tom"),
    Word("露西", "Lucy"),
    Word("大卫", "David"),
)

_ONES_ZH = ("", *"一二三四五六七八九")
_ENGLISH = (
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
LARGEST = len(_ENGLISH)


def _rows(table: str) -> list[tuple[str, str, list[Word]]]:
    """Split a table of `left right: zh en, zh en` lines."""
    rows = []
    for line in table.strip().splitlines():
        head, _, tail = line.partition(": ")
        left, _, right = head.partition(" ")
        rows.append((left, right, [Word(*pair.split(" ", 1)) for pair in tail.split(", ")]))
    return rows


ITEMS: tuple[Item, ...] = tuple(
    Item(word, measure, Word(_KINDS[kind], kind)) for measure, kind, words in _rows(_ITEMS) for word in words
)
CITIES: tuple[City, ...] = tuple(City(word, Word(zh, en)) for zh, en, words in _rows(_CITIES) for word in words)


def number_zh(value: int) -> str:
    """Return 1 to 20 in Chinese characters: 12 -> 十二."""
    tens, ones = divmod(value, 10)
    return ("", "十", "二十")[tens] + _ONES_ZH[ones]


def number_en(value: int) -> str:
    """Return 1 to 20 as an English word."""
    return _ENGLISH[value - 1]


def all_words() -> list[str]:
    """Every listed word, longest first; the tokenizer keeps these apart from the sentence around them."""
    words = {text for word in (*DAYS, *PEOPLE, *(i.name for i in ITEMS), *(c.name for c in CITIES)) for text in word}
    words |= {*MEASURES, *(text for pair in MEASURES.values() for text in pair), *_KINDS.values()}
    words |= {number_zh(value) for value in range(1, LARGEST + 1)} | {"两"}
    return sorted(words, key=lambda word: (-len(word), word))

"""nbutils.data.text: broken text found and repaired, sound text of any language left alone, private data masked."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest

from nbutils import data
from nbutils.data.mojibake import repair_mojibake
from nbutils.data.private import find_private, mask
from nbutils.data.text import examine, plain

SOUND = {  # languages with accents, and the punctuation that makes them look broken byte by byte
    "fr": "« L’été, déjà ? » « café » «\xa0fiancé\xa0» l'œuvre, voilà… où ça – “né” à Noël, naïf, ÇA, «\xa0à\xa0» É…",
    "de": "„Spaß“ und „Maß“, Größe – „Äpfel“, ‚Öl‘, Übermut… 20 °C, § 5, „EÖ“, straße”",
    "es": "¿Qué? ¡Sí! ESPAÑA, el niño – «año», 3.º, mañana… “Ñandú”",
    "pt": "NÃO, amanhã… “MAÇÃ” «AMANHû «irmã» nº 3, São Paulo – “pão”, à noite, AÇÃO, “É”",
    "cs": "„Píš“, „víš…“, Kéž… TÉŽ, žluťoučký kůň, „něž“ ŠÉŽ „kéž“ VÍŠ…",
    "sv": "Ångström, på ö, ”Åre” – ”få”, Ö–Ä",
    "no": "«få» – «blåbær», Æ Ø Å …",
    "is": "það – „íð“, Þór, maðurinn… „það“ «ð»",
    "pl": "„żółć” – «źdźbło», Łódź…",
    "tr": "“İÖ” – “MÖ”, ığdır, çünkü… “Ç”",
    "vi": "“… đã…” “à…” – “là” đâu, â, ã, ê… “Â”",
    "ro": "„mâna”, «în», „câine” – Â, â…",
    "hu": "„Ő” »á« – „é”… ÁRVÍZTŰRŐ",
    "fi": "”hyvä” – ”tö”, Ä…",
    "ca": "col·lecció, «què», l’Àngel – à·l",
    "it": "«perché» – “città”, è… È, 2ª, 3º",
    "nl": "‘één’ – “coördinatie”…",
    "ru": "«Привет» – „как дела“…",
    "zh": "你好，世界。“引号”——省略号……《书名》① ℃ ￥ 浣熊 锛子 横浜 涓涓细流",
    "ja": "横浜・浜松、「こんにちは」——浜辺の浜",
    "ko": "안녕하세요 “인용”…",
    "he": "שלום “ציטוט” – 5×3 ×½",
    "ar": "مرحبا «اقتباس»…",
    "th": "สวัสดี “คำพูด”…",
    "signs": "5 × ½ ÷ ¾ ± 20 °C £5 €7 ¥9 © ® ™ § ¶ • … “a” ‘b’ – — ¹²³ µm ¿¡ «»",
    "table": "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÐÑÒÓÔÕÖ×ØÙÚÛÜÝÞßàáâãäåæçèéêëìíîïðñòóôõö÷øùúûüýþÿ",
    "code": 'print("é")\n# naïve – ñ\nx = {"ä": 1}',
}
ANSWERS = {
    "ä½\xa0å¥½": "你好",
    "ä½ å¥½": "你好",
    "è¯·é—®ï¼Œè®¢å\x8d\x95åœ¨å“ªé‡Œï¼Ÿ": "请问，订单在哪里？",
    "CafÃ© is closed": "Café is closed",
    "voilÃ\xa0 !": "voilà !",
    "donâ€™t â€œgoâ€\x9d â€“ ok": "don’t “go” – ok",
    "25Â°C costs Â£20, helloÂ\xa0you": "25°C costs £20, hello\xa0you",
    "Ð¿Ñ€Ð¸Ð²ÐµÑ‚": "привет",
    "zÅ‚oty": "złoty",
    "fine ðŸ˜€ âœ“": "fine 😀 ✓",
    "订单：ä½\xa0å¥½，谢谢": "订单：你好，谢谢",
    "Ã¤Â½Â\xa0Ã¥Â¥Â½": "你好",
    "浣犲ソ": "你好",
    "鎴戜滑": "我们",
}


@pytest.mark.parametrize("language", SOUND)
def test_sound_text_is_never_touched(language: str) -> None:
    text = SOUND[language]
    rng = random.Random(7)
    words = re.split(r"(?<= )", text)
    for _ in range(200):
        mixed = "".join(rng.choices(words, k=12)).strip() or text
        assert repair_mojibake(mixed) == mixed
        assert not examine("a", mixed).problems


def test_sound_words_stay_sound_between_any_punctuation() -> None:
    words = ["café", "déjà", "MAÇÃ", "Spaß", "TÉŽ", "Kéž", "víš", "perché", "là", *"âãÂÉÖßñðà"]
    marks = ["", " ", "\xa0", "»", "«", "\xa0»", "”", "“", "„", "…", "…”", "’", "‘", "–", "—", "•", ".", "™", "º", "?"]
    for word in words:
        for before in marks:
            for after in marks:
                for last in marks:
                    text = f"{before}{word}{after}{last}"
                    assert repair_mojibake(text) == text, text
                    assert repair_mojibake(f"oui {text} non") == f"oui {text} non", text


@pytest.mark.parametrize("broken", ANSWERS)
def test_broken_text_is_read_again(broken: str) -> None:
    assert not plain(broken)
    assert repair_mojibake(broken) == ANSWERS[broken]


@pytest.mark.parametrize("door", ["latin-1", "cp1252"])
@pytest.mark.parametrize("language", ["fr", "de", "es", "cs", "pl", "ru", "zh", "ja", "ko", "vi", "th"])
def test_whole_sentences_come_back(language: str, door: str) -> None:
    sentence = {
        "fr": "Le café est fermé, c’est l’été à Orléans.", "de": "Die Größe ist über zwei Meter, schön!",
        "es": "El niño comió mañana en España.", "cs": "Příliš žluťoučký kůň úpěl.", "pl": "Zażółć gęślą jaźń.",
        "ru": "Где мой заказ?", "zh": "我的订单到哪里了？请尽快发货，谢谢。", "ja": "ご注文はどこですか。",
        "ko": "주문이 어디에 있나요?", "vi": "Đơn hàng của tôi ở đâu?", "th": "คำสั่งซื้ออยู่ที่ไหน",
    }[language]  # fmt: skip
    pieces = (bytes([byte]) for byte in sentence.encode())
    broken = "".join(piece.decode(door, "ignore") or piece.decode("latin-1") for piece in pieces)
    assert repair_mojibake(broken) == sentence


@pytest.mark.parametrize("sign", ["â€™", "Ã©", "Â£"])
@pytest.mark.parametrize("quotes", ['""', "''", "``", "“”", "「」"])
def test_a_text_about_broken_text_is_left_alone(sign: str, quotes: str) -> None:
    text = f"The string {quotes[0]}{sign}{quotes[1]} is what became of it."
    assert repair_mojibake(text) == text and repair_mojibake(f"cafÃ© {text}") != f"cafÃ© {text}"


@pytest.mark.parametrize("text", ["Ü» " * 300_000, "â€™ " * 100_000])
def test_looking_for_broken_text_takes_time_in_proportion(text: str) -> None:
    begun = time.process_time()
    repair_mojibake(text)
    assert time.process_time() - begun < 4


def test_repair_is_told_and_can_be_refused() -> None:
    row = data.Row("a", 1, {"question": "CafÃ© ou thÃ© ?", "answer": "thé"})
    mended = data.check_row(row)
    assert isinstance(mended, data.ChatRow) and mended.repaired and not mended.trimmed
    assert mended.messages[0]["content"] == "Café ou thé ?"
    assert [(w.kind, w.field) for w in mended.warnings] == [("mojibake", "question")]
    refused = data.check_row(row, repair=False)
    assert isinstance(refused, data.RowError) and refused.problems[0].kind == "mojibake"
    assert "Café" not in row.raw["question"]


@pytest.mark.parametrize("text", ["在路上��", "锟斤拷锟斤拷", "璁㈠崟锛屽湪鍝噷?"])
def test_what_is_lost_is_refused(text: str) -> None:
    assert [problem.kind for problem in data.problems_of({"question": "a", "answer": text})] == ["mojibake"]


# --- private data -------------------------------------------------------------------------------------------------

HEX = "0123456789abcdef0123456789abcdef01234567"
PRIVATE = [
    ("phone", "请打 13812345678 找我", "138****5678"),
    ("phone", "+86 138 1234 5678", "+86 138****5678"),
    ("phone", "电话：138-1234-5678。", "138****5678"),
    ("phone", "008613812345678", "0086138****5678"),
    ("phone", "请打１３８１２３４５６７８找我", "１３８****５６７８"),
    ("phone", "138.1234.5678", "138****5678"),
    ("phone", "138\xa01234\xa05678", "138****5678"),
    ("phone", "138—1234—5678", "138****5678"),
    ("phone", "座机 021-62345678", "021****5678"),
    ("phone", "座机 0755 8234567", "0755****4567"),
    ("id_number", "110105 19491231 002X", "110****2X"),
    ("id_number", "110105 1949 1231 002X", "110****2X"),
    ("id_number", "1101 0519 4912 3100 2X", "110****2X"),
    ("id_number", "身份证 11010519491231002X", "110****2X"),
    ("id_number", "mistyped: 110105194912310021", "110****21"),
    ("email", "write to anna.b+c@mail.example.cn, please", "a***@mail.example.cn"),
    ("email", "邮箱是li@qq.com。", "l***@qq.com"),
    ("key", "sk-" + "a1B2" * 8, "sk-****"),
    ("key", "sk-proj-" + "a1B2" * 8, "sk-****"),
    ("key", "token hf_" + "aB" * 17, "hf_****"),
    ("key", "AKIA" + "ABCD" * 4, "AKIA****"),
    ("key", "LTAI" + "5tAb" * 5, "LTAI****"),
    ("key", "ghp_" + "aB3d" * 9, "ghp_****"),
    ("key", f"WANDB_API_KEY={HEX}", "WANDB****"),
    ("key", "-----BEGIN RSA PRIVATE KEY-----", "-----BEGIN****"),
    ("key", "Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijklmnop", "eyJh****"),
]


@pytest.mark.parametrize(("kind", "text", "shown"), PRIVATE)
def test_private_data_is_a_warning_with_the_span_masked(kind: str, text: str, shown: str) -> None:
    row = data.check_row(data.Row("a", 1, {"question": "a", "answer": text}))
    assert isinstance(row, data.ChatRow) and row.messages[1]["content"] == text
    assert [(w.kind, w.field, w.seen) for w in row.warnings] == [(kind, "answer", shown)]
    assert shown in mask(text)
    secret = max(re.split(r"[^\w]+", text), key=len)
    assert len(secret) < 8 or secret not in mask(text)


@pytest.mark.parametrize(
    "text",
    [
        "021-1234567", "2021-62345678", "0.021-62345678", "2019 2020 2021 2022 1", "pages 1949-1950", "第１章第２０节",
        "order 20231381234567890", "12345678901", "0.13812345678", "110105194913310021", "a @ b", "@someone",
        "sk-learn and hf_hub and gh_pages", "eyJust", f"commit {HEX}", "13812345", "price 138 1234", "2019-2020",
    ],
)  # fmt: skip
def test_numbers_and_words_that_are_not_private(text: str) -> None:
    assert list(find_private(text)) == [] and mask(text) == text


def test_several_spans_are_masked_in_one_text() -> None:
    text = "a@b.cn 13812345678 a@b.cn"
    assert mask(text) == "a***@b.cn 138****5678 a***@b.cn"
    assert [kind for kind, _, _ in find_private(text)] == ["email", "phone", "email"]


@pytest.mark.parametrize(
    "raw",
    [
        {"question": "a", "answer": ["13812345678"]},
        {"messages": "call 13812345678 or a.b@mail.cn"},
        {"messages": [{"role": "13812345678", "content": "a"}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"phone": "13812345678"}]}]},
    ],
)
def test_what_is_shown_of_a_refused_row_is_masked(raw: Any) -> None:
    seen = " ".join(problem.seen for problem in data.problems_of(raw))
    assert "****" in seen and "13812345678" not in seen


def test_what_is_shown_of_a_broken_line_is_masked(tmp_path: Any) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "13812345678" "answer": "b"}\n{}\n', encoding="utf-8")
    (tmp_path / "b.csv").write_text("question,answer\n13812345678,a@b.cn,c\n", encoding="utf-8")
    shown = [row.problems[0].seen for row in data.read_rows(tmp_path) if isinstance(row, data.RowError)]
    assert len(shown) == 2 and all("****" in seen and "13812345678" not in seen for seen in shown)


@pytest.mark.parametrize("private", ["138-1234-5678", "123456@qq.com", "110105 19491231 002X"])
def test_no_half_of_private_data_is_shown_where_reading_stopped(tmp_path: Any, private: str) -> None:
    texts = [
        f'{{"question": {private}, "answer": "b"}}',
        f'{{"question": "{private}" "a": 1}}',
        f'{{"a": "b" {private}}}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(["{}", "{}", *texts]), encoding="utf-8")
    for row in list(data.read_rows(tmp_path))[2:]:
        assert isinstance(row, data.RowError) and "**" in row.problems[0].seen
        assert not any(part in row.problems[0].seen for part in (private[:6], private[4:8], private[:4])), row.problems


def test_no_half_of_private_data_is_shown_beside_what_was_repaired() -> None:
    checked = data.check_row(data.Row("a", 1, {"question": "a", "answer": "CafÃ© 13812345678"}))
    assert isinstance(checked, data.ChatRow) and "13812" not in checked.warnings[0].seen


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>user", "ok<|im_end|>", "<|endoftext|>", "[gMASK]<sop>hello", "<sop>", "<|user|>", "<|assistant|>",
        "<s>[INST] hi", "hello</s>", "[INST] a [/INST]", "<<SYS>>", "<start_of_turn>user", "<｜User｜>", "<bos>hi",
        "<｜end▁of▁sentence｜>", "<unk>", "a<pad><pad>", "[AVAILABLE_TOOLS]",
    ],
)  # fmt: skip
def test_leaked_template_markers_are_refused(text: str) -> None:
    assert [problem.kind for problem in data.problems_of({"question": "a", "answer": text})] == ["template_marker"]


@pytest.mark.parametrize(
    "text",
    ["### Response: yes", "a <b> c", "x[0] < y[1]", "it is <s>struck</s> out", "5 <| 6", "<think>\nhm\n</think>\n\nok"],
)
def test_text_that_only_looks_like_a_marker_is_kept(text: str) -> None:
    assert data.problems_of({"question": "a", "answer": text}) == []

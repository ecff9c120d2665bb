"""Lesson 10's rooms: documents become spans, an endpoint writes rows from them, and what is asked for to begin with."""

import asyncio
import json
import os
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import test_utils, web
from openai import OpenAI
from support import ci_module, refused

from nbutils import data, distilling, files, your_model
from nbutils.data import documents
from nbutils.data.documents import Span, read_spans
from nbutils.distilling import Writer

ci_module("corpus")  # which it imports
samples = ci_module("samples")
KEY = "sk-this-is-the-key-of-a-test-0123456789"
PAIR = {"question": "When does the shop open?", "answer": "At nine."}


# --- documents --------------------------------------------------------------------------------------------------------


def written(folder: Path, name: str, content: str | bytes) -> str:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(file)


def texts(spans: list[Span]) -> list[str]:
    return [span.text for span in spans]


def test_the_bundled_documents_hold_each_message_once() -> None:
    for name, count in samples.MESSAGES.items():
        spans = read_spans(str(your_model.SAMPLE / name))
        assert len(spans) == count
        assert len(set(texts(spans))) == count
        assert Counter(span.file for span in spans).keys() == {"calls.docx", "chat.txt", "inbox.md", "letters.pdf"}
        pages = {span.page for span in spans if span.file == "letters.pdf"}
        assert pages == set(range(1, len(pages) + 1))


def test_paragraphs_are_spans_without_headings_and_know_their_place(tmp_path: Path) -> None:
    text = "# Opening\n\nWe open at nine.\nOn Sundays\nwe rest.  \n\n \n  Bring your card.\n\n## Fees\n"
    [first, second] = read_spans(written(tmp_path, "rules.md", text))
    assert first.text == "We open at nine.\nOn Sundays\nwe rest."
    assert second.text == "Bring your card."
    assert text[second.start : second.end] == second.text
    assert (second.file, second.page) == ("rules.md", 0)


def test_joined_spans_go_from_heading_to_heading_and_keep_to_their_length(tmp_path: Path) -> None:
    sentences = " ".join(f"Rule {number} is long enough." for number in range(30))
    text = f"# Handbook\n\n## Opening\n\nWe open at nine.\n\nWe close at six.\n\n## Rules\n\n{sentences}\n"
    spans = read_spans(written(tmp_path, "rules.txt", text), join=200)
    assert spans[0].text == "## Opening\n\nWe open at nine.\n\nWe close at six."
    assert spans[1].text.startswith("## Rules\n\nRule 0 is")
    assert all(len(span.text) <= 200 and span.text.endswith(".") for span in spans)
    assert all(text[span.start : span.end] == span.text for span in spans)
    assert sum(span.text.count("Rule ") for span in spans) == 30


def test_a_table_without_an_end_of_a_sentence_is_cut_too(tmp_path: Path) -> None:
    text = "\n".join(f"{number} of 2000" for number in range(2000)) + "\n\n" + "字" * 3000
    spans = read_spans(written(tmp_path, "table.txt", text), join=1200)
    assert max(len(span.text) for span in spans) <= 1200
    assert all(text[span.start : span.end] == span.text for span in spans)
    assert "".join(span.text for span in spans).count("字") == 3000


def test_files_of_one_name_are_told_apart_and_other_kinds_are_left_alone(tmp_path: Path) -> None:
    for name in ("north", "south"):
        written(files.make_folder(tmp_path / name), "rules.txt", f"Rules of the {name}.")
        written(tmp_path / name, "table.xlsx", "no document")
    assert [(span.file, span.text) for span in read_spans(str(tmp_path))] == [
        ("north/rules.txt", "Rules of the north."),
        ("south/rules.txt", "Rules of the south."),
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030", "utf-16"])
def test_chinese_texts_of_any_usual_encoding_are_read(encoding: str, tmp_path: Path) -> None:
    text = "周一到周五营业。\r\n\r\n节假日休息。"
    file = written(tmp_path, "rules.txt", text.encode(encoding))
    assert texts(read_spans(file)) == ["周一到周五营业。", "节假日休息。"]


def test_a_pdf_has_pages_and_its_wrapped_lines_are_joined(tmp_path: Path) -> None:
    long = "The quick brown fox (a red one) " * 6 + "rests."
    file = written(tmp_path, "letters.pdf", samples.pdf([long, *["Short."] * 30, "The last one."]))
    spans = read_spans(file)
    assert spans[0].text == long
    assert {span.page for span in spans} == {1, 2}
    assert (spans[-1].text, spans[-1].page) == ("The last one.", 2)


def test_chinese_lines_of_a_pdf_are_joined_without_a_blank() -> None:
    joined = documents.WRAPPED.sub(" ", documents.WRAPPED_CHINESE.sub("", "营业时间是周一，\n周二和 Friday\n morning"))
    assert joined == "营业时间是周一，周二和 Friday morning"


def test_a_docx_has_headings_paragraphs_and_tables(tmp_path: Path) -> None:
    import docx

    document = docx.Document()
    document.add_heading("Fees", 1)
    document.add_paragraph("A card costs two yuan.")
    table = document.add_table(rows=2, cols=2)
    for cell, text in zip([*table.rows[0].cells, *table.rows[1].cells], ["item", "fee", "card", "2"], strict=True):
        cell.text = text
    document.save(str(tmp_path / "fees.docx"))
    assert texts(read_spans(str(tmp_path))) == ["A card costs two yuan.", "item | fee\ncard | 2"]
    [span] = read_spans(str(tmp_path), join=1000)
    assert span.text.startswith("# Fees\n\nA card")


def encrypted(folder: Path) -> str:
    from pypdf import PdfReader, PdfWriter

    written(folder, "open.pdf", samples.pdf(["Secret."]))
    writer = PdfWriter(clone_from=PdfReader(folder / "open.pdf"))
    writer.encrypt("word", algorithm="RC4-128")
    writer.write(folder / "locked.pdf")
    return str(folder / "locked.pdf")


def bomb(folder: Path) -> str:
    with zipfile.ZipFile(folder / "bomb.docx", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", bytes(documents.LARGEST_FILE + 1))
    return str(folder / "bomb.docx")


def empty_docx(folder: Path) -> str:
    import docx

    docx.Document().save(str(folder / "empty.docx"))
    return str(folder / "empty.docx")


def link_outside(folder: Path) -> str:
    inside = files.make_folder(folder / "mine")
    written(folder, "other.txt", "Not of this folder.")
    (inside / "link.txt").symlink_to(folder / "other.txt")
    return str(inside)


BAD: dict[str, tuple[Callable[[Path], str], str]] = {
    "scan": (lambda folder: written(folder, "scan.pdf", samples.pdf([""])), "OCR"),
    "password": (encrypted, "password"),
    "no pdf": (lambda folder: written(folder, "broken.pdf", "no pdf at all"), "broken.pdf cannot be read"),
    "no docx": (lambda folder: written(folder, "broken.docx", "no docx at all"), "broken.docx cannot be read"),
    "empty docx": (empty_docx, "holds no text"),
    "empty text": (lambda folder: written(folder, "empty.txt", " \n\n"), "holds no text"),
    "encoding": (lambda folder: written(folder, "latin.txt", "Gr\xfc\xdfe".encode("latin-1")), "UTF-8"),
    "bomb": (bomb, "too large"),
    "kind": (lambda folder: written(folder, "table.xlsx", "a table"), ".docx"),
    "missing": (lambda folder: str(folder / "none.pdf"), "none.pdf"),
    "link": (link_outside, "leads out of its folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_document_that_cannot_be_read_is_named_with_what_to_do(case: str, tmp_path: Path) -> None:
    make, word = BAD[case]
    source = make(tmp_path)
    with refused(word, "To do:"):
        read_spans(source)


# --- rows from an endpoint --------------------------------------------------------------------------------------------


class Endpoint:
    """An OpenAI-style endpoint; the text of a span says how it answers, and a list how it fails first."""

    def __init__(self) -> None:
        self.url = ""
        self.asked = Counter[str]()
        self.keys = set[str]()
        self.failing: dict[str, list[int]] = {}  # statuses to come, by text
        self.systems = set[str]()

    async def complete(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("Authorization", ""))
        body = await request.json()
        *system, asked = body["messages"]
        self.systems.update(message["content"] for message in system)
        text = asked["content"]
        self.asked[text] += 1
        if self.failing.get(text):
            status = self.failing[text].pop(0)
            return web.json_response({"error": {"message": "no"}}, status=status, headers={"Retry-After": "0.01"})
        if text == "web page":
            return web.Response(text="<html>hello</html>", content_type="text/html")
        answers = {
            "fenced": f"Here you are:\n```json\n{json.dumps([PAIR])}\n```\nEnjoy!",
            "object": json.dumps({"pairs": [PAIR, PAIR]}),
            "thinking": f"<think>What is [asked]?</think>\n{json.dumps([PAIR])}",
            "prose": "I would rather not.",
            "incomplete": json.dumps([{"question": "When?"}]),
            "silent": "",
        }
        choice = {"message": {"role": "assistant", "content": answers.get(text, json.dumps([PAIR]))}, "index": 0}
        choice["finish_reason"] = "length" if text == "long" else "stop"
        total = None if text == "uncounted" else 10
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": total}
        return web.json_response({"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage})


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """One on a free port, in a thread of its own; the key of the learner is set."""
    monkeypatch.setenv(distilling.KEY_VARIABLE, KEY)
    endpoint = Endpoint()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.complete)
    server = test_utils.TestServer(app)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start_server(shutdown_timeout=0.1), loop).result(5)
    endpoint.url = str(server.make_url("/v1"))
    yield endpoint
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(5)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)


def spans_of(*texts: str) -> list[Span]:
    return [Span("notes.txt", 0, number, number + len(text), text) for number, text in enumerate(texts)]


def writer_in(folder: Path, way: Any = "questions", instruction: str = "Write questions.") -> Writer:
    options = {"temperature": 0, "max_tokens": 99}
    return Writer(folder / "written.jsonl", "large", way, instruction, options)


def test_rows_are_read_from_what_models_write_and_keep_their_span(endpoint: Endpoint, tmp_path: Path) -> None:
    spans = spans_of("plain", "fenced", "object", "thinking")
    writer = writer_in(tmp_path)
    writer.write(distilling.connect(endpoint.url), spans)
    entries = writer.written(spans)
    assert [len(entry.pairs) for entry in entries] == [1, 1, 2, 1]
    for entry, span in zip(entries, spans, strict=True):
        for row in entry.rows:
            assert data.problems_of(row) == []
            assert row["messages"][0]["content"] == PAIR["question"]
            assert Span(**row["source"]) == span
    assert sum(entry.tokens for entry in entries) == 40
    assert endpoint.systems == {"Write questions."}


def test_an_answer_can_be_asked_for_instead_and_needs_no_instruction(endpoint: Endpoint, tmp_path: Path) -> None:
    writer = writer_in(tmp_path, "answers", instruction="")
    writer.write(distilling.connect(endpoint.url), spans_of("prose", "silent"))
    [answered, silent] = writer.written(spans_of("prose", "silent"))
    assert answered.pairs[0].model_dump() == {"question": "prose", "answer": "I would rather not."}
    assert silent.problem and silent.rows == []
    assert endpoint.systems == set()


@pytest.mark.parametrize(
    ("text", "word"),
    [("long", "cut off"), ("prose", "I would rather not"), ("incomplete", "not the answer"), ("silent", "not the")],
)
def test_what_is_no_row_is_kept_with_its_reason_and_not_asked_again(
    text: str, word: str, endpoint: Endpoint, tmp_path: Path
) -> None:
    spans = spans_of(text, "plain")
    for _ in range(2):
        writer = writer_in(tmp_path)
        writer.write(distilling.connect(endpoint.url), spans)
        [failed, fine] = writer.written(spans)
        assert word in failed.problem
        assert failed.rows == [] and fine.problem == ""
    assert endpoint.asked[text] == 1


def test_what_passes_by_itself_is_tried_again(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.failing = {"busy": [429, 429], "ill": [500, 503]}
    writer = writer_in(tmp_path)
    writer.write(distilling.connect(endpoint.url), spans_of("busy", "ill"))
    assert all(entry.pairs for entry in writer.written(spans_of("busy", "ill")))
    assert endpoint.asked == {"busy": 3, "ill": 3}


@pytest.mark.parametrize(
    ("status", "word"), [(401, distilling.KEY_VARIABLE), (402, "credit"), (403, "not for this model"), (404, "/v1")]
)
def test_a_refusal_ends_it_and_a_second_start_asks_only_the_rest(
    status: int, word: str, endpoint: Endpoint, tmp_path: Path
) -> None:
    client = distilling.connect(endpoint.url)
    writer_in(tmp_path).write(client, spans_of("before"))
    endpoint.failing = {"after": [status]}
    with refused(word, "is kept") as caught:
        writer_in(tmp_path).write(client, spans_of("before", "after"))
    assert KEY not in str(caught.value)
    writer = writer_in(tmp_path)
    assert texts(writer.missing(spans_of("before", "after"))) == ["after"]
    writer.write(client, spans_of("before", "after"))
    assert endpoint.asked == {"before": 1, "after": 2}
    assert endpoint.keys == {f"Bearer {KEY}"}
    assert KEY not in (tmp_path / "written.jsonl").read_text()


def test_one_request_that_is_refused_ends_nothing(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.failing = {"too long": [400]}
    writer = writer_in(tmp_path)
    writer.write(distilling.connect(endpoint.url), spans_of("too long", "plain"))
    [failed, fine] = writer.written(spans_of("too long", "plain"))
    assert "refused" in failed.problem and fine.pairs
    again = writer_in(tmp_path)
    assert texts(again.missing(spans_of("too long", "plain"))) == ["too long"], "its cause may have gone"


def test_an_answer_whose_tokens_nobody_counted_is_kept(endpoint: Endpoint, tmp_path: Path) -> None:
    writer_in(tmp_path).write(distilling.connect(endpoint.url), spans_of("uncounted"))
    [entry] = writer_in(tmp_path).written(spans_of("uncounted"))
    assert entry.pairs and entry.tokens == 0


def test_a_page_for_people_is_no_endpoint(endpoint: Endpoint, tmp_path: Path) -> None:
    with refused("gives no answer", "To do:"):
        writer_in(tmp_path).write(distilling.connect(endpoint.url), spans_of("web page"))


def test_an_endpoint_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distilling, "RETRIES", 0)
    with refused("Connection", "Check ENDPOINT"):
        writer_in(tmp_path).write(distilling.connect("http://127.0.0.1:9/v1"), spans_of("plain"))


def test_a_torn_line_is_asked_again_and_another_instruction_is_another_question(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    client = distilling.connect(endpoint.url)
    writer_in(tmp_path).write(client, spans_of("first", "second"))
    journal = tmp_path / "written.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20])  # a kill
    torn = writer_in(tmp_path)
    assert len(torn.missing(spans_of("first", "second"))) == 1
    torn.write(client, spans_of("first", "second"))
    assert writer_in(tmp_path).missing(spans_of("first", "second")) == []
    other = writer_in(tmp_path, instruction="Write other questions.")
    assert len(other.missing(spans_of("first", "second"))) == 2
    moved = [Span("notes.txt", 0, 99, 104, "first")]
    assert writer_in(tmp_path).missing(moved) == moved


def test_a_key_comes_from_the_environment_alone_and_this_machine_needs_none(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(distilling.KEY_VARIABLE, raising=False)
    with refused("no key", distilling.KEY_VARIABLE):
        distilling.connect("https://api.example.com/v1")
    assert isinstance(distilling.connect("http://127.0.0.1:8000/v1"), OpenAI)
    for endpoint in ("api.example.com", f"https://me:{KEY}@api.example.com/v1"):
        with refused("base URL") as caught:
            distilling.connect(endpoint)
        assert KEY not in str(caught.value)
    monkeypatch.setenv(distilling.KEY_VARIABLE, f"“{KEY}”")  # pasted from a chat
    with refused("quotation marks") as caught:
        distilling.connect("https://api.example.com/v1")
    assert KEY not in str(caught.value)


def test_an_unknown_way_is_refused(tmp_path: Path) -> None:
    with refused("WAY", "questions, answers"):
        writer_in(tmp_path, "poems")


# --- what the lesson asks for -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (("", "", "rows.jsonl", "", "", ""), "33 questions"),
        (("Translate.", "", "", "", "", ""), "33 questions"),
        (("", "questions.jsonl", "", "", "", ""), "DOCUMENTS"),
        (("", "questions.jsonl", "", "handbook.pdf", "", ""), "KEEP_RUNNING"),
        (("", "questions.jsonl", "", "handbook.pdf", "https://api.example.com/v1", ""), "ENDPOINT_MODEL"),
    ],
)
def test_parameters_that_do_not_go_together_are_refused(given: tuple[str, ...], word: str) -> None:
    with refused(word):
        your_model.require_sources(*given)


def test_parameters_that_go_together_are_taken() -> None:
    your_model.require_sources("", "", "", "", "", "")
    your_model.require_sources("Translate.", "questions.jsonl", "rows.jsonl", "", "", "")
    your_model.require_sources("", "questions.jsonl", "", "handbook.pdf", "http://127.0.0.1:8000/v1", "course")


def test_questions_are_checked_as_rows_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = [{"question": f"What is {number} + {number}?", "answer": str(2 * number)} for number in range(12)]
    file = data.write_rows(tmp_path / "questions.jsonl", good)
    rows = your_model.read_questions(str(file))
    assert len(rows) == 12
    assert rows[3]["messages"][1] == {"role": "assistant", "content": "6"}
    with refused("2 questions", "33"):
        your_model.read_questions(str(data.write_rows(tmp_path / "few.jsonl", good[:2])))
    broken = [*good, {"question": "And this?", "answer": ""}]
    with refused("1 of them"):
        your_model.read_questions(str(data.write_rows(tmp_path / "broken.jsonl", broken)))
    assert "line 13" in capsys.readouterr().out
    with refused("14 questions", "12 are sound and different"):
        your_model.read_questions(str(data.write_rows(tmp_path / "twice.jsonl", [*good, *good[:2]])))


def test_all_files_of_a_learner_are_gathered_and_none_is_lost(tmp_path: Path) -> None:
    for year in ("2024", "2025"):
        data.write_rows(tmp_path / "mine" / year / "rows.jsonl", [{"question": year, "answer": "yes"}])
    folder = your_model.gather(tmp_path / "first", [str(tmp_path / "mine")], [])
    kept = sorted(file.read_text(encoding="utf-8") for file in folder.glob("*-rows.jsonl"))
    assert ["2024" in kept[0], "2025" in kept[1]] == [True, True]
    with refused("a file of yours"):
        your_model.gather(folder, [str(folder / "1-rows.jsonl")], [])
    assert (folder / "1-rows.jsonl").exists()


def test_rows_too_close_to_a_question_are_not_trained_on(tmp_path: Path) -> None:
    question = "Please send me three boxes of ripe apples to Hangzhou on Friday morning."
    test_file = data.write_rows(tmp_path / "test.jsonl", [{"question": question, "answer": "a ticket of apples"}])
    mine = tmp_path / "mine.csv"
    lines = ["question,answer", f"{question.replace(' ripe', '').upper()},a ticket of apples"]
    lines += [f"Where is order {number}{number}?,It is on its way to customer {number}." for number in range(20)]
    mine.write_text("\n".join(lines), encoding="utf-8")
    entry = distilling.Entry(
        key="1", span=spans_of(question)[0], pairs=[distilling.Pair(question=question, answer="!")]
    )
    folder = your_model.gather(tmp_path / "first", [str(mine), ""], [entry])
    card = data.prepare(str(folder), tmp_path / "data", eval_source=str(test_file))
    assert (card.train, card.eval) == (20, 1)
    assert card.reasons == {"leak": 1, "near_leak": 1}
    assert {problem.file for problem in card.problems} == {"1-mine.csv", "from_documents.jsonl"}


def test_the_time_of_a_deed_stays_as_long_as_it_is_the_same_deed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = your_model.note_time(tmp_path / "baseline.json", ["task", "rows"])
    assert your_model.note_time(tmp_path / "baseline.json", ["task", "rows"]) == first
    os.utime(tmp_path / "baseline.json", (0, 0))
    assert your_model.note_time(tmp_path / "baseline.json", ["task", "rows"]) == first
    stored = files.read_json(tmp_path / "baseline.json")
    assert stored["value"] == first
    files.write_json(tmp_path / "baseline.json", stored | {"value": "2020-01-01T00:00:00+00:00"})
    assert your_model.note_time(tmp_path / "baseline.json", ["task", "rows"]).startswith("2020")
    assert your_model.note_time(tmp_path / "baseline.json", ["other task", "rows"]) >= first

"""Writes the generated files of data_samples, the same bytes every time: train.jsonl, eval.jsonl, pretraining.jsonl.gz,
and the questions and documents of your_model.

python .ci/samples.py [FOLDER]
"""

from __future__ import annotations

import json
import random
import sys
import textwrap
import zipfile
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import corpus

from nbutils.files import SAMPLES, write_text

FILES = {"train.jsonl": (800, 2026), "eval.jsonl": (120, 2027)}  # rows and seed
TEXTS, TEXTS_SEED = 20_000, 43
QUESTIONS, MESSAGES_SEED = 33, 2028  # of lesson 10: three are shown as examples
MESSAGES = {"first": 120, "more": 180}  # of each folder of documents
LINES_OF_PAGE = 48
WIDTH_OF_PAGE = 84  # characters
PDF_ESCAPES = str.maketrans({sign: f"\\{sign}" for sign in "()\\"})
DATE = (2026, 11, 19, 0, 0, 0)  # of the files in a docx
WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
PACKAGE = "http://schemas.openxmlformats.org/package/2006"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
DOCUMENT_TYPE = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
XML = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'


def draw_rows(count: int, seed: int, taken: set[str]) -> list[dict[str, str]]:
    """Customers' messages, each with its ticket; no ticket that is taken already."""
    rng = random.Random(seed)
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        scene, text, facts = corpus.draw_message(rng, for_samples=True)
        ticket = json.dumps(facts, ensure_ascii=False)
        if ticket not in taken:
            taken.add(ticket)
            rows.append({"text": text, "ticket": ticket, "language": scene.language})
    return rows


def write_rows(file: Path, rows: Sequence[dict[str, str]]) -> None:
    """Write messages and tickets as chat rows."""
    lines = []
    for row in rows:
        turns = [{"role": "user", "content": row["text"]}, {"role": "assistant", "content": row["ticket"]}]
        lines.append(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
    write_text(file, "".join(lines))


def write_documents(folder: Path, rows: Sequence[dict[str, str]]) -> None:
    """Write messages, without their tickets, as a txt, a md, a pdf (English) and a docx."""
    folder.mkdir(parents=True, exist_ok=True)
    english = [row["text"] for row in rows if row["language"] == "en"]
    chinese = [row["text"] for row in rows if row["language"] == "zh"]
    half = len(english) // 2
    third = len(chinese) // 3
    write_text(folder / "chat.txt", "\n\n".join(chinese[:third]) + "\n")
    inbox = ["# Inbox", "## English", *english[:half], "## 中文", *chinese[third : 2 * third]]
    write_text(folder / "inbox.md", "\n\n".join(inbox) + "\n")
    (folder / "letters.pdf").write_bytes(pdf(english[half:]))
    write_docx(folder / "calls.docx", "来电记录", chinese[2 * third :])


def pdf(paragraphs: Sequence[str]) -> bytes:
    """A PDF with these paragraphs in Helvetica, an empty line between them."""
    pages: list[list[str]] = [[]]
    for paragraph in paragraphs:
        lines = [*textwrap.wrap(paragraph, WIDTH_OF_PAGE), ""]
        if len(pages[-1]) + len(lines) > LINES_OF_PAGE:  # no paragraph is on two pages
            pages.append([])
        pages[-1] += lines
    numbers = [4 + 2 * page for page in range(len(pages))]
    kids = " ".join(f"{number} 0 R" for number in numbers)
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    for number, page in zip(numbers, pages, strict=True):
        shown = "".join(f"({line.translate(PDF_ESCAPES)}) Tj T*\n" for line in page)
        stream = f"BT /F1 11 Tf 15 TL 72 770 Td\n{shown}ET"
        resources = "<< /Font << /F1 3 0 R >> >>"
        box = f"/MediaBox [0 0 595 842] /Resources {resources} /Contents {number + 1} 0 R"
        objects.append(f"<< /Type /Page /Parent 2 0 R {box} >>")
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    return with_table("%PDF-1.4\n", objects)


def with_table(head: str, objects: Sequence[str]) -> bytes:
    """The objects of a PDF behind each other, and the table of where each begins."""
    text = head
    table = ["0000000000 65535 f \n"]
    for number, content in enumerate(objects, 1):
        table.append(f"{len(text):010} 00000 n \n")
        text += f"{number} 0 obj\n{content}\nendobj\n"
    size = len(objects) + 1
    text += f"xref\n0 {size}\n{''.join(table)}trailer << /Size {size} /Root 1 0 R >>\nstartxref\n{len(text)}\n%%EOF\n"
    return text.encode("ascii")


def write_docx(file: Path, title: str, paragraphs: Sequence[str]) -> None:
    """A docx with a heading and these paragraphs: the least that Word and python-docx open."""
    heading = '<w:pPr><w:pStyle w:val="Heading1"/></w:pPr>'
    body = [f"<w:p>{heading}<w:r><w:t>{escape(title)}</w:t></w:r></w:p>"]
    body += [f'<w:p><w:r><w:t xml:space="preserve">{escape(text)}</w:t></w:r></w:p>' for text in paragraphs]
    normal = '<w:style w:type="paragraph" w:default="1" w:styleId="Normal"><w:name w:val="Normal"/></w:style>'
    styles = normal + '<w:style w:type="paragraph" w:styleId="Heading1"><w:name w:val="heading 1"/></w:style>'
    types = [
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>',
        f'<Override PartName="/word/document.xml" ContentType="{DOCUMENT_TYPE}"/>',
        f'<Override PartName="/word/styles.xml" ContentType="{DOCUMENT_TYPE.replace("document.main", "styles")}"/>',
    ]
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{PACKAGE}/content-types">{"".join(types)}</Types>',
        "_rels/.rels": relationship("officeDocument", "word/document.xml"),
        "word/_rels/document.xml.rels": relationship("styles", "styles.xml"),
        "word/document.xml": f'<w:document xmlns:w="{WORD}"><w:body>{"".join(body)}</w:body></w:document>',
        "word/styles.xml": f'<w:styles xmlns:w="{WORD}">{styles}</w:styles>',
    }
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in parts.items():
            archive.writestr(zipfile.ZipInfo(name, DATE), XML + content)


def relationship(kind: str, target: str) -> str:
    """A part that names one other part."""
    link = f'<Relationship Id="rId1" Type="{OFFICE}/{kind}" Target="{target}"/>'
    return f'<Relationships xmlns="{PACKAGE}/relationships">{link}</Relationships>'


def write_tickets(folder: Path) -> None:
    """Write customers' messages with their tickets, and the documents of lesson 10; no two share a ticket."""
    taken: set[str] = set()
    for name, (count, seed) in FILES.items():
        write_rows(folder / name, draw_rows(count, seed, taken))
    own = folder / "your_model"
    own.mkdir(exist_ok=True)
    rows = draw_rows(QUESTIONS + sum(MESSAGES.values()), MESSAGES_SEED, taken)
    write_rows(own / "questions.jsonl", rows[:QUESTIONS])
    start = QUESTIONS
    for name, count in MESSAGES.items():
        write_documents(own / name, rows[start : start + count])
        start += count


def main(folder: Path) -> None:
    """Write all files."""
    write_tickets(folder)
    corpus.write_texts(folder / "pretraining.jsonl.gz", TEXTS, TEXTS_SEED)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else SAMPLES)

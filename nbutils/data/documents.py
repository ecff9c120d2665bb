"""Documents of a learner (txt, md, pdf, docx) cut into spans: each with the place where a reader finds it."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nbutils import install
from nbutils.data.read import find_files, format_of, local_path, open_text
from nbutils.errors import CourseError
from nbutils.masking import describe

LARGEST_FILE = 64 << 20  # bytes, also of what a docx unpacks to
PARAGRAPH = re.compile(r"\S.*(?:\n[^\S\n]*\S.*)*(?<=\S)")  # lines without an empty one between them
SENTENCE = re.compile(r"(?s)\S(?:.{0,400}?(?:[。！？]|[.!?](?=\s)|(?=\n)|\Z)|.{0,400})")  # a longer one is cut
HEADING = re.compile(r"#{1,6}\s.*")
# where a line of a pdf goes on: a blank takes the place of the break, unless both sides are Chinese
WRAPPED_CHINESE = re.compile(r"(?<=[\u3000-\u9fff\uff00-\uffef])[^\S\n]*\n[^\S\n]*(?=[\u3000-\u9fff\uff00-\uffef])")
WRAPPED = re.compile(r"(?<=\S)[^\S\n]*\n[^\S\n]*(?=\S)")
UNREADABLE = re.compile("[\udc80-\udcff\ufffd]")  # bytes of another encoding
Pages = list[str]


@dataclass(frozen=True)
class Span:
    """A piece of a document: `start` and `end` count the characters of its page, or of the file if it has no pages."""

    file: str
    page: int  # 0: the file has no pages
    start: int
    end: int
    text: str


def read_spans(source: str, join: int = 0) -> list[Span]:
    """The spans of a file, or of all documents of a folder: paragraphs, or several together up to `join` characters.

    Example: spans = documents.read_spans("handbook.pdf", join=1200)
    """
    install.ensure("documents")
    folder = local_path(source)
    spans = []
    for file in find_files(source, tuple(READERS)):
        name = file.relative_to(folder).as_posix() if folder.is_dir() else file.name
        ending = format_of(file, tuple(READERS))
        for number, text in enumerate(read_pages(file, ending), 1):
            page = number if ending == ".pdf" else 0
            for start, end in cut(text, join):
                spans.append(Span(name, page, start, end, text[start:end]))
    return spans


def read_pages(file: Path, ending: str) -> Pages:
    """The text of each page; of a file without pages, one text."""
    size = file.stat().st_size
    try:
        if zipfile.is_zipfile(file):
            size = sum(part.file_size for part in zipfile.ZipFile(file).infolist())
        if size > LARGEST_FILE:
            raise CourseError(
                "{file} is too large: more than {most} MiB.",
                todo="Divide it into several files.",
                file=file,
                most=LARGEST_FILE >> 20,
            )
        pages = READERS[ending](file)
    except (CourseError, ImportError):
        raise
    except Exception as problem:  # the errors are of several libraries
        raise CourseError(
            "{file} cannot be read: {problem}",
            todo="Open it and save it again, as txt or md if that does not help, or take it out of the folder.",
            file=file,
            problem=describe(problem),
        ) from problem
    if not any(map(str.strip, pages)):
        raise CourseError(
            "{file} holds no text.",
            todo="If it is a scan, run OCR over it first; if it is empty, take it out of the folder.",
            file=file,
        )
    return pages


def read_text(file: Path) -> Pages:
    """A txt or md file in UTF-8, UTF-16 or GBK."""
    with open_text(file) as opened:
        text = opened.read().replace("\r\n", "\n")
    if UNREADABLE.search(text):
        raise CourseError("{file} is neither UTF-8 nor GBK.", todo="Save it again as UTF-8.", file=file)
    return [text]


def read_pdf(file: Path) -> Pages:
    """The pages of a PDF; lines that go on are joined, as a page breaks them anywhere."""
    from pypdf import PdfReader

    reader = PdfReader(file)
    if reader.is_encrypted and not reader.decrypt(""):
        raise CourseError("{file} has a password.", todo="Save it without one.", file=file)
    pages = []
    for page in reader.pages:
        text = page.extract_text(extraction_mode="layout")  # this mode keeps the empty lines between paragraphs
        pages.append(WRAPPED.sub(" ", WRAPPED_CHINESE.sub("", text)))
    return pages


def read_docx(file: Path) -> Pages:
    """The paragraphs and tables of a docx, with headings as in Markdown."""
    from docx import Document
    from docx.table import Table

    parts = []
    for item in Document(str(file)).iter_inner_content():
        if isinstance(item, Table):
            parts.append("\n".join(" | ".join(cell.text for cell in row.cells) for row in item.rows))
        elif item.style is not None and str(item.style.name).startswith(("Heading", "Title")):
            parts.append(f"# {item.text}")
        else:
            parts.append(item.text)
    return ["\n\n".join(parts)]


READERS = {
    ".txt": read_text,
    ".md": read_text,
    ".pdf": read_pdf,
    ".docx": read_docx,
}


def cut(text: str, join: int) -> list[tuple[int, int]]:
    """Where each span begins and ends: a paragraph, or up to `join` characters from one heading to the next."""
    begins: list[int] = []
    ends: list[int] = []
    for start, end in _units(text, join):
        has_room = bool(begins) and end - begins[-1] <= join
        if has_room and not HEADING.match(text, start):
            ends[-1] = end
        else:
            begins.append(start)
            ends.append(end)
    spans = zip(begins, ends, strict=True)
    return [span for span in spans if not HEADING.fullmatch(text, *span)]


def _units(text: str, join: int) -> Iterator[tuple[int, int]]:
    """The paragraphs of a text, or the sentences of one that is longer than `join` characters."""
    for paragraph in PARAGRAPH.finditer(text):
        if 0 < join < len(paragraph[0]):
            for sentence in SENTENCE.finditer(text, *paragraph.span()):
                yield sentence.span()
        else:
            yield paragraph.span()

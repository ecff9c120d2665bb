"""Documents of a learner (txt, md, pdf, docx) cut into spans: each with the place where a reader finds it."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nbutils import install
from nbutils.data.read import local_path, open_text
from nbutils.data.texts import CJK
from nbutils.errors import CourseError
from nbutils.files import require_inside
from nbutils.language import say
from nbutils.masking import describe

LARGEST_FILE = 64 << 20  # bytes, also of what a docx unpacks to
PARAGRAPH = re.compile(r"\S.*(?:\n[^\S\n]*\S.*)*")  # lines without an empty one between them
SENTENCE = re.compile(r"(?s)\S.*?(?:[。！？]|[.!?](?=\s)|\Z)\s*")
HEADING = re.compile(r"#{1,6}\s")
WRAPPED = re.compile(r"(\S)[^\S\n]*\n[^\S\n]*(?=(\S))")  # where a line of a pdf goes on
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

    def __str__(self) -> str:
        page = f", p. {self.page}" if self.page else ""
        return f"{self.file}{page}, {self.start}-{self.end}"


def read_spans(source: str, join: int = 0) -> list[Span]:
    """The spans of a file, or of all documents of a folder: paragraphs, or several together up to `join` characters.

    Example: spans = documents.read_spans("handbook.pdf", join=1200)
    """
    folder = local_path(source)
    files = find_documents(folder)
    if any(file.suffix.lower() in (".pdf", ".docx") for file in files):
        install.ensure("documents")
    spans = []
    for file in files:
        name = file.relative_to(folder).as_posix() if folder.is_dir() else file.name
        pages = read_pages(file)
        for number, text in enumerate(pages, 1):
            page = number if file.suffix.lower() == ".pdf" else 0
            spans += [Span(name, page, start, end, text[start:end]) for start, end in cut(text, join)]
    return spans


def find_documents(folder: Path) -> list[Path]:
    """The documents of a folder with those below it, or one alone; what is of another kind is named and left out."""
    inside = sorted(folder.rglob("*")) if folder.is_dir() else [folder]
    shown = [path for path in inside if path.is_file() and not path.name.startswith((".", "~$"))]
    documents = [path for path in shown if path.suffix.lower() in READERS]
    if not documents:
        raise CourseError(
            "{path} does not exist, or holds no document.",
            allowed="a file that ends in {endings}, or a folder of them",
            todo="Correct DOCUMENTS, or save the text in one of these formats. Rows belong in DATA.",
            path=folder.absolute(),
            endings=", ".join(READERS),
        )
    if folder.is_dir():
        require_inside(folder, documents)
    if others := [path.name for path in shown if path not in documents]:
        say("[WARN] these are no documents, and are left out: {names}", names=", ".join(others[:5]))
    return documents


def read_pages(file: Path) -> Pages:
    """The text of each page; of a file without pages, one text."""
    size = file.stat().st_size
    try:
        if zipfile.is_zipfile(file):
            size = sum(part.file_size for part in zipfile.ZipFile(file).infolist())
        if size > LARGEST_FILE:
            raise CourseError(
                "{file} is too large: {size:,.0f} MiB, {most} are read at most.",
                todo="Divide it into several files.",
                file=file,
                size=size / 2**20,
                most=LARGEST_FILE >> 20,
            )
        pages = READERS[file.suffix.lower()](file)
    except CourseError:
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
        pages.append(WRAPPED.sub(_unwrapped, text))
    return pages


def _unwrapped(line_break: re.Match[str]) -> str:
    """The last character of a line, and a blank if neither side is Chinese."""
    last, following = line_break.groups()
    return last if CJK.match(last) or CJK.match(following) else f"{last} "


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


READERS: dict[str, Callable[[Path], Pages]] = {
    ".txt": read_text,
    ".md": read_text,
    ".pdf": read_pdf,
    ".docx": read_docx,
}


def cut(text: str, join: int) -> Iterator[tuple[int, int]]:
    """Where each span begins and ends: a paragraph, or up to `join` characters from one heading to the next."""
    begin = None  # of the span that grows
    end = 0
    has_text = False  # more than headings
    for start, stop in _units(text, join):
        is_heading = HEADING.match(text, start) is not None
        if begin is not None and has_text and (is_heading or stop - begin > join):
            yield begin, end
            begin = None
            has_text = False
        if is_heading and not join:
            continue
        if begin is None:
            begin = start
        end = stop
        has_text = has_text or not is_heading
    if begin is not None and has_text:
        yield begin, end


def _units(text: str, join: int) -> Iterator[tuple[int, int]]:
    """The paragraphs of a text, or the sentences of one that is longer than `join` characters."""
    for paragraph in PARAGRAPH.finditer(text):
        units = [paragraph]
        if 0 < join < len(paragraph[0]):
            units = list(SENTENCE.finditer(text, *paragraph.span()))
        for unit in units:
            yield unit.start(), unit.start() + len(unit[0].rstrip())

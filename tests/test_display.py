"""Tables, plots and live numbers, plain without a frontend; the chat: streamed, stoppable, printed without one."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from support import refused

from nbutils import chatbox, dashboard
from nbutils.hardware import Choice


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a kernel with someone at its frontend displays."""
    import IPython.display

    shown: list[Any] = []
    monkeypatch.setattr(dashboard, "in_kernel", lambda: True)
    monkeypatch.setattr(dashboard, "watched", lambda: True)
    monkeypatch.setattr(IPython.display, "display", lambda page, **_: shown.append(page))
    return shown


def test_a_table_is_text_outside_a_notebook(capsys: Any) -> None:
    dashboard.show_table([{"question": "三个苹果", "base": "✗ x"}, {"question": "b", "base": "c"}], "Before")
    assert capsys.readouterr().out == "Before\n  question: 三个苹果\n  base: ✗ x\n\n  question: b\n  base: c\n\n"
    assert dashboard.aligned([{"a": 1, "long": "x"}, {"a": 222, "long": ""}]) == "a    long\n1    x\n222"


def test_choices_are_escaped_html_in_a_notebook(notebook: list[Any]) -> None:
    dashboard.show_choices({"lora.rank": Choice(16, "room <enough>")}, text="rank 16: room enough")
    page = notebook[0]["text/html"]
    assert "room &lt;enough&gt;" in page and page.count("<tr>") == 2
    assert notebook[0]["text/plain"] == "rank 16: room enough"


def test_a_plot_is_saved_over_plots_only(tmp_path: Path, capsys: Any) -> None:
    for _ in range(2):
        dashboard.plot_losses([(1, 3.0), (2, 1.0)], tmp_path / "logs/loss.png", validation=[(1, 3.0), (2, 2.0)])
    assert (tmp_path / "logs/loss.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "mine.png").write_text("mine")
    (tmp_path / "link.png").symlink_to(tmp_path / "mine.png")
    for name in ("mine.png", "link.png"):
        with refused("dashboard.foreign_file"):
            dashboard.plot_losses([(1, 3.0)], tmp_path / name)
    assert (tmp_path / "mine.png").read_text() == "mine"
    dashboard.plot_losses([], tmp_path / "no.png")
    assert "nothing to plot" in capsys.readouterr().out and not (tmp_path / "no.png").exists()


def test_the_live_numbers_as_a_line_and_as_a_page() -> None:
    parts = {"step": "7 of 30", "loss": "<1.5", "tokens/s": "2,000", "memory": "peak 3.00 GiB", "left": "0:42"}
    assert dashboard.live_line(parts) == "step 7 of 30 · loss <1.5 · 2,000 tokens/s · peak 3.00 GiB · 0:42 left"
    losses = [(step, 1 / step) for step in range(1, 5001)] + [(5001, math.nan), (5002, math.inf)]
    page = dashboard.live_page(parts, (3000, 6000), losses, ["[WARN] step 1 skipped"], [(10, 0.5)])
    assert "width:50.0%" in page and "&lt;1.5" in page and "[WARN] step 1 skipped" in page and "nan" not in page
    points = page.split('points="')[1].split('"')[0].split()
    assert 100 < len(points) <= dashboard.POINTS + 1 and len(page) < 8000
    assert "<svg" not in dashboard.live_page({}, (1, 9), [(1, 2.0)], [])
    assert 'points="380.0,16.0 760.0,16.0"' in dashboard.live_page({}, (10, 10), [(5, 1.0), (10, 1.0)], [])


@pytest.mark.parametrize(("seconds", "text"), [(7, "0:07"), (754, "12:34"), (3723, "1:02:03"), (59.6, "1:00")])
def test_seconds_are_read_like_a_clock(seconds: float, text: str) -> None:
    assert dashboard.clock(seconds) == text


def test_of_all_a_lesson_prints_the_lines_of_a_training_reach_the_terminal(capsys: Any) -> None:
    lines, passed = dashboard.LiveLines(), ["training 30 steps to go", "step 1 of 30 · loss 2.0", "[WARN] nan"]
    passed += ["trained 30 of 30 steps", "out of memory at step 7: micro-batch 4 -> 2", "Time. Saving at step 9 of 30"]
    text = "\n".join(["profile   tiny", *passed, "step by step", "safe: checkpoint 30\n"])
    lines.write(text[:50])
    lines.write(text[50:])
    lines.flush()
    assert capsys.readouterr().out.splitlines() == [f"  {line}" for line in passed]


@pytest.mark.parametrize(
    ("kernel", "watched", "calm"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_bars_of_libraries_are_calm_where_no_one_watches(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, kernel: bool, watched: bool, calm: bool
) -> None:
    import tqdm.auto

    monkeypatch.setattr(tqdm.auto, "tqdm", tqdm.auto.tqdm)  # put back afterwards
    monkeypatch.setattr(dashboard, "in_kernel", lambda: kernel)
    monkeypatch.setattr(dashboard, "watched", lambda: watched)
    dashboard.calm_bars()
    list(tqdm.auto.tqdm(range(3), desc="short work"))
    assert ("short work" in capsys.readouterr().err) != calm


class Client:
    """An OpenAI client whose server streams words, `pace` seconds apart; it takes at most `room` messages.

    A silent one waits for `wake`, before or after it takes the question.
    """

    def __init__(self, words: str = "one two three", pace: float = 0.0, room: int = 99, silent: str = "") -> None:
        self.words, self.pace, self.room, self.silent = words.split(" "), pace, room, silent
        self.requests: list[dict[str, Any]] = []
        self.problem: Exception | None = None
        self.closed = self.sent = 0
        self.wake, self.chat = threading.Event(), SimpleNamespace(completions=self)

    def create(self, **request: Any) -> Client:
        assert self.silent != "before" or self.wake.wait(20)
        self.requests.append(request | {"messages": list(request["messages"])})
        if self.problem:
            raise self.problem
        if len(request["messages"]) > self.room:
            raise http_error(400, openai.BadRequestError, "too long")
        return self

    def __enter__(self) -> Iterator[Any]:
        return self.chunks()

    def __exit__(self, *_: object) -> None:
        self.closed += 1

    def chunks(self) -> Iterator[Any]:
        assert self.silent != "after" or self.wake.wait(20)
        for place, word in enumerate(self.words):
            time.sleep(self.pace)
            self.sent += 1
            yield SimpleNamespace(choices=[SimpleNamespace(delta=SimpleNamespace(content=" " * (place > 0) + word))])
        yield SimpleNamespace(choices=[])  # the chunk that has only the usage


def http_error(status: int, kind: Any, message: str) -> Any:
    return kind(message, response=httpx.Response(status, request=httpx.Request("POST", "http://x")), body=None)


def talk(client: Any, name: str = "tuned", **settings: Any) -> chatbox.Talk:
    return chatbox.Talk(name, client, f"model-{name}", **settings)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert true()


def finished(box: chatbox.Box) -> str:
    """The first column, once all answers are there and the buttons are back."""
    wait_until(lambda: not box.busy and not box.send.disabled and box.stop.disabled)
    return str(box.columns[0].value)


def test_the_next_question_knows_the_last_answer() -> None:
    client = Client()
    said = talk(client, opening=[{"role": "system", "content": "be brief"}], max_tokens=9)
    assert list(said.stream("你好"))[-1] == "one two three"
    list(said.stream("and?"))
    assert [message["role"] for message in client.requests[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert {"model": "model-tuned", "max_tokens": 9, "stream": True}.items() <= client.requests[0].items()
    said.forget()
    list(said.stream("again"))
    assert len(client.requests[2]["messages"]) == 2


def test_a_conversation_that_gets_too_long_loses_its_oldest_turns() -> None:
    client = Client(room=3)
    said = talk(client)
    for text in ("a", "b", "c"):
        list(said.stream(text))
    assert said.forgotten == 1 and client.requests[-1]["messages"][0]["content"] == "b"
    client.room = 0
    with pytest.raises(openai.BadRequestError):
        list(said.stream("long"))
    assert len(said.said) == 4  # nothing else is lost for one message that is too long


def test_where_nobody_can_type_the_dialogue_is_printed(capsys: Any) -> None:
    talks = [talk(Client("old words"), "base"), talk(Client("new words"), "tuned")]
    assert chatbox.chat(talks, ["您好"]) is None
    assert capsys.readouterr().out == "you    您好\nbase   old words\ntuned  new words\n"


def test_a_box_is_shown_where_somebody_watches(notebook: list[Any]) -> None:
    box = chatbox.chat([talk(Client())], ["hello"])
    assert box and notebook == [box.whole] and not box.talks[0].said
    assert chatbox.chat([talk(Client())], ["hello"], live=False) is None


def test_a_box_asks_all_models_the_same_and_escapes_what_it_shows() -> None:
    clients = [Client("old <b> words"), Client("新 的 话")]
    box = chatbox.Box([talk(clients[0], "base"), talk(clients[1], "tuned")])
    box.question.value = " 订单 "
    box.send.click()
    assert "old &lt;b&gt; words" in finished(box) and "新 的 话" in box.columns[1].value
    assert [client.requests[0]["messages"][-1]["content"] for client in clients] == ["订单", "订单"]
    box.question.value = "more"
    box.question._handle_string_msg(box.question, {"event": "submit"}, [])  # what the browser sends on Enter
    finished(box)
    assert len(clients[0].requests) == 2 and box.question.value == ""
    box.anew.click()
    assert not box.talks[0].said and "Nothing said yet" in box.columns[0].value


def test_stop_closes_the_stream_and_keeps_what_was_said() -> None:
    client = Client(" ".join(["word"] * 500), pace=0.02)
    box = chatbox.Box([talk(client)])
    box.ask("tell me")
    wait_until(lambda: client.sent >= 3)
    assert box.busy and box.send.disabled and not box.stop.disabled
    box.ask("me too")  # not while it answers
    box.stop.click()
    assert "[stopped]" in finished(box) and box.talks[0].said[-1]["content"].startswith("word word")
    assert client.closed == 1 and client.sent < 100 and len(client.requests) == 1


@pytest.mark.parametrize("silent", ["before", "after"])
@pytest.mark.parametrize("new_chat", [False, True])
def test_stop_and_new_chat_wait_for_no_silent_server(silent: str, new_chat: bool) -> None:
    client = Client("too late", silent=silent)
    box = chatbox.Box([talk(client)])
    box.ask("hello")
    time.sleep(0.1)
    (box.anew if new_chat else box.stop).click()
    assert new_chat is not box.busy and ("[stopped]" in finished(box)) is not new_chat
    box.talks[0].client = Client("new words")  # type: ignore[assignment]
    box.ask("again")
    finished(box)
    client.wake.set()
    wait_until(lambda: client.closed == 1)  # an answer nobody waits for is closed as soon as it comes
    assert "new words" in box.columns[0].value and "too late" not in box.columns[0].value
    assert ("hello" in box.columns[0].value) is not new_chat
    assert [message["content"] for message in box.talks[0].said] == ["again", "new words"]


def test_stop_closes_the_connection_to_a_real_server_that_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.getsockname()[1]}/v1", api_key="none")
        box = chatbox.Box([talk(client)])
        box.ask("hello")
        connection, _ = server.accept()
        with connection:
            connection.settimeout(5)
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            time.sleep(0.3)
            box.stop.click()
            finished(box)
            while connection.recv(65536):  # until the end of the stream
                pass


@pytest.mark.parametrize(
    ("problem", "shown"),
    [
        (openai.APIConnectionError(request=httpx.Request("POST", "http://x")), "Is it still running?"),
        (http_error(400, openai.BadRequestError, "8 tokens"), "8 tokens"),
        (ValueError("odd"), "ValueError: odd"),
    ],
)
def test_a_problem_is_shown_in_the_column_and_the_box_lives(problem: Exception, shown: str) -> None:
    client = Client()
    client.problem = problem
    box = chatbox.Box([talk(client)])
    box.ask("hello")
    assert shown in finished(box)
    client.problem = None
    box.ask("again")
    assert "one two three" in finished(box) and len(client.requests[1]["messages"]) == 1

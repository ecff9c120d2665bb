"""The chat: streamed, stoppable, side by side, remembered; printed where nobody can type."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from nbutils import chatbox, dashboard


class Client:
    """An OpenAI client whose server says `words`, one every `pace` seconds; it takes at most `room` messages."""

    def __init__(self, words: str = "one two three", pace: float = 0.0, room: int = 99) -> None:
        self.words, self.pace, self.room = words.split(" "), pace, room
        self.asked: list[dict[str, Any]] = []
        self.problem: Exception | None = None
        self.closed = self.given = 0
        self.chat = SimpleNamespace(completions=self)

    def create(self, **wanted: Any) -> Client:
        self.asked.append(wanted | {"messages": list(wanted["messages"])})
        if self.problem:
            raise self.problem
        if len(wanted["messages"]) > self.room:
            raise refusal(400, openai.BadRequestError, "too long")
        return self

    def __enter__(self) -> Iterator[Any]:
        return self.pieces()

    def __exit__(self, *_: object) -> None:
        self.closed += 1

    def pieces(self) -> Iterator[Any]:
        for place, word in enumerate(self.words):
            time.sleep(self.pace)
            self.given += 1
            yield SimpleNamespace(choices=[SimpleNamespace(delta=SimpleNamespace(content=" " * (place > 0) + word))])
        yield SimpleNamespace(choices=[])  # the piece that carries only the usage


class Silent(Client):
    """A server that says nothing, before it takes the question or after it, until `wake` is set."""

    def __init__(self, before: bool) -> None:
        super().__init__("too late")
        self.wake, self.before = threading.Event(), before

    def create(self, **wanted: Any) -> Client:
        assert not self.before or self.wake.wait(20)
        return super().create(**wanted)

    def pieces(self) -> Iterator[Any]:
        assert self.wake.wait(20)
        yield from super().pieces()


def refusal(status: int, kind: Any, message: str) -> Any:
    response = httpx.Response(status, request=httpx.Request("POST", "http://x"))
    return kind(message, response=response, body=None)


def talk(client: Any, name: str = "tuned", **settings: Any) -> chatbox.Talk:
    return chatbox.Talk(name, client, f"model-{name}", **settings)


def finished(box: chatbox.Box) -> chatbox.Box:
    for thread in box.running:
        thread.join(5)
    assert not box.busy and not box.send.disabled and box.stop.disabled
    return box


def test_an_answer_grows_and_the_next_question_knows_it() -> None:
    client = Client()
    said = talk(client, opening=[{"role": "system", "content": "be brief"}], max_tokens=9, temperature=0)
    assert list(said.stream("你好"))[-2:] == ["one two three", "one two three"]
    list(said.stream("and?"))
    roles = [message["role"] for message in client.asked[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"] and client.asked[1]["messages"][1]["content"] == "你好"
    assert (client.asked[0]["model"], client.asked[0]["max_tokens"], client.asked[0]["stream"]) == (
        "model-tuned",
        9,
        True,
    )
    said.forget()
    list(said.stream("again"))
    assert len(client.asked[2]["messages"]) == 2


def test_what_the_server_finds_too_long_loses_its_oldest_turns_and_one_message_too_long_is_told() -> None:
    client = Client(room=3)
    said = talk(client)
    for text in ("a", "b", "c"):
        list(said.stream(text))
    assert said.forgotten == 1 and client.asked[-1]["messages"][0]["content"] == "b"
    client.room = 0
    with pytest.raises(openai.BadRequestError):
        list(said.stream("long"))
    assert [message["role"] for message in said.said] == ["user", "assistant"] * 2  # nothing else is lost for it


def test_where_nobody_can_type_the_dialogue_is_printed(capsys: Any) -> None:
    talks = [talk(Client("old words"), "base"), talk(Client("new words"), "tuned")]
    assert chatbox.chat(talks, ["您好"]) is None
    assert capsys.readouterr().out == "you    您好\nbase   old words\ntuned  new words\n"
    assert not talks[0].said  # the box below begins anew


def test_a_box_asks_all_models_the_same_and_shows_both() -> None:
    clients = [Client("old <b> words"), Client("新 的 话")]
    box = chatbox.Box([talk(clients[0], "base"), talk(clients[1], "tuned")])
    box.question.value = " 订单 "
    box.send.click()
    assert box.question.value == ""
    finished(box)
    assert [client.asked[0]["messages"][-1]["content"] for client in clients] == ["订单", "订单"]
    assert "old &lt;b&gt; words" in box.columns[0].value and "新 的 话" in box.columns[1].value


def test_enter_sends() -> None:
    client = Client()
    box = chatbox.Box([talk(client)])
    box.question.value = "hello"
    box.question._handle_string_msg(box.question, {"event": "submit"}, [])  # what the browser sends on Enter
    finished(box)
    assert len(client.asked) == 1


def test_stop_hangs_up_and_keeps_what_was_said() -> None:
    client = Client(" ".join(["word"] * 500), pace=0.02)
    box = chatbox.Box([talk(client)])
    box.ask("tell me")
    deadline = time.monotonic() + 5
    while client.given < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert box.busy and box.send.disabled and not box.stop.disabled
    box.ask("me too")  # not while it answers
    box.stop.click()
    finished(box)
    assert client.closed == 1 and client.given < 100 and len(client.asked) == 1
    assert "[stopped]" in box.columns[0].value and box.talks[0].said[-1]["content"].startswith("word word")


def test_a_new_chat_forgets() -> None:
    box = chatbox.Box([talk(Client())])
    box.ask("hello")
    finished(box)
    box.anew.click()
    assert not box.talks[0].said and "Nothing said yet" in box.columns[0].value


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert true()


@pytest.mark.parametrize("before", [True, False])
def test_stop_is_heard_while_the_server_is_silent(before: bool) -> None:
    client = Silent(before)
    box = chatbox.Box([talk(client)])
    box.ask("hello")
    time.sleep(0.1)
    box.stop.click()
    wait_until(lambda: not box.busy)
    assert "[stopped]" in box.columns[0].value and not box.send.disabled and not box.talks[0].said
    client.wake.set()
    wait_until(lambda: client.closed == 1)  # an answer nobody waits for is hung up as soon as it comes
    assert "too late" not in box.columns[0].value and not box.talks[0].said


@pytest.mark.parametrize("before", [True, False])
def test_a_new_chat_waits_for_no_server_and_knows_nothing_of_the_old_one(before: bool) -> None:
    client = Silent(before)
    box = chatbox.Box([talk(client)])
    box.ask("hello")
    time.sleep(0.1)
    began = time.monotonic()
    box.anew.click()
    assert time.monotonic() - began < 0.5 and not box.busy and not box.send.disabled and box.stop.disabled
    box.talks[0].client = Client("new words")  # type: ignore[assignment]
    box.ask("again")
    finished(box)
    client.wake.set()
    wait_until(lambda: client.closed == 1)
    time.sleep(0.1)
    told = box.columns[0].value
    assert "new words" in told and "too late" not in told and "hello" not in told and "Error" not in told
    assert [message["content"] for message in box.talks[0].said] == ["again", "new words"]


def test_stop_hangs_up_on_a_real_server_that_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}/v1", api_key="none")
        box = chatbox.Box([talk(client)])
        box.ask("hello")
        line, _ = listening.accept()
        with line:
            line.settimeout(5)
            line.recv(65536)
            line.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            time.sleep(0.3)
            box.stop.click()
            wait_until(lambda: not box.busy)
            while line.recv(65536):  # the end of the stream: the server may give the place away
                pass


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        (openai.APIConnectionError(request=httpx.Request("POST", "http://x")), "Is it still running?"),
        (refusal(401, openai.AuthenticationError, "no"), "asks for its key"),
        (refusal(400, openai.BadRequestError, "8 tokens"), "8 tokens"),
        (ValueError("odd"), "ValueError: odd"),
    ],
)
def test_a_problem_stands_in_the_column_and_the_box_lives(problem: Exception, told: str) -> None:
    client = Client()
    client.problem = problem
    box = chatbox.Box([talk(client)])
    box.ask("hello")
    finished(box)
    assert told in box.columns[0].value
    client.problem = None
    box.ask("again")
    finished(box)
    assert "one two three" in box.columns[0].value and len(client.asked[1]["messages"]) == 1


def test_a_box_is_shown_where_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display

    shown: list[Any] = []
    monkeypatch.setattr(dashboard, "watched", lambda: True)
    monkeypatch.setattr(IPython.display, "display", shown.append)
    box = chatbox.chat([talk(Client())], ["hello"])
    assert box and shown == [box.whole]
    assert chatbox.chat([talk(Client())], ["hello"], live=False) is None


def test_both_answers_end_at_once_and_the_buttons_come_back() -> None:
    gate = threading.Barrier(2)

    class Together(Client):
        def __exit__(self, *_: object) -> None:
            gate.wait(5)

    for _ in range(20):
        box = chatbox.Box([talk(Together(), "base"), talk(Together(), "tuned")])
        box.ask("hello")
        finished(box)

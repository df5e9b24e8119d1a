"""A judge behind a real server: one that is slow, fails, lies, and quotes the key it was given."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from jaxppo import Reward, RewardError
from jaxppo.rewards import as_rewards, judge, score_between, score_samples

KEY = "sk-secret-1234"


class Server(ThreadingHTTPServer):
    """Answers each request with `behave(body, headers) -> (status, headers, text)`."""

    daemon_threads = True

    def __init__(self, behave):
        self.behave, self.bodies, self.running, self.most = behave, [], 0, 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        with server.lock:
            server.running += 1
            server.most = max(server.most, server.running)
            server.bodies.append((self.path, body))
        try:
            answer = server.behave(body, self.headers)
        finally:
            with server.lock:
                server.running -= 1
        if answer is None:  # hangs up
            self.close_connection = True
            return
        status, headers, text = answer
        self.send_response(status)
        for name, value in {"content-length": str(len(text.encode())), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())


def says(text):
    return 200, {}, json.dumps({"choices": [{"message": {"content": text}}]})


@pytest.fixture
def serve():
    servers = []

    def start(behave):
        servers.append(Server(behave))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def ask(server, outputs=("a", "bb", "ccc"), on_error="raise", columns=None, **options):
    options = {"backoff": 0.01, **options}
    rewards = as_rewards(Reward(judge(server.url, "m", **options), on_error=on_error, retries=0))
    outputs = list(outputs)
    return score_samples(
        rewards, samples=outputs, prompts=["p{x}"] * len(outputs), outputs=outputs, tokenizer=None,
        columns=columns or {}, lengths=[1] * len(outputs), width=1,
    )  # fmt: skip


def content(body):
    return body["messages"][-1]["content"]


def test_scores_come_in_order_and_the_template_is_filled_in(serve):
    def behave(body, headers):
        assert headers["authorization"] == f"Bearer {KEY}"
        text = content(body)
        time.sleep(0.05 if "=a" in text else 0)  # the first answer comes last
        return says(f"Out of 10: {len(text.rpartition('=')[2])}")

    server = serve(behave)
    scores, _ = ask(
        server, ["a", "b{b}", "ccc"], template="{prompt}|{kind}={output}", system="Be fair.",
        columns={"kind": ["{k}", "l", "m"]},
    )  # fmt: skip
    assert scores.totals.tolist() == [1, 4, 3]
    path, body = next(b for b in server.bodies if "=a" in content(b[1]))
    assert path == "/v1/chat/completions"
    assert body["messages"][0] == {"role": "system", "content": "Be fair."}
    assert content(body) == "p{x}|{k}=a"
    assert (body["model"], body["temperature"]) == ("m", 0.0)


def test_no_key_no_header(serve, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    seen = []

    def behave(body, headers):
        seen.append(headers["authorization"])
        return says("1")

    ask(serve(behave), ["a"])
    assert seen == [None]


def test_requests_under_way_are_limited(serve):
    def behave(body, headers):
        time.sleep(0.03)
        return says("1")

    server = serve(behave)
    ask(server, "abcdefghijkl", concurrency=3)
    assert len(server.bodies) == 12
    assert 1 < server.most <= 3


def flaky(fails, failure):
    """Fails so many times for each text."""
    tries = {}

    def behave(body, headers):
        text = content(body)
        tries[text] = tries.get(text, 0) + 1
        return failure if tries[text] <= fails else says("2")

    return behave


@pytest.mark.parametrize(
    "failure", [(500, {}, "oh"), (429, {"retry-after": "0.01"}, "slow down"), (503, {}, ""), None]
)
def test_what_passes_is_tried_again(serve, failure):
    server = serve(flaky(2, failure))
    scores, tallies = ask(server, retries=2)
    assert scores.totals.tolist() == [2, 2, 2]
    assert len(server.bodies) == 9
    assert tallies["judge"].failures == 0


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ((500, {}, "oh\nno"), r"answered 500: oh no \(tried 2 times\)"),
        (None, r"can't be reached: .* \(tried 2 times\)"),
        (says("great!"), "answer 'great!' holds no number"),
        (says("1e9"), "gives 1e[+]09, which is not from 0 to 10"),
        ((200, {}, "<html>"), "answered what is no chat completion: '<html>'"),
        ((200, {}, '{"choices": []}'), "answered what is no chat completion"),
        ((200, {}, '{"choices": [{"message": {"content": null}}]}'), "no chat completion"),
    ],
)
def test_failures_are_the_samples_own(serve, failure, message):
    """One text of three fails for good: it is named, or leaves the batch; it is never a zero."""

    def behave(body, headers):
        return failure if "bb" in content(body) else says("2")

    with pytest.raises(RewardError, match=message) as caught:
        ask(serve(behave), retries=1)
    assert "the reward function judge failed for sample 1, 'bb': the judge" in str(caught.value)
    scores, tallies = ask(serve(behave), retries=1, on_error="drop")
    assert scores.present.tolist() == [True, False, True]
    assert (tallies["judge"].dropped, tallies["judge"].failures) == (1, 1)


def test_slow_answers_time_out(serve):
    def behave(body, headers):
        time.sleep(0.5 if "bb" in content(body) else 0)
        return says("2")

    scores, _ = ask(serve(behave), timeout=0.1, retries=0, on_error="drop")
    assert scores.present.tolist() == [True, False, True]


@pytest.mark.parametrize("status", [400, 401, 404])
def test_refusals_are_told_at_once_and_without_the_key(serve, status):
    server = serve(lambda body, headers: (status, {}, f"wrong key {headers['authorization']}"))
    with pytest.raises(RewardError, match=rf"answered {status}: wrong key Bearer \*\*\*") as caught:
        ask(server, ["a"], retries=5)
    assert len(server.bodies) == 1
    assert KEY not in str(caught.value)
    assert KEY not in repr(caught.value.__cause__)


def test_options_that_cannot_be_used_are_refused(serve):
    with pytest.raises(RewardError, match="must begin with http"):
        judge("localhost:8000", "m")
    with pytest.raises(RewardError, match="template can't be used"):
        judge("http://x", "m", "{output")
    with pytest.raises(RewardError, match="concurrency is 0"):
        judge("http://x", "m", concurrency=0)
    with pytest.raises(RewardError, match=r"asks for \{answer\}, which is no column"):
        ask(serve(lambda *_: says("1")), ["a"], template="{answer}")


def test_a_parser_of_ones_own(serve):
    server = serve(lambda body, headers: says("verdict: good"))
    scores, _ = ask(server, ["a"], parse=lambda text: float("good" in text))
    assert scores.totals.tolist() == [1]
    assert score_between(-1, 1)("from -0.5") == -0.5

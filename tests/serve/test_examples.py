"""The examples run as they are, and so does the Python in the guides."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from serving import make_llm, running

import blocktable
from blocktable.cli import run
from blocktable.serve.config import ServerConfig

MARKS = ("--- JSON that follows a schema", "--- how likely a text is")
ROOT = Path(__file__).resolve().parents[2]


def run_example(name, *arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_the_offline_example():
    done = run_example("offline.py")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    lines = done.stdout.splitlines()
    start, end = (i for i, line in enumerate(lines) if line in MARKS)
    made = json.loads("".join(lines[start + 1 : end]))
    assert set(made) == {"city", "large"}
    blue, toast = (float(line.split()[-1]) for line in lines[-2:])
    assert blue > toast


def test_the_client_example():
    with running(ServerConfig(port=0), max_model_len=1024, num_blocks=600) as server:
        done = run_example("openai_client.py", f"{server.url}/v1", "tiny")
    # random weights: JSON may be cut short by max_tokens, all before it must have worked
    if done.returncode:
        assert "JSONDecodeError" in done.stderr, done.stderr
    assert "usage: " in done.stdout and "schema: {" in done.stdout


def snippets(page):
    """The Python of a page, in one piece."""
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))


@pytest.mark.parametrize("page", ["README.md", "docs/engine.md"])
def test_python_of_the_guides(page, monkeypatch, tmp_path):
    """Run as it stands, but for the model: a tiny one with the same options."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(blocktable, "LLM", lambda model, **options: make_llm(**options))
    exec(snippets(page), {})


def test_python_of_the_server_guide():
    with running(ServerConfig(port=0, served_name="smollm2")) as server:
        exec(snippets("docs/server.md").replace("http://127.0.0.1:8000", server.url), {})


def test_the_curl_line_of_the_readme_is_answered():
    (line,) = re.findall(r"^curl .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    words = shlex.split(line)
    (header,) = [words[i + 1] for i, word in enumerate(words) if word == "-H"]
    name, _, value = header.partition(": ")
    with running(ServerConfig(port=0)) as server:
        url = words[1].replace("http://127.0.0.1:8000", server.url)
        answer = httpx.post(url, content=words[words.index("-d") + 1], headers={name: value},
                            timeout=60)  # fmt: skip
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["role"] == "assistant"


def commands(page):
    """The lines of a guide that call our command, and those it names in a sentence, without their
    remarks."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`(blocktable [^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [line.split("  #")[0].strip() for line in lines if line.startswith("blocktable ")]


PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_flag_of_the_guides_exists(page, capsys):
    for line in commands(page):
        words = shlex.split(line.split(" > ")[0])
        assert run([words[1], "--help"]) == 0, line
        told = capsys.readouterr().out
        for word in words[2:]:
            flag = word.split("=")[0]
            if flag.startswith("-"):
                assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", told), (line, flag)


def test_make_serve_is_a_chat_with_the_inspector_open():
    """The README's claim, with the very command of the Makefile on a free port."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    told = subprocess.run(
        ["make", "-n", "serve"], cwd=ROOT, capture_output=True, text=True, check=True,
        env=alone | {"MFLAGS": ""},
    ).stdout  # fmt: skip
    command = told.strip().splitlines()[-1].split()
    assert command[0].endswith("blocktable") and command[1:] == ["serve", "smollm2"]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    made = subprocess.Popen(
        [sys.executable, "-m", "blocktable", *command[1:], "--port", str(port)],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        lines = [made.stderr.readline() for _ in range(2)]
        assert lines[1].strip() == f"inspector at {url}/inspect"
        with httpx.Client(
            base_url=url, timeout=120, transport=httpx.HTTPTransport(retries=5)
        ) as http:
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
            answer = http.post("/v1/chat/completions", json=body).json()
            assert answer["choices"][0]["message"]["content"]
            assert "blocktable inspector" in http.get("/inspect").text
    finally:
        made.terminate()
        made.wait(timeout=60)
        made.stderr.close()

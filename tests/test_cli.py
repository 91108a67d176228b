"""The command line: bad input is one line and exit code 2; no command loads more than it needs."""

import subprocess
import sys

import pytest

from blocktable.cli import run

BAD = [
    (["generate", "-p", "hi", "--max-tokens=-1"], "max_tokens must be at least 1, got -1"),
    (["generate", "-p", "hi", "--temperature=-1"], "temperature must be in [0, 100], got -1"),
    (["generate", "-p", "hi", "--top-p=0"], "top_p must be in (0, 1], got 0"),
    (["generate", "-p", "hi", "-n", "0"], "n must be in [1, 128], got 0"),
    (["generate", "-p", ""], "a prompt must not be empty"),
    (["generate"], "no prompts"),
    (["generate", "--max-tokens", "x", "-p", "hi"], "--max-tokens"),
    (["generate", "--prompts", "/no/such/file.jsonl"], "cannot read prompts"),
    (["no-such-command"], "no-such-command"),
    (["generate", "--no-such-option"], "--no-such-option"),
    (["serve", "--port=70000"], "port must be in [0, 65535], got 70000"),
    (["serve", "--api-key="], "api_key must not be empty"),
    (["serve", "--drain-seconds=nan"], "drain_seconds must be in [0, 1e+07], got nan"),
    (["serve", "--drain-seconds=inf"], "drain_seconds must be in [0, 1e+07], got inf"),
    (["inspect", "http://127.0.0.1:1"], "cannot read http://127.0.0.1:1/inspect"),
    (["chat", "--temperature=nan"], "temperature must be in [0, 100], got nan"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(b[0]) for b in BAD])
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("blocktable: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no prompts: at least 1 is needed"),
        (b'{"user": ""}\n', "user must be a text that is not empty, got ''"),
        (b'{"user": "a"}\n{"user": 5}\n', ":2: user must be a text that is not empty, got 5"),
        (b"{oops}\n", ":1: not JSON"),
        (b"[1]\n", ":1: expected a JSON object, got list"),
        (b'{"text": "a"}\n', ":1: expected user, system, messages or prompt"),
        (b'{"messages": []}\n', "messages must be a list of at least 1 message"),
        (b'{"messages": [{"content": "x"}]}\n', "messages[0] must be an object with a role"),
        (b'\xff\xfe{"user": "a"}', "is not UTF-8 text (byte 0)"),
    ],
)
def test_a_bad_prompt_file_names_line_and_field(tmp_path, content, message, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    assert run(["generate", "--prompts", str(path)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_help_names_every_command(capsys):
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in (
        "generate", "chat", "serve", "inspect", "replay", "simulate", "soak", "plan", "version",
    ):  # fmt: skip
        assert command in shown


def test_version_loads_no_torch():
    code = (
        "import sys; from blocktable.cli import run; assert run(['version']) == 0; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("blocktable ")


def test_without_a_command_the_help_is_shown_and_no_empty_error(capsys):
    assert run([]) == 2
    out, err = capsys.readouterr()
    assert "Usage" in out + err and not err.rstrip().endswith("blocktable:")


def test_the_servers_flags_are_the_engines_options(monkeypatch):
    """Each flag arrives as the option it names; what was not given is the engine's default."""
    import blocktable.serve.run as server
    from blocktable.engine.options import EngineOptions

    told: list[dict] = []
    monkeypatch.setattr(
        server, "serve_role", lambda model, role, config, options, **_: told.append(options)
    )
    flags = {
        "draft-tokens": 3, "policy": "priority", "preemption": "swap", "num-host-blocks": 9,
        "eviction": "reuse", "retain-share": 0.25, "kv-events": "tcp://127.0.0.1:*",
        "kv-events-replay": "tcp://127.0.0.1:*", "seed": 7, "gpu-memory-utilization": 0.5,
        "rank-timeout": 12.5, "max-num-seqs": 5, "block-size": 8,
    }  # fmt: skip
    assert not run(["serve", *(f"--{name}={value}" for name, value in flags.items())])
    made, plain = EngineOptions(**told[0]), EngineOptions(max_num_seqs=5, block_size=8)
    names = {"draft-tokens": "num_draft_tokens"}
    changed = {names.get(name, name.replace("-", "_")): value for name, value in flags.items()}
    assert vars(made) == vars(plain) | changed

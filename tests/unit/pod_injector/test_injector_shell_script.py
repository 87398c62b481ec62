"""Scripts of `sh -c`: commands and words as a shell sees them, checked against a shell."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from pod_injector.shell_script import UnreadableScript, simple_commands

SCRIPTS = {
    "two commands": (
        "pip install x && vllm serve m --port 8000",
        [["pip", "install", "x"], ["vllm", "serve", "m", "--port", "8000"]],
    ),
    "a pipe and a redirection": (
        "exec vllm serve m 2>&1 | tee /log",
        [["exec", "vllm", "serve", "m"], ["tee", "/log"]],
    ),
    "lines and continuations": (
        "set -e\nvllm serve m \\\n  --port 8000\n",
        [["set", "-e"], ["vllm", "serve", "m", "--port", "8000"]],
    ),
    "quotes": ("vllm serve 'a b' \"c d\"e\\ f", [["vllm", "serve", "a b", "c de f"]]),
    "a comment": ("vllm serve m # && rm -rf /\necho done", [["vllm", "serve", "m"], ["echo", "done"]]),
    "a hash in a word": ("echo a#b", [["echo", "a#b"]]),
    "an assignment before": ("HF_HOME=/m X=1 vllm serve m", [["vllm", "serve", "m"]]),
    "keywords": (
        "if true; then vllm serve m; else exit 1; fi",
        [["true"], ["vllm", "serve", "m"], ["exit", "1"], ["fi"]],
    ),
    "a group": ("{ vllm serve m & wait; }", [["vllm", "serve", "m"], ["wait"], ["}"]]),
    "a subshell": ("(cd /x && vllm serve m)", [["cd", "/x"], ["vllm", "serve", "m"]]),
    "an expansion": (
        'vllm serve "$MODEL" --host $(hostname -i)',
        [["vllm", "serve", "$MODEL", "--host", "$(hostname -i)"]],
    ),
    "brackets in an expansion": ("echo $(a '(' \")\" $((1 + (2)))) b", [["echo", "$(a '(' \")\" $((1 + (2))))", "b"]]),
    "redirections everywhere": ("<in vllm >out serve m &>all", [["vllm", "serve", "m"]]),
    "nothing": ("  # only this\n", []),
}


@pytest.mark.parametrize(("script", "expected"), SCRIPTS.values(), ids=SCRIPTS)
def test_commands_are_found_with_their_words(script, expected):
    assert [[word.text for word in command.words] for command in simple_commands(script)] == expected


@pytest.mark.parametrize(
    "script",
    [
        "cat <<EOF\nvllm serve m\nEOF",
        "vllm serve 'm",
        'vllm serve "m',
        "vllm serve $(x",
        "vllm serve `x",
        'vllm serve "$@"',
        "vllm serve ${*}",
        "vllm serve m --chat-template <(cat x)",
        "vllm serve m > >(tee log)",
        "echo $'it\\'s; vllm serve m #'",
    ],
)
def test_what_cannot_be_read_safely_is_said(script):
    with pytest.raises(UnreadableScript):
        simple_commands(script)


@pytest.mark.parametrize(
    "words",
    [
        ["vllm", "a b", "c'd", 'e"f', "g\\h", "$i", "`j`", "#k", "l;m", ""],
        ["vllm", '-x={"a": [1, 2]}', "n&o", "p|q", "r>s", "(t)", "u\nv"],
    ],
)
def test_words_are_those_that_a_shell_makes_of_them(words):
    script = " ".join(map(shlex.quote, words))

    (command,) = simple_commands(script)
    said = subprocess.run(["sh", "-c", f"printf '%s\\0' {script}"], capture_output=True, check=True, timeout=60).stdout

    assert [word.text for word in command.words] == words == said.decode().split("\0")[:-1]


def test_the_end_of_a_word_is_where_more_can_be_put():
    script = "vllm serve 'm n' 2>/dev/null | tee log"

    first = simple_commands(script)[0]

    assert script[: first.words[-1].end] == "vllm serve 'm n'"

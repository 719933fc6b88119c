"""One version, one distribution name that is this project's own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import minimind
from minimind.cli.main import main
from minimind.config.parse import parse_flags

ROOT = Path(__file__).resolve().parents[1]
# On the package index `minimind` alone belongs to another author.
STRANGER = re.compile(r"pip3? install(?: -{1,2}[\w-]+)* ['\"]?minimind(?!-deepspeed)")


@pytest.mark.parametrize("ask", [lambda: parse_flags(["--version"]), lambda: main(["--version"])])
def test_both_commands_print_the_version(ask, capsys):
    with pytest.raises(SystemExit) as ended:
        ask()
    assert not ended.value.code
    assert capsys.readouterr().out == f"minimind-deepspeed {minimind.__version__}\n"


def strangers(text: str) -> list[str]:
    """Every advice in `text` to install the distribution of another author."""
    joined = re.sub(r"[\"']\s*\n\s*f?[\"']", "", text)  # a message over several lines of source
    return STRANGER.findall(joined)


def test_no_one_is_sent_to_another_authors_package():
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    files = [ROOT / name for name in names if (ROOT / name).is_file()]
    texts = {path: path.read_bytes().decode(errors="replace") for path in files}
    texts.pop(Path(__file__).resolve(), None)
    assert {str(path) for path, text in texts.items() if strangers(text)} == set()


@pytest.mark.parametrize(
    "text",
    [
        "pip install 'minimind[gguf]'",
        "pip install -U minimind",
        '"... pip install"\n            " \'minimind[gguf]\'"',
    ],
)
def test_such_advice_is_found(text: str):
    assert strangers(text)
    assert not strangers(text.replace("minimind", "minimind-deepspeed"))


def test_windows_is_one_sentence_that_names_wsl():
    code = "import sys; sys.platform = 'win32'; import minimind"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith("on Windows install and run it under WSL 2")

"""The help of every command: defaults, spellings, examples, and completion made of the same."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess

import pytest

from minimind.cli import main as cli
from minimind.cli.command import Command, OfRunFlags
from minimind.config import parse as flags
from minimind.config.command_line import EXAMPLE, all_parsers
from minimind.config.flags import COMMON, FLAGS
from minimind.config.parse import parse_flags
from tests.conftest import ROOT

TRAIN = flags.build_parser()
COMMANDS = {parser.prog: parser for parser in all_parsers(cli.build_parser())}
PARSERS = {TRAIN.prog: TRAIN, **COMMANDS}
LEAVES = {prog: one for prog, one in COMMANDS.items() if not one._subparsers}


@pytest.fixture(params=PARSERS)
def parser(request: pytest.FixtureRequest) -> argparse.ArgumentParser:
    return PARSERS[request.param]


def options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings]


def help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The --help text of one option, on one line."""
    only = argparse.ArgumentParser(formatter_class=parser.formatter_class, add_help=False)
    only._add_action(action)
    return " ".join(only.format_help().split())


def test_every_command_is_covered():
    for prog, leaf in LEAVES.items():
        assert issubclass(leaf.get_default("command_class"), Command), prog
    assert len(LEAVES) >= 14


def test_every_default_is_shown_in_one_form(parser):
    for action in options_of(parser):
        text, default = help_of(parser, action), action.default
        if parser is TRAIN and action.dest in FLAGS:  # which keeps defaults out of argparse
            default = FLAGS[action.dest].default
            assert "(default: off)" in text or default is not False
        if default not in (None, False, [], (), argparse.SUPPRESS):
            assert text.count("(default: ") == 1, action.dest
        assert not re.search(r"\((\d[\w.]*|text|val|float32)\)", text), "a default, not called so"


@pytest.mark.parametrize(
    "words",
    [
        "data where RUN --json text.jsonl:3",
        "data where RUN --data_path DIR text.jsonl:3",
        "checkpoint diff A --debug B",
        "checkpoint average A --out DIR B",
        "report A --port 8000 B",
    ],
)
def test_a_flag_may_be_between_what_a_command_acts_on(words: str):
    """argparse alone takes RUN for FILE:LINE in the first, and does not know B in the others."""
    parser = cli.build_parser()
    before, flag, after = re.split(r" (--\w+(?: DIR| 8000)?) ", words)
    expected = parser.parse_args(f"{before} {after} {flag}".split())
    assert parser.parse_args(words.split()) == expected


@pytest.mark.parametrize("prog", LEAVES)
def test_what_a_command_acts_on_is_first_and_what_all_commands_share_last(prog):
    names = [action.dest for action in options_of(LEAVES[prog]) if action.dest != "help"]
    assert "checkpoint" not in names[1:]
    if names:
        assert names[-1] == "debug"
    assert "force" not in names[:-2]


def test_options_have_one_spelling_in_help_and_accept_both(parser):
    names = [name for action in options_of(parser) for name in action.option_strings]
    assert len({name.replace("_", "-") for name in names}) == len(names)


@pytest.mark.parametrize("prog", LEAVES)
def test_every_option_may_be_written_with_dashes(prog, capsys):
    words = prog.split()[1:]
    for action in options_of(LEAVES[prog]):
        name = action.option_strings[0].replace("_", "-")
        takes_value = action.nargs not in (0, "?")
        if takes_value and not isinstance(action, argparse.BooleanOptionalAction):
            # A value is missing of an option that is known, and of no other.
            assert cli.main([*words, name]) == 2
            assert (
                f"argument {'/'.join(action.option_strings)}: expected" in capsys.readouterr().err
            )


def test_a_value_keeps_its_dashes():
    args = cli.build_parser().parse_args(
        ["generate", "--max-new-tokens=3", "--prompt=--top-k", "--repetition-penalty", "1"]
    )
    assert (args.max_new_tokens, args.prompt, args.repetition_penalty) == (3, "--top-k", 1.0)
    rest = ["data", "inspect", "--row-tokens", "2", "--", "--no-verify"]
    args = cli.build_parser().parse_args(rest)
    assert (args.row_tokens, str(args.directory), args.no_verify) == (2, "--no-verify", False)


def test_every_command_shows_an_example_that_parses(parser):
    shown = parser.format_help().split(f"{EXAMPLE}\n")[1].strip()
    command, *words = shlex.split(shown)
    if command == "train_pretrain.py":
        assert parse_flags(words).dry_run
        return
    assert (command, shown.startswith(parser.prog)) == ("minimind", True)
    args, rest = cli.build_parser().parse_known_args(words)
    assert not rest or issubclass(args.command_class, OfRunFlags)
    parse_flags([word for word in rest if word != "--"])


@pytest.mark.parametrize("prog", ["minimind", "train_pretrain.py"])
@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_is_printed_for_each_shell(prog, shell, capsys):
    build = cli.build_parser if prog == "minimind" else flags.build_parser
    with pytest.raises(SystemExit) as ended:
        build().parse_args(["--print_completion", shell])
    script = capsys.readouterr().out
    assert ended.value.code == 0
    assert "accumulation_steps" in script or "max_new_tokens" in script
    choices = [action.choices for action in flags.build_parser()._actions if action.choices]
    assert choices == [("bash", "zsh", "tcsh")]  # others parse with the same parser


def test_bash_completes_commands_options_choices_and_files(tmp_path, capsys):
    def script(parser: argparse.ArgumentParser) -> str:
        with pytest.raises(SystemExit):
            parser.parse_args(["--print_completion", "bash"])
        return capsys.readouterr().out

    scripts = script(cli.build_parser()) + script(flags.build_parser())
    (tmp_path / "my_text.jsonl").touch()

    def completed(command: str, *words: str) -> list[str]:
        typed = shlex.join([command, *words])
        function = f'"$(complete -p {command} | sed "s/.* -F \\([^ ]*\\) .*/\\1/")"'
        script = f"{scripts}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words)}; {function}"
        script += "\nprintf '%s\\n' \"${COMPREPLY[@]}\""
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
        return done.stdout.split()

    assert completed("minimind", "gen") == ["generate"]
    assert completed("minimind", "checkpoint", "pr") == ["prune"]
    assert completed("minimind", "generate", "--max_") == ["--max_new_tokens"]
    for command in ("train", "launch", "plan"):  # which take the flags of a run, too
        assert completed("minimind", command, "--deep") == ["--deepspeed_config"]
        assert completed("minimind", command, "--schedule", "w") == ["wsd"]
    assert completed("minimind", "train", "--help", "opt") == ["optimizer"]
    assert completed("minimind", "generate", "--device", "c") == ["cpu", "cuda"]
    assert completed("minimind", "eval", "--data_path", "my") == ["my_text.jsonl"]
    assert completed("run_accelerate.sh", "--dtype", "b") == ["bfloat16", "bf16-mixed"]
    assert completed("run_accelerate.sh", "--data_path", "my") == ["my_text.jsonl"]
    assert "--learning_rate" in completed("run_accelerate.sh", "--l")


@pytest.mark.sample(1)
@pytest.mark.parametrize("topic", ["", "engine", "all"])
def test_help_of_the_launcher_may_be_cut_off(topic):
    """As by `| head`."""
    line = f"bash run_accelerate.sh --help {topic} | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    whole = subprocess.run(
        ["bash", "run_accelerate.sh", "--help", *topic.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ("--zero_update" in whole.stdout) == bool(topic)
    assert ("--data_path PATH" in whole.stdout) == (topic != "engine")


@pytest.mark.parametrize("command", ["train", "launch"])
def test_help_of_a_run_shows_what_most_runs_need_then_a_group_then_all(command, capsys):
    def printed(*topic: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main([command, "--model", "tiny", "--help", *topic])
        assert ended.value.code == 0
        return capsys.readouterr().out

    first = printed()
    assert set(re.findall(r"^  --(\w+)", first, re.MULTILINE)) == {*COMMON}
    assert [line for line in first.splitlines() if line.startswith("more: ")]
    assert re.search(r"^  --muon_momentum\b", printed("optimizer"), re.MULTILINE)
    every = set(re.findall(r"^  --(\w+)", printed("all"), re.MULTILINE))
    assert every >= {*FLAGS}
    for group in {flag.group for flag in FLAGS.values()}:
        assert f"{group} (" in first
        found = set(re.findall(r"^  --(\w+)", printed(group), re.MULTILINE))
        assert found == {name for name, flag in FLAGS.items() if flag.group == group}
    assert cli.main([command, "--help", "optimzer"]) == 2
    assert "did you mean optimizer?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["data"], ["checkpoint"]], ids=" ".join)
def test_words_without_a_command_print_the_commands_there_are(capsys, words):
    assert cli.main(words) == 2
    output = capsys.readouterr()
    assert f"usage: {' '.join(['minimind', *words])} " in output.out
    assert not output.err

"""Every writer at a place that holds something else: nothing there is replaced or joined."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from minimind.checkpoint.mirror import require_mirror
from minimind.checkpoint.run_folder import require_writable, tokenizer_kept
from minimind.cli.main import COMMANDS, build_parser, main
from minimind.cli.train import StartScript
from minimind.config.command_line import all_parsers, commands_of
from minimind.config.parse import parse_flags
from minimind.errors import LockedError, StorageError, UsageError
from tests.conftest import Trained, sentences
from tools.faults.mirrors import FLAGS, content, train

SWEEP = "{flags: {data_path: TEXT, eval_interval: 1}, dimensions: {seed: [1, 2]}, trials: 1}"
LADDER = "{flags: {data_path: TEXT, dim: 64}, sizes: [{n_layers: 1}, {n_layers: 2}, {n_layers: 3},"
LADDER += " {n_layers: 4}], tokens: [1e4]}"
# Commands that write a folder or a file, and their --force.
FOLDERS: dict[str, tuple[str, str]] = {
    "prepare": ("prepare --data_path TEXT --vocab_size 600 --out OUT", "--force"),
    "prepare, merged": ("prepare --merge --out OUT", "--force"),
    "data filter": ("data filter TEXT --min_chars 2 --out OUT", "--force"),
    "data logits": (
        "data logits --teacher RUN --data_path TEXT --max_seq_len 16 --dtype float32 --device cpu"
        " --deepspeed_config none --top_k 2 --out OUT",
        "--force",
    ),
    "export, llama": ("export --checkpoint RUN --format llama --out OUT", "--force"),
    "export, minimind": ("export --checkpoint RUN --format minimind --out OUT", "--force"),
    "import": ("import --from llama EXPORT --out OUT", "--force"),
    "consolidate": ("checkpoint consolidate RUN --out OUT", "--force"),
    "average": ("checkpoint average RUN ONE --out OUT", "--force"),
    "tokenizer train": ("tokenizer train TEXT --vocab_size 600 --out OUT", "--force"),
    "tokenizer extend": ("tokenizer extend RUN --learn 20 --data_path TEXT --out OUT", "--force"),
    "sweep": ("sweep SWEEP --out_dir OUT", ""),
    "scaling, run": ("scaling run LADDER --out_dir OUT", ""),
    "tune": ("tune --data_path TEXT --out_dir OUT", ""),
}
FILES: dict[str, tuple[str, str]] = {
    "report": ("report RUN --out OUT", "--force"),
    "scaling": ("scaling RUN --out OUT", "--force"),
    "init": ("init --data_path TEXT --hours 1 --gpu_model h100 --out OUT", "--force"),
    "generate": ("generate --checkpoint RUN --prompts PROMPTS --out OUT", "--force"),
}
# What the commands with --force replace: their own.
OWN = {
    ("prepare", "prepared"),
    ("prepare, merged", "prepared"),
    ("consolidate", "export"),
    ("average", "export"),
    ("data filter", "filtered"),
    ("data logits", "records"),
    ("export, llama", "export"),
    ("export, minimind", "export"),
    ("import", "export"),
    ("tokenizer train", "tokenizer"),
    ("tokenizer extend", "export"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, trained: Trained) -> Path:
    """What a place may hold, by name: `things/NAME`."""
    place = tmp_path_factory.mktemp("outputs")
    text, things = place / "text.jsonl", place / "things"
    lines = (json.dumps({"text": one}, ensure_ascii=False) for one in sentences(1, 200))
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    (place / "sweep.yaml").write_text(SWEEP.replace("TEXT", str(text)))
    (place / "ladder.yaml").write_text(LADDER.replace("TEXT", str(text)))
    (place / "prompts.txt").write_text("one\n")
    shutil.copytree(trained.run, things / "run")
    given = (
        ("prepare", "prepared"),
        ("export, llama", "export"),
        ("data filter", "filtered"),
        ("data logits", "records"),
        ("tokenizer train", "tokenizer"),
    )
    for name, thing in given:
        assert main(words(place, FOLDERS[name][0], things / thing)) == 0
    for name, text_of in {"notes": "mine", "killed": ""}.items():
        (things / name).mkdir()
        (things / name / "notes.txt").write_text(text_of)
    for name in ("README.md", "src/a.py", ".git/HEAD", ".git/config"):
        path = things / "repository" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    shutil.copytree(things / "repository" / ".git", things / "new repository" / ".git")
    shutil.copytree(things / "export", things / "model of others")
    (path,) = (things / "model of others").glob("*.safetensors")
    path.write_bytes(path.read_bytes().replace(b"minimind-deepspeed", b"another-program.."))
    shutil.copytree(things / "export", things / "export with notes")
    (things / "export with notes" / "notes.txt").write_text("mine")
    shutil.copytree(things / "prepared", things / "tokenizer of others in it")
    (things / "tokenizer of others in it" / "tokenizer" / "vocab.txt").write_text("a")
    return place


def words(place: Path, command: str, out: Path) -> list[str]:
    things = place / "things"
    one = sorted((things / "run" / "checkpoints").glob("step_*"))[0]
    named = {"TEXT": place / "text.jsonl", "SWEEP": place / "sweep.yaml", "OUT": out}
    named |= {"LADDER": place / "ladder.yaml"}
    named |= {"RUN": things / "run", "EXPORT": things / "export", "ONE": one}
    named |= {"PROMPTS": place / "prompts.txt"}
    return [str(named.get(word, word)) for word in command.split()]


THINGS = (
    "run",
    "prepared",
    "export",
    "filtered",
    "tokenizer",
    "records",
    "notes",
    "model of others",
)
THINGS += ("export with notes", "tokenizer of others in it", "repository", "new repository")


def test_every_command_with_an_output_is_in_a_table():
    def with_output(parser: argparse.ArgumentParser, name: str = "") -> Iterator[str]:
        for word, below in commands_of(parser):
            yield from with_output(below, f"{name} {word}".strip())
        if {"out", "out_dir"} & {action.dest for action in parser._actions}:
            yield name

    assert [*all_parsers(build_parser())]  # which adds the arguments of every command
    shown = {"env"}  # which writes nothing there
    commands = [command for command, _ in (*FOLDERS.values(), *FILES.values())]
    listed = {name for name in with_output(build_parser())} - shown
    assert {name for name in listed if not any(c.startswith(f"{name} ") for c in commands)} == set()
    assert {c for c in commands if not any(c.startswith(f"{name} ") for name in listed)} == set()
    of_the_run = {
        name
        for name, command in COMMANDS.items()
        if isinstance(command, type) and issubclass(command, StartScript)
    }
    assert of_the_run == {"train", "launch"}


@pytest.mark.sample(30)
@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("writer", FOLDERS)
def test_a_folder_that_holds_something_else_is_left_alone(
    writer: str, thing: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = Path(shutil.copytree(place / "things" / thing, tmp_path / "out"))
    before = content(tmp_path)
    command, force = FOLDERS[writer]
    forces = ("",) if (writer, thing) in OWN or not force else ("", " --force")
    for force in forces:
        assert main(words(place, command + force, out)) == 2
        assert f"{command.split()[-2]} {out} " in capsys.readouterr().err
        assert content(tmp_path) == before


def as_of_others(folder: Path) -> None:
    """Take away the marks in the tensors, and the card."""
    for path in folder.glob("*.safetensors"):
        whole = path.read_bytes()
        end = 8 + int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8:end])
        del header["__metadata__"]["producer"]
        head = json.dumps(header, separators=(",", ":")).encode()
        head += b" " * (-len(head) % 8)
        path.write_bytes(len(head).to_bytes(8, "little") + head + whole[end:])
    (folder / "README.md").unlink(missing_ok=True)


EXPORTERS = ("export, llama", "export, minimind", "consolidate")


@pytest.mark.parametrize(
    ("writer", "name"),
    [
        ("export, minimind", "train.py"),
        ("export, llama", "train.py"),
        ("export, llama", "layers.py"),
    ],
)
def test_force_replaces_no_code_of_others(
    writer: str, name: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    command, force = FOLDERS[writer]
    out = tmp_path / "out"
    assert main(words(place, command, out)) == 0
    (out / name).write_text("import torch\n")
    before = content(out)
    assert main(words(place, f"{command} {force}", out)) == 2
    error = capsys.readouterr().err
    assert f"--out {out} holds '{name}', which this version of export does not write, and" in error
    assert error.endswith("; remove it if another version wrote it, or give another folder\n")
    assert content(out) == before


@pytest.mark.parametrize(
    "theirs", ["config.json", "generation_config.json", "README.md", "model.safetensors"]
)
@pytest.mark.parametrize("writer", EXPORTERS)
def test_force_replaces_no_model_of_others(
    writer: str, theirs: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    command, force = FOLDERS[writer]
    out = tmp_path / "out"
    assert main(words(place, command, out)) == 0
    card = (out / "README.md").read_bytes() if (out / "README.md").exists() else b""
    as_of_others(out)
    path = out / theirs
    if theirs.endswith(".json"):
        values = json.loads(path.read_bytes()) if path.exists() else {}
        values.pop("torch_dtype", None)
        values["transformers_version"] = "5.0.0"
        path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    elif theirs == "README.md":  # with the tensors of another program
        path.write_bytes(card or b"mine")
    else:
        path.write_bytes(path.read_bytes().replace(b'{"format":"pt"}', b'{"format":"np"}'))
    before = content(out)
    assert main(words(place, f"{command} {force}", out)) == 2
    error = capsys.readouterr().err
    assert f"--out {out} was not written by " in error or f"--out {out} holds '{theirs}'" in error
    assert content(out) == before


@pytest.mark.parametrize("writer", FILES)
@pytest.mark.parametrize("name", ["notes.txt", "metrics.jsonl", "page.html"])
def test_a_file_of_something_else_is_left_alone(
    writer: str, name: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / name
    out.write_text('{"event": "step"}\n' if name == "metrics.jsonl" else "<html>mine")
    before = content(tmp_path)
    for force in ("", " --force"):
        assert main(words(place, FILES[writer][0] + force, out)) == 2
        assert f"--out {out} " in capsys.readouterr().err
        assert content(tmp_path) == before


@pytest.mark.parametrize(
    ("thing", "name"),
    [
        ("prepared", "tokenizer"),
        ("config.yaml", "config.yaml"),
        ("report.html", "report.html"),
        ("rejected.jsonl", "rejected.jsonl"),
        ("console.log", "console.log"),
    ],
)
def test_a_run_replaces_nothing_in_a_folder_that_is_no_runs(
    thing: str, name: str, place: Path, tmp_path: Path
):
    out = tmp_path / "out"
    if thing == "prepared":
        shutil.copytree(place / "things" / thing, out)
    else:
        out.mkdir()
        (out / thing).write_text("mine")
    before = content(tmp_path)
    with pytest.raises(
        UsageError, match=rf"--out_dir {out} is not .* holds '{name}', which a run would"
    ):
        train({**FLAGS, "data_path": [str(place / "text.jsonl")]}, out_dir=str(out))
    assert content(tmp_path) == before


# What projects of others have, by path: as names of a run's files, without being a run's.
PROJECTS: dict[str, dict[str, str]] = {
    "metrics": {"metrics.jsonl": '{"loss": 3}\n'},
    "metrics of another form": {"metrics.jsonl": '{"event": "step", "loss": 3}\n'},
    "a lock": {".lock": ""},
    "an owner": {"mirror.json": '{"mirrors": []}'},
    "checkpoints": {"checkpoints/step_00000100/model.pt": "mine"},
    "all": {
        ".lock": "",
        "metrics.jsonl": "loss 3\n",
        "mirror.json": '{"run": "0123"}',
        "checkpoints/step_00000100/model.pt": "mine",
    },
}


def lay(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("is_dry", [False, True])
@pytest.mark.parametrize("project", PROJECTS)
def test_a_run_replaces_nothing_of_a_project_with_names_of_a_runs_files(
    project: str, is_dry: bool, place: Path, tmp_path: Path
):
    mine = {"config.yaml": "model: bert\n", "tokenizer/tokenizer.json": "{}"}
    out = lay(tmp_path / "out", {**PROJECTS[project], **mine})
    before = content(out)
    flags = {**FLAGS, "data_path": [str(place / "text.jsonl")], "dry_run": is_dry}
    with pytest.raises(
        UsageError, match=rf"--out_dir {out} is not .* holds 'config.yaml', which a run wou"
    ):
        train(flags, out_dir=str(out))
    assert content(out) == before


def test_a_run_does_not_continue_metrics_of_others(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"loss": 3}\n')
    with pytest.raises(
        UsageError, match=r"and holds 'metrics\.jsonl', which a run would append to;"
    ):
        require_writable(tmp_path)


def test_a_config_in_out_dir_is_told_to_be_kept_elsewhere(place: Path, tmp_path: Path):
    (tmp_path / "config.yaml").write_text("max_steps: 1\n")
    flags = {**FLAGS, "data_path": [str(place / "text.jsonl")], "dry_run": True}
    flags["config"] = str(tmp_path / "config.yaml")
    with pytest.raises(UsageError, match="is the file of --config: keep it elsewhere, or give ano"):
        train(flags, out_dir=str(tmp_path))


@pytest.mark.parametrize("way", ["{out}/config.yaml", "{link}/config.yaml"])
def test_a_config_that_was_copied_from_a_run_does_not_prove_a_run(
    way: str, place: Path, tmp_path: Path
):
    mine = {"tokenizer/tokenizer.json": "{}", "report.html": "mine"}
    out = lay(tmp_path / "out", mine)
    (tmp_path / "link").symlink_to("out")
    shutil.copy(place / "things" / "run" / "config.yaml", out)
    config = way.format(out=out, link=tmp_path / "link")
    before = content(out)
    for name, remedy in {
        "config.yaml": "it is the file of --con",
        "report.html": "move it",
    }.items():
        with pytest.raises(UsageError, match=rf"holds '{name}', which .*; {remedy}"):
            require_writable(out, config=config)
        (out / name).rename(tmp_path / name)
    (tmp_path / "config.yaml").rename(out / "config.yaml")
    require_writable(out)  # of another start
    assert content(out).items() <= before.items()
    shutil.copy(place / "things" / "run" / "metrics.jsonl", out)
    require_writable(out, config=config)


@pytest.mark.parametrize(
    "way", ["out/tokenizer", "link/tokenizer", "out/../out/tokenizer", "~/out/tokenizer"]
)
def test_a_tokenizer_in_out_dir_is_known_by_every_path(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    lay(tmp_path / "out", {"tokenizer/tokenizer.model": ""})
    (tmp_path / "link").symlink_to("out")
    (tmp_path / "loop").symlink_to("loop")
    for out in ("out", "link"):
        require_writable(Path(out), way)
        require_writable(Path(out), f"{way}/tokenizer.model")
        for other in ("out", "elsewhere", "loop"):
            with pytest.raises(UsageError, match="holds 'tokenizer', which a run would replace"):
                require_writable(Path(out), other)


def test_a_link_to_a_tokenizer_is_not_written_through(place: Path, tmp_path: Path):
    """Nor in the folder of a run, whose own tokenizer people may have moved and linked."""
    lay(tmp_path / "shared", {"tokenizer.model": ""})
    out = lay(tmp_path / "out", {"rejected.jsonl": ""})
    (out / "tokenizer").symlink_to(tmp_path / "shared")
    for of_a_run in (False, True):
        if of_a_run:
            shutil.copy(place / "things" / "run" / "metrics.jsonl", out)
        for tokenizer in (None, str(tmp_path / "shared"), str(out / "tokenizer")):
            with pytest.raises(UsageError, match="holds 'tokenizer', which is a link, and a run"):
                require_writable(out, tokenizer)


@pytest.mark.parametrize("task", ["pretrain", "sft"])
def test_a_run_leaves_the_tokenizer_that_it_reads_in_out_dir_as_it_is(
    task: str, place: Path, tmp_path: Path
):
    """Files that it does not read included; one that fine-tunes would change it, and is refused."""
    tokenizer = tmp_path / "out" / "tokenizer"
    shutil.copytree(place / "things" / "run" / "tokenizer", tokenizer)
    (tokenizer / "special_tokens_map.json").write_text("{}")
    before = content(tokenizer)
    flags = {"out_dir": str(tmp_path / "out"), "tokenizer": str(tokenizer), "task": task}
    run = parse_flags([word for name, value in flags.items() for word in (f"--{name}", value)])
    if task == "sft":
        assert tokenizer_kept(run) is None
        return
    flags |= {"data_path": str(place / "text.jsonl"), "max_steps": "1"}
    train({**FLAGS, **flags, "data_path": [flags["data_path"]], "max_steps": 1})
    assert content(tokenizer) == before


def test_the_config_of_a_start_that_ended_before_its_first_event_is_a_runs(
    place: Path, tmp_path: Path
):
    shutil.copy(place / "things" / "run" / "config.yaml", tmp_path)
    config = str(tmp_path / "config.yaml")
    with pytest.raises(UsageError, match="is the file of --config"):
        require_writable(tmp_path, config=config)
    (tmp_path / "metrics.jsonl").touch()
    require_writable(tmp_path, config=config)


@pytest.mark.parametrize(
    "left",
    [
        ("config.yaml",),  # by a killed start
        (".lock", "config.yaml", "tokenizer"),
        ("metrics.jsonl", "tokenizer", "report.html"),  # by people who tidied up
        ("checkpoints", "tokenizer", "ds_config.resolved.json"),
    ],
)
def test_what_is_left_of_a_run_is_a_runs(left: tuple[str, ...], place: Path, tmp_path: Path):
    run = place / "things" / "run"
    for name in left:
        copy = shutil.copytree if (run / name).is_dir() else shutil.copy
        copy(run / name, tmp_path / name)
    (tmp_path / "rejected.jsonl").touch()
    require_writable(tmp_path)


@pytest.mark.parametrize("is_dry", [False, True])
@pytest.mark.parametrize("name", ["nul\0", "dangling"])
def test_an_out_dir_that_cannot_be_there_is_told(
    name: str, is_dry: bool, place: Path, tmp_path: Path
):
    (tmp_path / "dangling").symlink_to("nothing")
    flags = {**FLAGS, "data_path": [str(place / "text.jsonl")], "dry_run": is_dry}
    with pytest.raises(StorageError, match=r"(nul|dangling).*give another"):
        train(flags, out_dir=str(tmp_path / name))


@pytest.mark.parametrize("is_dry", [False, True])
def test_a_run_does_not_begin_in_a_mirror(is_dry: bool, place: Path, tmp_path: Path):
    out = lay(tmp_path / "mirror", {"mirror.json": '{"run": "0123", "identity": {}}'})
    before = content(out)
    flags = {**FLAGS, "data_path": [str(place / "text.jsonl")], "dry_run": is_dry}
    with pytest.raises(
        LockedError, match=f"^--out_dir {out} is the --mirror of a run; to continue"
    ):
        train(flags, out_dir=str(out))
    assert content(out) == before


@pytest.mark.sample(4)
@pytest.mark.parametrize("thing", [thing for thing in THINGS if thing != "run"])
def test_a_run_changes_nothing_that_is_there(thing: str, place: Path, tmp_path: Path):
    out = Path(shutil.copytree(place / "things" / thing, tmp_path / "out"))
    before = content(out)
    flags = {**FLAGS, "max_steps": 1, "data_path": [str(place / "text.jsonl")]}
    flags |= {"cache_dir": str(tmp_path / "cache"), "out_dir": str(out)}
    if (out / "tokenizer").exists():  # which a run would replace
        with pytest.raises(
            UsageError, match=f"--out_dir {out} is not .* holds 'tokenizer', which a run w"
        ):
            train(flags)
        assert content(out) == before
    else:
        assert train(flags) == 0
        assert before.items() <= content(out).items()


@pytest.mark.parametrize("resume", ["auto", "none"])
@pytest.mark.parametrize("thing", THINGS)
def test_a_mirror_begins_in_no_folder_that_holds_something(
    thing: str, resume: str, place: Path, tmp_path: Path
):
    folder = Path(shutil.copytree(place / "things" / thing, tmp_path / "mirror"))
    before = content(folder)
    with pytest.raises(
        LockedError, match=rf"^--mirror file://{folder} (holds '.*' and|is the --o)"
    ):
        require_mirror(f"file://{folder}", tmp_path / "run", resume)
    assert content(folder) == before


def test_a_run_may_begin_beside_a_log_and_its_own_tokenizer(place: Path, tmp_path: Path):
    require_writable(tmp_path)
    (tmp_path / "slurm.log").write_text("job 1")
    shutil.copytree(place / "things" / "tokenizer", tmp_path / "tokenizer")
    require_writable(tmp_path, str(tmp_path / "tokenizer"))
    shutil.copy(place / "things" / "run" / "config.yaml", tmp_path)
    require_writable(tmp_path)


def test_prepare_builds_in_no_folder_of_others(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "notes.txt").write_text("mine")
    assert main(words(place, FOLDERS["prepare"][0], tmp_path / "out")) == 2
    assert "out.part holds 'notes.txt', which minimind prepare did not" in capsys.readouterr().err
    assert content(tmp_path) == {"out.part/notes.txt": b"mine"}


# Of a URL in their place, a folder like "s3:" would be made, or "s3:/b" be missing.
PATHS = (
    *(
        "train --out_dir URL",
        "train --cache_dir URL",
        "train --resume URL",
        "train --tokenizer URL",
    ),
    *("train --init_from URL", "train --task sft --chat_template URL", "train --skip_rows URL"),
    *("prepare TEXT --out URL", "prepare TEXT --out=URL", "prepare TEXT --out o --tokenizer URL"),
    *("prepare --sources URL --out o", "data filter TEXT --out URL", "sweep URL --out_dir o"),
    *("sweep SWEEP --out_dir URL", "tokenizer train TEXT --out URL", "tokenizer inspect URL"),
    *(
        "export --checkpoint RUN --format llama --out URL",
        "export --checkpoint URL --format llama --out o",
    ),
    *("import --from llama EXPORT --out URL", "import --from llama URL --out o"),
    *("checkpoint consolidate RUN --out URL", "checkpoint average RUN URL --out o"),
    *("checkpoint list URL", "checkpoint prune --checkpoint URL --keep_last 1"),
    *("report RUN --out URL", "report RUN URL", "scaling RUN --out URL", "env --out_dir URL"),
    *("generate --checkpoint URL --prompt a", "generate --checkpoint RUN --prompts URL"),
    *("chat --model URL --once a", "eval --checkpoint URL --data_path TEXT"),
    *("data at URL --step 1", "doctor --checkpoint URL", "generate URL --prompt a"),
)


@pytest.mark.sample(40)
@pytest.mark.parametrize("url", ["s3://bucket/x", "file:///x", "HTTPS://h/x?sig=secret"])
@pytest.mark.parametrize("command", PATHS)
def test_a_url_in_place_of_a_path_is_refused(
    command: str,
    url: str,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    given = words(place, command.replace("URL", url), tmp_path)
    if command.startswith("train"):
        flag = given[-2].removeprefix("--")
        with pytest.raises(UsageError, match=rf"^{flag} = .* \(--{flag}\) is a URL, but only a"):
            parse_flags(given[1:])
    else:
        assert main(given) == 2
        error = capsys.readouterr().err
        assert f"{url.partition('?')[0]}" in error
        assert "is a URL, but only a local path works here; give one" in error
        assert "secret" not in error
    assert not any(tmp_path.iterdir())


def test_a_url_in_a_prompt_is_text(place: Path, capsys: pytest.CaptureFixture[str]):
    command = "generate --checkpoint RUN --max_new_tokens 1 --device cpu --prompt https://h/x?a=1"
    assert main(words(place, command, place)) == 0
    assert "https://h/x?a=1" in capsys.readouterr().out

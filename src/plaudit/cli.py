"""The commands. Each reads a TOML file and ``key=value`` overrides, calls one function, and says what it made.

A user's mistake ends with one or two lines and exit status 2; ``--debug`` shows the traceback. Nothing heavy is
imported before a command is known to be well formed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from plaudit import config as configs
from plaudit.errors import ConfigError, DataError, PlauditError, RunError
from plaudit.schema import C, Frozen, build, dump, leaves, read

STAGES: dict[str, tuple[type[configs.RunConfig], str]] = {
    "quickstart": (configs.QuickstartConfig, "the whole way on real text: SFT, labels, reward model, PPO, report"),
    "sft": (configs.SFTConfig, "fine-tune a language model on demonstrations"),
    "collect": (configs.CollectConfig, "sample k answers a prompt into a preference store"),
    "label": (configs.LabelConfig, "label the store's comparisons: a page for people, --oracle or --judge MODEL"),
    "reward": (configs.RewardConfig, "train a reward model from the store"),
    "ppo": (configs.PPOConfig, "improve a model by PPO against a reward"),
    "dpo": (configs.DPOConfig, "train a model on preferences directly, without a reward model"),
    "evaluate": (configs.EvaluateConfig, "compare a model with its reference on held-out prompts"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status is 0, 1 for a check that failed, 2 for a user's mistake, 130 after Ctrl-C, 141
    where nobody reads the output any more."""
    try:
        return _main(argv)
    finally:
        _flush()


def _flush() -> None:
    """Writes what is still to be written; were it left to Python's end, an error could no more be dealt with.

    Raises:
        SystemExit: it cannot be written.
    """
    try:
        print(end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise SystemExit(141) from None
        print(f"plaudit: standard output: cannot be written ({error.strerror})", file=sys.stderr)
        raise SystemExit(2) from None


def _main(argv: Sequence[str] | None) -> int:
    arguments = _parse(argv)
    if arguments.command is None:
        _parser().print_help()
        return 2
    try:
        return arguments.run(arguments) or 0
    except PlauditError as error:
        if arguments.debug:
            raise
        from plaudit.errors import Interrupted

        print(f"plaudit: {error}", file=sys.stderr)
        return 130 if isinstance(error, Interrupted) else 2
    except KeyboardInterrupt:
        if arguments.debug:
            raise
        print(f"plaudit: interrupted; {_how_to_resume(arguments)}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141
    except Exception as error:
        if arguments.debug or not _is_environment(error):
            raise
        print(f"plaudit: {_environment_message(error)}", file=sys.stderr)
        return 2


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line's words. Overrides may stand before and after options, which argparse alone does not take."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        if not hasattr(arguments, "config") or any(word.startswith("-") for word in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        arguments.config = [*arguments.config, *rest]
    return arguments


def _is_environment(error: Exception) -> bool:
    return isinstance(error, OSError | MemoryError)


def _environment_message(error: Exception) -> str:
    reason = getattr(error, "strerror", None) or str(error)
    place = getattr(error, "filename", None)
    return f"{place + ': ' if place else ''}{reason}; --debug shows where"


def _how_to_resume(arguments: argparse.Namespace) -> str:
    out = getattr(arguments, "opened", None)
    if out and (Path(out) / "config.json").exists():
        return f"go on with `plaudit {arguments.command} --resume {out}`"
    return "nothing was begun"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="plaudit", description="Glass-box RLHF: from human choices to an aligned language model."
    )
    from plaudit import __version__

    parser.add_argument("--version", action="version", version=f"plaudit {__version__}")
    parser.set_defaults(command=None, debug=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (schema, title) in STAGES.items():
        command = _command(commands, name, title, _label if name == "label" else _stage, schema)
        command.add_argument("config", nargs="*", metavar="FILE.toml | key=value", help="a configuration and overrides")
        command.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
        command.add_argument("--resume", metavar="RUN", help="go on with the run in this folder")
        if name == "label":
            _label_options(command)
    _store_parser(commands)
    report = _command(commands, "report", "make report.html from a run folder", _report)
    report.add_argument("run_folder", metavar="RUN", help="a run folder")
    trace = _command(commands, "trace", "show one answer of a PPO run token by token, with every number's sum", _trace)
    trace.add_argument("run_folder", metavar="RUN", help="a PPO run, or a quickstart")
    trace.add_argument("--iteration", type=int, metavar="K", help="a traced iteration (default: the newest)")
    trace.add_argument("--row", type=int, metavar="N", help="which of its traced answers, from 0")
    trace.add_argument("--prompt", default="", metavar="TEXT", help="the newest answer with this in its prompt")
    trace.add_argument("--html", metavar="FILE", help="where the page goes (default: trace.html in the run folder)")
    trace.add_argument("--language", choices=["en", "zh"], default="en", help="the page's language")
    compare = _command(
        commands, "compare", "a page on which two models answer and you vote, blind", _compare, configs.CompareConfig
    )
    compare.add_argument("first", metavar="MODEL_A", help="smollm2, a folder or a hub id")
    compare.add_argument("second", metavar="MODEL_B", help="the same")
    compare.add_argument("config", nargs="*", metavar="key=value", help="overrides")
    watch = _command(commands, "watch", "a live page over PPO runs: curves, answers, warnings", _watch)
    watch.add_argument("run_folders", nargs="+", metavar="RUN", help="PPO runs or quickstarts, shown side by side")
    watch.add_argument("--host", default="127.0.0.1", help="address to serve on (default: this machine alone)")
    watch.add_argument("--port", type=int, default=8112, help="port to serve on (default: 8112; 0: any that is free)")
    vectors = _command(commands, "vectors", "check files of recorded numbers against the named conventions", _vectors)
    vectors.add_argument("files", nargs="+", metavar="FILE", help="JSON: PPO steps, reward losses, adaptive KL")
    explain = _command(commands, "explain", "say in words what a PPO configuration does at each step", _explain)
    explain.add_argument("config", nargs="*", metavar="FILE.toml | key=value", help="as for `plaudit ppo`")
    score = _command(commands, "score", "score texts with a reward model", _score, configs.ScoreConfig)
    score.add_argument("model", metavar="MODEL", help="a reward model's folder")
    score.add_argument("file", metavar="FILE", help="rows with text, or prompt and response")
    score.add_argument("config", nargs="*", metavar="key=value", help="overrides")
    chat = _command(commands, "chat", "talk to a model", _chat, configs.ChatConfig)
    chat.add_argument("model", metavar="MODEL", help="smollm2, a folder or a hub id")
    chat.add_argument("config", nargs="*", metavar="key=value", help="overrides")
    return parser


def _label_options(command: argparse.ArgumentParser) -> None:
    command.usage = "plaudit label [STORE] [FILE.toml | key=value ...] [--oracle | --judge MODEL] [options]"
    command.epilog = (
        "The first word that is neither a .toml file nor key=value is the store.\n\n"
        f"the page's {_keys(configs.PageConfig)}\n\nwith --oracle or --judge, {_keys(configs.LabelConfig)}"
    )
    command.add_argument("--oracle", action="store_true", help="a programme labels, and is recorded as such")
    command.add_argument("--judge", metavar="MODEL", help="a language model labels; see judge.model below")
    command.add_argument("--store", help="the store, also as postgresql://user@host/database")
    command.add_argument("--host", help="the page: address to serve on")
    command.add_argument("--port", help="the page: port to serve on")
    command.add_argument("--next", choices=["random", "uncertain"], help="the page: which question comes first")


def _store_parser(commands: Any) -> None:
    store = _command(commands, "store", "look into a preference store; import, export, backup, upgrade, forget", _store)
    actions = store.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, title, target in (
        ("show", "count what it holds, and how far people agree", None),
        ("import", "add comparisons and labels from a file", ("file", "FILE", ".jsonl, .json, .csv or .parquet")),
        ("export", "write labels or preferred pairs to a file", ("file", "FILE", "a new .jsonl, .csv or .parquet")),
        ("backup", "copy it whole, while others go on writing", ("file", "FILE", "a new file")),
        ("upgrade", "bring a store of an older Plaudit up to date (a copy is kept)", None),
        ("forget", "delete everything that a person said", ("annotator", "NAME", "the person")),
    ):
        action = actions.add_parser(name, help=title, description=title[0].upper() + title[1:] + ".")
        action.add_argument("--debug", action="store_true", help="show the traceback of an error")
        action.add_argument("store", metavar="STORE", help="a file, or postgresql://user@host/database")
        if target:
            word, shown, text = target
            action.add_argument(word, metavar=shown, help=text)
        if name == "import":
            action.add_argument("--annotator", default="people", help="who said what names nobody (default: people)")
            action.add_argument("--checks", action="store_true", help="they are attention checks: known answers")
        if name == "export":
            forms = ["labels", "explicit", "implicit", "conversational"]
            action.add_argument("--format", choices=forms, default="labels", help="labels: all that is known of each")


def _command(
    commands: Any, name: str, title: str, run: Callable[..., int | None], schema: type[Frozen] | None = None
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=title,
        description=title[0].upper() + title[1:] + ".",
        epilog=_keys(schema) if schema else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    command.set_defaults(run=run)
    return command


def _keys(schema: type[Frozen]) -> str:
    lines = ["keys:"]
    for name, kind, default, text in leaves(schema):
        lines += [f"  {name} = {json.dumps(default)}  ({kind})", f"      {text}"]
    return "\n".join(lines)


def _read(schema: type[C], words: Sequence[str]) -> C:
    """The configuration that a command line's words describe: at most one TOML file, and overrides.

    Raises:
        ConfigError: a word is neither, or there are two files.
    """
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"one configuration file at most, not {len(files)}: {', '.join(files)}")
    return read(schema, files[0] if files else None, [word for word in words if "=" in word])


def _stage(arguments: argparse.Namespace) -> None:
    schema, _ = STAGES[arguments.command]
    config = _resumed(schema, arguments) if arguments.resume else _read(schema, arguments.config)
    if arguments.dry_run:
        print(json.dumps(dump(config), indent=2))
        return
    arguments.opened = config.out
    from plaudit import recipes

    before = bool(arguments.resume)
    summary = getattr(recipes, arguments.command)(config, resume=before)
    if arguments.command != "quickstart":
        _say_summary(config.out, summary)


def _label(arguments: argparse.Namespace) -> None:
    """The page, unless a programme is to label (or a run of one goes on)."""
    if arguments.oracle and arguments.judge is not None:
        raise ConfigError("--oracle, --judge: one of the two labels; leave the other out")
    words = []
    for word in arguments.config:
        key = word.partition("=")[0]
        is_store = "://" in key or not (key != word or word.endswith(".toml"))
        words.append(f"store={json.dumps(word)}" if is_store else word)
    options = {"store": arguments.store, "host": arguments.host, "next": arguments.next}
    words += [f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None]
    words += [f"port={arguments.port}"] * (arguments.port is not None)
    if arguments.judge is not None:
        if not arguments.judge:
            raise ConfigError("--judge: names no model; write for example --judge smollm2")
        words.append(f"judge.model={json.dumps(arguments.judge)}")
    arguments.config = words
    if arguments.oracle and not arguments.resume and _read(configs.LabelConfig, words).judge.model:
        raise ConfigError("judge.model: has no effect with --oracle; use --judge MODEL instead")
    if arguments.oracle or arguments.judge is not None or arguments.resume:
        _stage(arguments)
        return
    if any(word.startswith("judge.") for word in words):
        raise ConfigError("judge: the labelling page knows no judge; name its model with --judge MODEL")
    config = _read(configs.PageConfig, words)
    if arguments.dry_run:
        print(json.dumps(dump(config), indent=2))
        return
    from plaudit.pages.labelling import serve_labels

    serve_labels(config)


def _store(arguments: argparse.Namespace) -> None:
    from plaudit.recipes import stores

    store = arguments.store
    match arguments.action:
        case "show":
            for name, value in stores.store_show(store).items():
                print(f"{name:28} {value}")
        case "import":
            added = stores.store_import(store, arguments.file, annotator=arguments.annotator, checks=arguments.checks)
            print(
                f"{store}: "
                + ", ".join(f"{value} {name}" for name, value in added.items() if value or name != "checks")
            )
        case "export":
            print(f"{arguments.file}: {stores.store_export(store, arguments.file, arguments.format)} rows")
        case "backup":
            stores.store_backup(store, arguments.file)
            print(f"{arguments.file}: a copy of {store}")
        case "upgrade":
            stores.store_upgrade(store)
            print(f"{store}: is of today's schema")
        case "forget":
            gone = stores.store_forget(store, arguments.annotator)
            print(f"{store}: {gone} labels of {arguments.annotator} deleted; what was exported or backed up remains")


def _resumed(schema: type[configs.RunConfig], arguments: argparse.Namespace) -> configs.RunConfig:
    """The configuration of the run to go on with, from its folder.

    Raises:
        ConfigError: overrides were given, which a run in progress does not take.
        RunError: the folder holds no run of this command.
    """
    folder = Path(arguments.resume)
    if arguments.config:
        raise ConfigError("--resume takes the run's own configuration; start a new run to change it")
    try:
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        command = stored.pop("command")
    except FileNotFoundError:
        raise RunError(f"{folder}: no run to resume (no config.json there)") from None
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise RunError(f"{folder}/config.json: cannot be read: {error}") from None
    if command != arguments.command:
        raise RunError(f"{folder}: was made by `plaudit {command}`; resume it with that command")
    return build(schema, stored | {"out": str(folder)}, f"{folder}/config.json")


def _say_summary(out: str, summary: dict[str, Any]) -> None:
    from plaudit.progress import say

    for name, value in summary.items():
        if not isinstance(value, dict | list):
            say(f"  {name:28} {value:.4g}" if isinstance(value, float) else f"  {name:28} {value}")
    say(f"run folder: {out}")


def _report(arguments: argparse.Namespace) -> None:
    from plaudit.report import write_report

    print(write_report(arguments.run_folder))


def _trace(arguments: argparse.Namespace) -> None:
    from plaudit.pages.tracing import trace

    a = arguments
    page = trace(a.run_folder, step=a.iteration, row=a.row, prompt=a.prompt, html=a.html, language=a.language)
    print(f"page: {page}")


def _compare(arguments: argparse.Namespace) -> None:
    config = _read(configs.CompareConfig, arguments.config)
    from plaudit.pages.labelling import serve_compare

    serve_compare(arguments.first, arguments.second, config)


def _watch(arguments: argparse.Namespace) -> None:
    from plaudit.pages.watching import serve_watch

    serve_watch(arguments.run_folders, arguments.host, arguments.port)


def _vectors(arguments: argparse.Namespace) -> int:
    from plaudit.vectors import check

    results = check(arguments.files)
    width = max((len(r.system) for r in results), default=0)
    for r in results:
        verdict = "ok" if r.passed else r.fault
        print(f"{r.system:{width}}  {r.cases:4d} cases  largest error {r.error:.1e}  {verdict}")
    if not results:
        print("no case in " + ", ".join(arguments.files))
    return 0 if results and all(r.passed for r in results) else 1


def _explain(arguments: argparse.Namespace) -> None:
    from plaudit.explain import explain

    print("\n".join(explain(_read(configs.PPOConfig, arguments.config))))


def _score(arguments: argparse.Namespace) -> None:
    config = _read(configs.ScoreConfig, arguments.config)
    from plaudit.recipes import score

    lines = [json.dumps(row, ensure_ascii=False, default=str) for row in score(arguments.model, arguments.file, config)]
    if not config.out:
        print("\n".join(lines))
        return
    try:
        Path(config.out).write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{config.out}: cannot be written ({error.strerror})") from None
    print(f"{len(lines)} scores: {config.out}")


def _chat(arguments: argparse.Namespace) -> None:
    config = _read(configs.ChatConfig, arguments.config)
    from plaudit.recipes import Chat

    chat = Chat(arguments.model, config)
    while True:
        try:
            line = input("you: " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            try:
                print(chat.answer(line))
            except DataError as error:
                print(f"plaudit: {error}", file=sys.stderr)

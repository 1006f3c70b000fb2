"""The command line: train, evaluate, generate, plan, timeline; and launch, which trains in several processes.

A command reads its words and its configuration, prepares the process (`launch`), and hands over to functions that know
nothing of it. The user's mistakes end in one line on stderr and exit status 2; anything else that goes wrong is ours,
and leaves with a traceback and status 1.

Longer than most files: the commands share how they find a run, its words and its devices.
"""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from mp_lstm import launch
from mp_lstm.errors import InputError
from mp_lstm.training.config import Config, load
from mp_lstm.training.files import check_replaceable, is_one_of, is_utf8, replace_lines, writing
from mp_lstm.training.overrides import flag_types, overrides_help, split_overrides, suggest_flag
from mp_lstm.training.run_directory import (
    CONFIG,
    check_same_run,
    check_writable,
    claimed_directory,
    fresh_directory,
    own_files,
    saved_config,
    saved_vocabulary,
    text_files,
)

if TYPE_CHECKING:
    from mp_lstm.data import Split, Vocabulary
    from mp_lstm.planning import Plan
    from mp_lstm.planning.costs import CostModel
    from mp_lstm.runtime import Pipeline, State
    from mp_lstm.training.evaluate import SplitResult
    from mp_lstm.training.fit import FitResult
    from mp_lstm.training.setup import Setup

OTHER_SCORES = "pass another file as --per-token"  # what helps where scores cannot be written


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: its words; None: those that the process was started with.

    Returns:
      The exit status: 0 done, 2 bad input or configuration, 1 interrupted, or nobody reads what is printed. Other
      errors are raised.

    Example:
      >>> main(["plan", "--model.layers", "0"])
      2
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a word that the terminal cannot show ends no command
    try:
        try:
            return _run(sys.argv[1:] if argv is None else list(argv))
        finally:
            print(end="", flush=True)  # here, where it is handled that it cannot be
    except BrokenPipeError:
        _drop_output()
        return 1
    except InputError as error:
        return _refused(str(error))
    except KeyboardInterrupt:
        print("mp-lstm: interrupted", file=sys.stderr)
        return launch.leave(1)
    except OSError as error:
        if isinstance(error.filename, str):  # the system refuses a path: its rights, its name, its disk
            return _refused(f"{error.filename} cannot be used ({error.strerror}): mend that, or pass another path")
        if _output_fails():
            _drop_output()
            return _refused(f"standard output cannot be written ({error.strerror or error}): send it elsewhere")
        launch.fail(error)
    except Exception as error:  # of any kind: peers would wait; raised again where there are none
        launch.fail(error)


def _refused(message: str) -> int:
    """Ends with one line."""
    print(f"mp-lstm: error: {' '.join(message.split())}", file=sys.stderr)
    return launch.leave(2)


def _output_fails() -> bool:
    """Whether it was standard output that failed: what it could not take it still holds."""
    try:
        print(end="", flush=True)
    except OSError:
        return True
    return False


def _drop_output() -> None:
    """Takes what Python flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: list[str]) -> int:
    fields = flag_types(Config)
    words, inner = _split_launched(words)
    words, overrides = split_overrides(words, fields)
    parser = _parser()
    args, unknown = parser.parse_known_args(words)
    if args.version:
        print(f"mp-lstm {metadata.version('mp-lstm')}")
        return 0
    if args.command is None:
        if strangers := [*unknown, *overrides]:
            raise InputError(
                f"{strangers[0]} is no option of mp-lstm itself: write a command first, see mp-lstm --help"
            )
        parser.print_help()
        return 0
    if overrides and not args.configured:
        raise InputError(f"{args.command} takes no {overrides[0]}: it uses the configuration of the run")
    if unknown:
        flags = [*args.flags, *(fields if args.configured else ())]
        remedy = suggest_flag(unknown[0], flags)
        if args.stray and not unknown[0].startswith("-"):
            remedy = f"did you mean {args.stray} {shlex.quote(unknown[0])}?"
        raise InputError(f"{unknown[0]} is unknown to {args.command}: {remedy}")
    if strangers := [word for word in overrides if not is_utf8(word)]:
        raise InputError(
            f"{strangers[0]!r} is not UTF-8, which config.toml is kept in: rename it, or make a link to it"
        )
    args.overrides, args.inner = overrides, inner
    return args.run(args)


def _split_launched(words: list[str]) -> tuple[list[str], list[str]]:
    """The words of `launch` itself, and those of the command that it runs."""
    if words[:1] != ["launch"]:
        return words, []
    if "--" not in words:
        if "train" in words:
            raise InputError("launch has no -- before train: write mp-lstm launch --processes N -- train ...")
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


class _Parser(argparse.ArgumentParser):
    """Mistakes are `InputError`s, so that they end like all others; help lists the configuration where it is taken."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}: see {self.prog} --help")

    def format_help(self) -> str:
        text = super().format_help()
        return f"{text}\noverrides:\n{overrides_help(Config())}\n" if self.get_default("configured") else text


def _parser() -> _Parser:
    text = "Trains LSTM language models whose layers live on different devices."
    parser = _Parser(prog="mp-lstm", description=text, allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print the version and end")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str, *, configured: bool) -> _Parser:
        usage = "%(prog)s [CONFIG.toml] [options] [--section.field VALUE ...]" if configured else None
        command = commands.add_parser(name, help=text, description=text, usage=usage, allow_abbrev=False)
        if configured:
            command.add_argument(
                "config", nargs="?", metavar="CONFIG.toml", help="configuration; without one, the demo's defaults"
            )
        else:
            command.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="directory of a trained run")
        command.set_defaults(run=run, configured=configured, stray=None)
        return command

    train = add("train", _train, "Train a model; by default on the corpus in the package.", configured=True)
    train.add_argument("--run-dir", type=Path, metavar="DIR", help="where the run is kept; default: runs/NAME-N, new")
    train.add_argument("--resume", action="store_true", help="go on with the run in DIR")
    several = train.add_argument_group("one of several processes (mp-lstm launch starts them on this machine)")
    several.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 can be reached")
    several.add_argument("--processes", metavar="N", help="auto: as SLURM, Open MPI or Kubernetes says")
    several.add_argument("--process", type=int, metavar="I", help="the number of this one, from 0")
    text = "Train in several processes on this machine; one that fails ends all."
    usage = "%(prog)s --processes N [--devices-per-process K] -- train [CONFIG.toml] [options]"
    launched = commands.add_parser("launch", help=text, description=text, usage=usage, allow_abbrev=False)
    launched.add_argument("--processes", type=int, required=True, metavar="N", help="their number")
    launched.add_argument(
        "--devices-per-process", type=int, metavar="K", help="emulated CPU devices of each; default: as configured"
    )
    launched.set_defaults(run=_launch, configured=False, stray=None)
    evaluate = add("evaluate", _evaluate, "Evaluate the best parameters of a run.", configured=False)
    read = evaluate.add_mutually_exclusive_group()
    # It has no default here: argparse takes a value that is the default for one that was not given.
    read.add_argument("--split", choices=("train", "valid", "test"), help="default: test")
    read.add_argument("--text", metavar="FILE", help="a text instead, a sentence a line; -: standard input")
    evaluate.add_argument(
        "--per-token",
        type=_output,
        metavar="FILE",
        help="write each token, as the model knows it, and its negative log-likelihood there; -: standard output",
    )
    evaluate.set_defaults(stray="--text")
    generate = add("generate", _generate, "Let the best parameters of a run write.", configured=False)
    begin = generate.add_mutually_exclusive_group()
    begin.add_argument("--prompt", default="", help="text to continue; default: none")
    text = "texts to continue, one a line, all in one batch; -: standard input"
    begin.add_argument("--prompts", type=_input, metavar="FILE", help=text)
    generate.set_defaults(stray="--prompt")
    generate.add_argument("--tokens", type=int, default=50, metavar="N", help="words to write; default: 50")
    generate.add_argument(
        "--temperature", type=float, default=1.0, metavar="X", help="default: 1; 0: the likeliest word"
    )
    generate.add_argument("--top-k", type=int, metavar="N", help="draw from the N likeliest words; default: from all")
    generate.add_argument(
        "--top-p", type=float, metavar="X", help="draw from the likeliest words of this share; default: from all"
    )
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same text; default: 0")
    generate.add_argument("--stop-at-eos", action="store_true", help="end a text with its first sentence")
    plan = add(
        "plan", _plan, "Print placement, buckets, timetable and predicted times; train nothing.", configured=True
    )
    plan.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the predicted step of the commonest bucket")
    timeline = add(
        "timeline", _timeline, "Run steps of every bucket; print measured beside predicted.", configured=True
    )
    timeline.add_argument("--steps", type=int, default=5, metavar="N", help="steps to measure of each; default: 5")
    timeline.add_argument(
        "--out", type=Path, metavar="DIR", help="keep the commonest bucket's step there: timeline.png and trace.json"
    )
    for command in commands.choices.values():
        flags = [flag for action in command._actions for flag in action.option_strings if flag.startswith("--")]
        command.set_defaults(flags=flags)
    return parser


def _output(name: str) -> Path:
    """The path of a file to write, or of standard output."""
    return Path("/dev/stdout" if name == "-" else name)


def _input(name: str) -> Path:
    """The path of a file to read, or of standard input."""
    return Path("/dev/stdin" if name == "-" else name)


def _train(args: argparse.Namespace) -> int:
    if args.resume:
        return _resume(args)
    config, member = load(args.config, args.overrides), _member(args)
    name = "austen" if args.config is None else Path(args.config).stem

    def found() -> str:
        run_dir = fresh_directory(args.run_dir, name)
        check_writable(run_dir)
        return str(run_dir)

    run_dir = Path(found()) if member is None else None  # what is wrong with it shows before JAX starts
    launch.prepare(config.train.emulate_devices, member, config.train.step_timeout)

    from mp_lstm.runtime.processes import by_the_first
    from mp_lstm.training.fit import fit

    run_dir = run_dir or Path(by_the_first(found))
    setup = _setup(config)
    if args.run_dir is None:
        run_dir = Path(by_the_first(lambda: str(claimed_directory(name))))
    print(f"run directory: {run_dir}")
    return _status(fit(setup, run_dir))


def _member(args: argparse.Namespace) -> launch.Member | None:
    """Which process of several this one is."""
    return launch.member(args.coordinator, args.processes, args.process)


def _launch(args: argparse.Namespace) -> int:
    """Runs a training as several processes of this machine."""
    from mp_lstm.launcher import launch as launch_processes

    inner, each = args.inner, args.devices_per_process
    if not inner or inner[0] != "train":
        what = f"not {inner[0]!r}" if inner else "and was given no command"
        raise InputError(f"launch runs train, {what}: write -- train ... after its options; other commands need none")
    if each is not None and each < 1:
        raise InputError(f"--devices-per-process is {each}, wanted at least 1: leave it out for as many as configured")
    if each is not None:
        inner = [*inner, "--train.emulate_devices", str(each * args.processes)]
    return launch_processes([sys.executable, "-m", "mp_lstm", *inner], args.processes)


def _resume(args: argparse.Namespace) -> int:
    run_dir = args.run_dir
    if run_dir is None:
        raise InputError("--resume needs the run to go on with: pass --run-dir DIR")
    saved, vocabulary = saved_config(run_dir), saved_vocabulary(run_dir)
    config = load(run_dir / CONFIG if args.config is None else args.config, args.overrides)
    if config.data.buckets == "auto":
        config = replace(config, data=replace(config.data, buckets=saved.data.buckets))
    check_same_run(saved, config, run_dir)
    launch.prepare(config.train.emulate_devices, _member(args), config.train.step_timeout)

    from mp_lstm.training.fit import fit

    return _status(fit(_setup(config, vocabulary), run_dir, resume=True))


def _status(result: FitResult) -> int:
    return 0 if result.signal is None else 1


def _evaluate(args: argparse.Namespace) -> int:
    config, vocabulary = saved_config(args.run_dir), saved_vocabulary(args.run_dir)
    if args.per_token is not None:
        _check_scores_file(args, config)
    launch.prepare(config.train.emulate_devices)
    if args.text is not None:
        return _evaluate_text(args, config, vocabulary)

    from mp_lstm.training.checkpoint import restore_best
    from mp_lstm.training.fit import evaluate
    from mp_lstm.training.loop import epoch_of
    from mp_lstm.training.metrics import FILE, MetricsWriter

    split = args.split or "test"
    setup = _setup(config, vocabulary)
    restored = restore_best(setup.pipe, args.run_dir)
    if args.per_token is None:
        result = evaluate(setup, restored.state, split)
    else:
        result = _scored(setup.pipe, restored.state, getattr(setup.sources, split), vocabulary, args.per_token)
    print(f"{split}: {_result_line(result)}", file=_beside(args.per_token))
    if split == "test":
        epoch = epoch_of(restored.notes.position)
        try:
            with MetricsWriter(args.run_dir / FILE) as writer:
                writer.write("test", step=restored.state.step, epoch=epoch, **result._asdict())
        except InputError as error:  # such as a run that one may only read
            print(f"mp-lstm: the test is not noted: {error}", file=sys.stderr)
    return 0


def _evaluate_text(args: argparse.Namespace, config: Config, vocabulary: Vocabulary) -> int:
    """Evaluates a text of the user's; the run's own is not needed."""
    from mp_lstm.training.checkpoint import restore_best
    from mp_lstm.training.score import text_source

    text = _read_text(args.text, vocabulary)
    source = text_source(config, text)
    pipe = _pipe(config, vocabulary)
    result = _scored(pipe, restore_best(pipe, args.run_dir).state, source, vocabulary, args.per_token)
    unknown = int((text.tokens == vocabulary.unk).sum())
    name = "standard input" if args.text == "-" else args.text
    out = _beside(args.per_token)
    print(f"{name}: {_result_line(result)}, of which {unknown:,} are <unk>", file=out)
    if any(source.dropped):
        print(source.dropped, file=out)
    return 0


def _read_text(name: str, vocabulary: Vocabulary) -> Split:
    """A text of the user's, a file or standard input."""
    from mp_lstm.data import read_text

    if name != "-":
        return read_text(name, vocabulary)
    try:
        if sys.stdin is None:  # Python does not say that it may be
            raise OSError("it is closed")
        return read_text(sys.stdin, vocabulary)
    except OSError as error:
        raise InputError(
            f"standard input cannot be read ({error.strerror or error}): pass a text on it, or a file"
        ) from error


def _scored(pipe: Pipeline, state: State, source: Any, vocabulary: Vocabulary, path: Path | None) -> SplitResult:
    """Evaluates a source token by token; writes the tokens where there is a file for them."""
    from mp_lstm.training.score import score, score_lines

    scores = score(pipe, state, source)
    if path is not None:
        with writing(path, OTHER_SCORES):
            replace_lines(path, score_lines(scores, vocabulary))
    return scores.result


def _check_scores_file(args: argparse.Namespace, config: Config) -> None:
    """Refuses a file for scores that cannot be written, or that is read or another file of the run, before the work."""
    path = args.per_token
    kept = {
        "the text itself": [] if args.text is None else [0 if args.text == "-" else args.text],
        "a text of the run": text_files(config),
        "a file of the run": own_files(args.run_dir),
    }
    for what, files in kept.items():
        if is_one_of(path, files):
            raise InputError(f"--per-token {path} is {what}, it would be lost: pass another file")
    with writing(path, OTHER_SCORES):
        check_replaceable(path)


def _beside(scores: Path | None) -> TextIO:
    """Where the result goes: not among scores on standard output, which another program may read."""
    return sys.stderr if scores == _output("-") else sys.stdout


def _result_line(result: SplitResult) -> str:
    return f"loss {result.loss:.4f}  perplexity {result.perplexity:.2f}  tokens {result.tokens:,}"


def _generate(args: argparse.Namespace) -> int:
    config, vocabulary = saved_config(args.run_dir), saved_vocabulary(args.run_dir)
    launch.prepare(config.train.emulate_devices)

    from mp_lstm.training.checkpoint import restore_best
    from mp_lstm.training.generate import generate, read_prompts

    prompts = args.prompt if args.prompts is None else read_prompts(args.prompts)
    pipe = _pipe(config, vocabulary)
    texts = generate(
        pipe,
        restore_best(pipe, args.run_dir).state,
        vocabulary,
        prompts,
        tokens=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop_at_eos=args.stop_at_eos,
        carry=config.data.mode == "contiguous",
    )
    print("\n\n".join(texts))
    return 0


def _pipe(config: Config, vocabulary: Vocabulary) -> Pipeline:
    """The pipeline of a run to predict with: its partition, but neither its text nor how it cut batches."""
    import jax

    from mp_lstm.training.build import make_model
    from mp_lstm.training.optimizers import make_schedule
    from mp_lstm.training.planned import plan_for
    from mp_lstm.training.setup import make_pipe

    pipeline = replace(config.pipeline, schedule="auto", chunk="auto", microbatches="auto")
    config = replace(config, pipeline=pipeline)
    model = make_model(config, len(vocabulary))
    plan = plan_for(config, model, [1], jax.devices())
    return make_pipe(config, model, plan, make_schedule(config, updates=1))


def _plan(args: argparse.Namespace) -> int:
    config = load(args.config, args.overrides)
    launch.prepare(config.train.emulate_devices)

    import jax

    from mp_lstm.planning import predict
    from mp_lstm.training.build import bill_of, read_corpus
    from mp_lstm.training.optimizers import make_optimizer, make_schedule
    from mp_lstm.training.planned import make_planned, prediction_lines
    from mp_lstm.training.setup import updates_per_epoch
    from mp_lstm.training.timeline import device_names
    from mp_lstm.training.timeline_plot import timeline_picture

    corpus = read_corpus(config)
    planned = make_planned(config, corpus, jax.devices(), cache=_cost_cache())
    # What train would refuse of the update is refused here too.
    make_optimizer(config, make_schedule(config, updates_per_epoch(config, planned.sources.train)))
    plan, costs, counts = planned.plan, planned.costs, planned.sources.train.counts()
    commonest = max(counts, key=counts.__getitem__)
    if args.plot is not None:
        timeline_picture(
            args.plot,
            None,
            predict(plan, planned.model, costs, commonest),
            plan.schedule((commonest,)),
            device_names(plan),
            _step_title(args, plan, commonest, costs),
        )
    print(plan)
    print(f"\nbucket {commonest}, the commonest:\n{plan.schedule((commonest,))}")
    if (bill := bill_of(config, corpus, planned.sources)) is not None:
        print(f"\n{bill}")
    print(f"\n{prediction_lines(planned, counts)}")
    if plan.choices:
        print(f"\n{plan.explain()}")
    return 0


def _timeline(args: argparse.Namespace) -> int:
    if args.steps < 1:
        raise InputError(f"--steps is {args.steps}, wanted at least 1")
    config = load(args.config, args.overrides)
    if args.out is not None:
        _make_directory(args.out)
    launch.prepare(config.train.emulate_devices)

    from mp_lstm.training import timeline

    setup = _setup(config)
    plan, costs = setup.plan, setup.costs
    names, batches = timeline.device_names(plan), timeline.batches_by_length(setup.sources.train)
    counts = [len(those) for those in batches.values()]
    print(f"{plan}\n\n{args.steps} steps of each bucket beside their prediction (costs: {costs.label}):")
    print(timeline.HEADER, flush=True)
    comparisons = []
    for comparison in timeline.compare(setup, [those[0] for those in batches.values()], costs, steps=args.steps):
        comparisons.append(comparison)
        print(timeline.comparison_line(comparison, names), flush=True)
    print(timeline.mean_line(comparisons, counts))
    if args.out is not None:
        commonest = comparisons[counts.index(max(counts))]
        title = _step_title(args, plan, commonest.length, costs)
        for path in timeline.write(args.out, commonest, names, title):
            print(path)
    return 0


def _step_title(args: argparse.Namespace, plan: Plan, length: int, costs: CostModel) -> str:
    """Which step a picture shows, and what its prediction rests on."""
    name = "the demo" if args.config is None else Path(args.config).stem
    return f"{name}: a step of {plan.batch_size} rows, bucket {length} (costs: {costs.label})"


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be made ({error.strerror}): pass another directory as --out") from error


def _setup(config: Config, vocabulary: Vocabulary | None = None) -> Setup:
    """Everything a run needs, on the devices there are; of the words of a run where they are given."""
    from mp_lstm.runtime.edges import stage_devices
    from mp_lstm.runtime.processes import are_several, check_alike
    from mp_lstm.training.outline import read_together, with_text
    from mp_lstm.training.setup import make_setup

    text = read_together(config)
    corpus = text.corpus
    if vocabulary is not None and corpus.vocabulary != vocabulary:
        raise InputError(
            f"{config.data.source} has another vocabulary ({len(corpus.vocabulary)} words) than the run had "
            f"({len(vocabulary)}): use the text that it was trained on"
        )
    devices = stage_devices()
    if are_several():
        if config.pipeline.costs == "measured":
            raise InputError(
                "[pipeline] costs is 'measured', which several processes would measure differently: pass 'nominal', or "
                "the partition that `mp-lstm plan` finds"
            )
        if devices[0].platform == "cpu":  # for commands that use the run in one process
            config = replace(config, train=replace(config.train, emulate_devices=len(devices)))
    setup = make_setup(config, corpus, devices, cache=_cost_cache())
    check_alike("configuration or version", f"{setup.config}\n{setup.plan}\n{metadata.version('mp-lstm')}")
    return with_text(setup, text)


def _cost_cache() -> Path:
    """Where measured costs are kept."""
    return launch.cache_folder() / "costs"


if __name__ == "__main__":
    sys.exit(main())

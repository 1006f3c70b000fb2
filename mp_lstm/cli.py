"""The command line: train, evaluate, generate, plan, timeline.

A command reads its words and its configuration, prepares the process (`launch`), and hands over to functions that know
nothing of it. The user's mistakes end in one line on stderr and exit status 2; anything else that goes wrong is ours,
and leaves with a traceback and status 1.

Longer than most files: the commands share how they find a run, its words and its devices.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mp_lstm import launch
from mp_lstm.errors import InputError
from mp_lstm.training.config import Config, load, load_saved, save
from mp_lstm.training.files import writing
from mp_lstm.training.overrides import flag_types, overrides_help, split_overrides, suggest_flag

if TYPE_CHECKING:
    from mp_lstm.data import Vocabulary
    from mp_lstm.planning import Plan
    from mp_lstm.planning.costs import CostModel
    from mp_lstm.training.build import Planned, Setup
    from mp_lstm.training.checkpoint import Restored
    from mp_lstm.training.fit import FitResult

CONFIG, VOCABULARY = "config.toml", "vocabulary.txt"
RUN_FILES = {"metrics.jsonl", "checkpoints"}  # what else shows that a directory is a run's


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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return 1
    except InputError as error:
        print(f"mp-lstm: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mp-lstm: interrupted", file=sys.stderr)
        return 1


def _run(words: list[str]) -> int:
    fields = flag_types(Config)
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
        raise InputError(f"{unknown[0]} is unknown to {args.command}: {suggest_flag(unknown[0], flags)}")
    args.overrides = overrides
    return args.run(args)


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
        command.set_defaults(run=run, configured=configured)
        return command

    train = add("train", _train, "Train a model; by default on the corpus in the package.", configured=True)
    train.add_argument("--run-dir", type=Path, metavar="DIR", help="where the run is kept; default: runs/NAME-N, new")
    train.add_argument("--resume", action="store_true", help="go on with the run in DIR")
    evaluate = add("evaluate", _evaluate, "Evaluate the best parameters of a run.", configured=False)
    evaluate.add_argument("--split", choices=("train", "valid", "test"), default="test", help="default: test")
    generate = add("generate", _generate, "Let the best parameters of a run write.", configured=False)
    generate.add_argument("--prompt", default="", help="text to continue; default: none")
    generate.add_argument("--tokens", type=int, default=50, metavar="N", help="words to write; default: 50")
    generate.add_argument(
        "--temperature", type=float, default=1.0, metavar="X", help="default: 1; 0: the likeliest word"
    )
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same text; default: 0")
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


def _train(args: argparse.Namespace) -> int:
    if args.resume:
        return _resume(args)
    config = load(args.config, args.overrides)
    run_dir = _fresh(args.run_dir, "austen" if args.config is None else Path(args.config).stem)
    _check_writable(run_dir)
    launch.prepare(config.train.emulate_devices)

    from mp_lstm.training.build import resolved
    from mp_lstm.training.fit import fit

    setup = _setup(config)
    with writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        save(resolved(setup), run_dir / CONFIG)
        setup.corpus.vocabulary.save(run_dir / VOCABULARY)
    print(f"run directory: {run_dir}")
    return _status(fit(setup, run_dir))


def _resume(args: argparse.Namespace) -> int:
    run_dir = args.run_dir
    if run_dir is None:
        raise InputError("--resume needs the run to go on with: pass --run-dir DIR")
    saved, vocabulary = _saved_config(run_dir), _saved_vocabulary(run_dir)
    config = load(run_dir / CONFIG if args.config is None else args.config, args.overrides)
    if config.data.buckets == "auto":
        config = replace(config, data=replace(config.data, buckets=saved.data.buckets))
    _check_same_run(saved, config, run_dir)
    launch.prepare(config.train.emulate_devices)

    from mp_lstm.training.fit import fit

    result = fit(_setup(config, vocabulary), run_dir, resume=True)
    save(config, run_dir / CONFIG)  # what changed is the run's only now that it has worked
    return _status(result)


def _status(result: FitResult) -> int:
    return 0 if result.signal is None else 1


def _evaluate(args: argparse.Namespace) -> int:
    config, vocabulary = _saved_config(args.run_dir), _saved_vocabulary(args.run_dir)
    launch.prepare(config.train.emulate_devices)

    from mp_lstm.training.fit import evaluate
    from mp_lstm.training.loop import epoch_of
    from mp_lstm.training.metrics import FILE, MetricsWriter

    setup = _setup(config, vocabulary)
    restored = _best(setup.pipe, args.run_dir)
    result = evaluate(setup, restored.state, args.split)
    print(f"{args.split}: loss {result.loss:.4f}  perplexity {result.perplexity:.2f}  tokens {result.tokens:,}")
    if args.split == "test":
        epoch = epoch_of(restored.notes.position)
        try:
            with MetricsWriter(args.run_dir / FILE) as writer:
                writer.write("test", step=restored.state.step, epoch=epoch, **result._asdict())
        except InputError as error:  # such as a run that one may only read
            print(f"mp-lstm: the test is not noted: {error}", file=sys.stderr)
    return 0


def _generate(args: argparse.Namespace) -> int:
    config, vocabulary = _saved_config(args.run_dir), _saved_vocabulary(args.run_dir)
    launch.prepare(config.train.emulate_devices)

    import jax

    from mp_lstm.training.build import make_model, make_pipe, make_schedule, plan_for
    from mp_lstm.training.generate import generate

    # One word at a time needs the partition of the run, but neither its text nor how it cut batches.
    pipeline = replace(config.pipeline, schedule="auto", chunk="auto", microbatches="auto")
    config = replace(config, pipeline=pipeline)
    model = make_model(config, len(vocabulary))
    plan = plan_for(config, model, [1], jax.devices())
    pipe = make_pipe(config, model, plan, make_schedule(config, updates=1))
    text = generate(
        pipe,
        _best(pipe, args.run_dir).state,
        vocabulary,
        args.prompt,
        tokens=args.tokens,
        temperature=args.temperature,
        seed=args.seed,
        carry=config.data.mode == "contiguous",
    )
    print(text)
    return 0


def _plan(args: argparse.Namespace) -> int:
    config = load(args.config, args.overrides)
    launch.prepare(config.train.emulate_devices)

    import jax

    from mp_lstm.planning import predict
    from mp_lstm.training.build import bill_of, make_planned, read_corpus
    from mp_lstm.training.timeline import device_names
    from mp_lstm.training.timeline_plot import timeline_picture

    corpus = read_corpus(config)
    planned = make_planned(config, corpus, jax.devices(), cache=_cost_cache())
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
    print(f"\n{_predicted(planned, counts)}")
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
    """Everything a run needs, on the devices of this process; of the words of a run where they are given."""
    import jax

    from mp_lstm.training.build import make_setup, read_corpus

    corpus = read_corpus(config)
    if vocabulary is not None and corpus.vocabulary != vocabulary:
        raise InputError(
            f"{config.data.source} has another vocabulary ({len(corpus.vocabulary)} words) than the run had "
            f"({len(vocabulary)}): use the text that it was trained on"
        )
    return make_setup(config, corpus, jax.devices(), cache=_cost_cache())


def _cost_cache() -> Path:
    """Where measured costs are kept."""
    return launch.cache_folder() / "costs"


def _fresh(run_dir: Path | None, name: str) -> Path:
    """The directory of a new run: the one that was asked for, if it is free, else the next one of this name."""
    if run_dir is None:
        number = 1
        while (path := Path("runs", f"{name}-{number}")).exists():
            number += 1
        return path
    if run_dir.is_file():
        raise InputError(f"{run_dir} is a file: pass a directory as --run-dir")
    with writing(run_dir):
        held = {path.name for path in run_dir.iterdir()} if run_dir.exists() else set()
    if CONFIG in held:
        raise InputError(f"{run_dir} holds another run: pass --resume to go on with it, or another --run-dir")
    if held:
        what = f"a run that has lost its {CONFIG}" if held & RUN_FILES else "other files"
        raise InputError(f"{run_dir} holds {what}: pass another --run-dir")
    return run_dir


def _check_writable(run_dir: Path) -> None:
    """Makes the directory of a run and a file in it, and takes them away: what is wrong shows before the work."""
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    try:
        with writing(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=run_dir) as file:
                file.write(b"room")
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # not made after all, or somebody else's too by now
                path.rmdir()


def _saved_config(run_dir: Path) -> Config:
    if (run_dir / CONFIG).is_file():
        return load_saved(run_dir / CONFIG)
    if any((run_dir / name).exists() for name in RUN_FILES):
        raise InputError(f"{run_dir} holds a run that has lost its {CONFIG}: put the file back, or train anew")
    raise InputError(f"{run_dir} is no run directory, it has no {CONFIG}: train first, or pass another directory")


def _saved_vocabulary(run_dir: Path) -> Vocabulary:
    from mp_lstm.data import Vocabulary

    return Vocabulary.load(run_dir / VOCABULARY)


def _check_same_run(saved: Config, config: Config, run_dir: Path) -> None:
    """A resumed run may go on elsewhere, longer or at other rates, but not as another model or on other batches.

    The text may have moved: that it has the same words is checked when it has been read.
    """
    fixed = {
        "a checkpoint of another model": [f"model.{name}" for name in vars(saved.model)],
        "a run on other batches": [*(f"data.{name}" for name in vars(saved.data) if name != "source"), "train.seed"],
    }
    for what, names in fixed.items():
        for name in names:
            before, now = (attrgetter(name)(one) for one in (saved, config))
            if now != before:
                raise InputError(
                    f"{run_dir} holds {what}: its {name} is {before!r}, now it is {now!r}: leave it as it was, or "
                    "start a new run"
                )


def _best(pipe: Any, run_dir: Path) -> Restored:
    """The best parameters of a run."""
    from mp_lstm.training import checkpoint

    return checkpoint.restore(pipe, run_dir, checkpoint.best(run_dir))


def _predicted(planned: Planned, counts: dict[int, int]) -> str:
    """Predicted time of a step, busy share and memory of each device, for each bucket and over all batches."""
    from mp_lstm.planning import predict, predicted_memory

    _, model, plan, costs = planned
    lines = [f"{costs.label}:"]
    seconds, busy = 0.0, [0.0] * len(set(plan.device_indices))
    for length, count in sorted(counts.items()):
        timeline = predict(plan, model, costs, length)
        shares = [timeline.busy[device] / timeline.makespan for device in sorted(timeline.busy)]
        lines.append(f"  bucket {length:>4}: {_step_line(plan, timeline.makespan, shares)}")
        seconds += count * timeline.makespan
        busy = [total + count * timeline.busy[device] for device, total in enumerate(busy)]
    mean = _step_line(plan, seconds / sum(counts.values()), [part / seconds for part in busy])
    devices = dict(zip(plan.device_indices, plan.devices, strict=True))
    peaks = predicted_memory(plan, model, costs)
    memory = ", ".join(f"{devices[index]} {peak / 1e6:,.1f} MB" for index, peak in peaks.items())
    return "\n".join([*lines, f"  all batches: {mean}", f"  most memory: {memory}"])


def _step_line(plan: Plan, seconds: float, busy: Sequence[float]) -> str:
    """A step in words: its time, and the share of it that each device is busy."""
    devices = dict(zip(plan.device_indices, plan.devices, strict=True))
    shares = ", ".join(f"{devices[index]} busy {share:.0%}" for index, share in enumerate(busy))
    return f"{seconds * 1e3:,.1f} ms a step, {shares}"


if __name__ == "__main__":
    sys.exit(main())

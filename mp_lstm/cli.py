"""The command line: train, evaluate, generate, plan, timeline.

A command reads its words and its configuration, prepares the process (`launch`), and hands over to functions that know
nothing of it. The user's mistakes end in one line on stderr and exit status 2; anything else that goes wrong is ours,
and leaves with a traceback and status 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mp_lstm import launch
from mp_lstm.errors import InputError
from mp_lstm.training.config import Config, load, save
from mp_lstm.training.overrides import flag_types, overrides_help, split_overrides, suggest_flag

if TYPE_CHECKING:
    from mp_lstm.data import BatchSource, Vocabulary
    from mp_lstm.planning import Plan
    from mp_lstm.training.build import Setup
    from mp_lstm.training.checkpoint import Restored
    from mp_lstm.training.fit import FitResult

CONFIG, VOCABULARY = "config.toml", "vocabulary.txt"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: its words; None: those that the process was started with.

    Returns:
      The exit status: 0 done, 2 bad input or configuration, 1 interrupted. Other errors are raised.

    Example:
      >>> main(["plan", "--model.layers", "0"])
      2
    """
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
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
    if args.command is None:
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
    parser = _Parser(prog="mp-lstm", description="Trains LSTM language models whose layers live on different devices.")
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
    add("plan", _plan, "Print placement, buckets, timetable and predicted times; train nothing.", configured=True)
    timeline = add("timeline", _timeline, "Run a few steps; print measured beside predicted times.", configured=True)
    timeline.add_argument("--steps", type=int, default=10, metavar="N", help="steps to measure; default: 10")
    for command in commands.choices.values():
        flags = [flag for action in command._actions for flag in action.option_strings if flag.startswith("--")]
        command.set_defaults(flags=flags)
    return parser


def _train(args: argparse.Namespace) -> int:
    if args.resume:
        return _resume(args)
    config = load(args.config, args.overrides)
    run_dir = _fresh(args.run_dir, "austen" if args.config is None else Path(args.config).stem)
    launch.prepare(config.train.emulate_devices)

    from mp_lstm.training.build import resolved
    from mp_lstm.training.fit import fit

    setup = _setup(config)
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
        with MetricsWriter(args.run_dir / FILE) as writer:
            epoch = epoch_of(restored.notes.position)
            writer.write("test", step=restored.state.step, epoch=epoch, **result._asdict())
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

    from mp_lstm.training.build import bill_of

    setup = _setup(config)
    plan, counts = setup.plan, _batches_by_length(setup.sources.train)
    commonest = max(counts, key=counts.__getitem__)
    print(plan)
    print(f"\nbucket {commonest}, the commonest:\n{plan.schedule((commonest,))}")
    if (bill := bill_of(setup)) is not None:
        print(f"\n{bill}")
    print(f"\n{_predicted(setup, counts)}")
    return 0


def _timeline(args: argparse.Namespace) -> int:
    if args.steps < 1:
        raise InputError(f"--steps is {args.steps}, wanted at least 1")
    config = load(args.config, args.overrides)
    launch.prepare(config.train.emulate_devices)

    import jax

    from mp_lstm.data import iterate
    from mp_lstm.runtime.measure import measure_steps

    setup = _setup(config)
    batches = (batch for _, batch in iterate(setup.sources.train))
    windows = [window for _, window in zip(range(args.steps), setup.pipe.prefetch(batches), strict=False)]
    setup.pipe.warm_up(windows)
    state = setup.pipe.init(jax.random.key(config.train.seed))
    for window in windows:  # once unmeasured: what is loaded or allocated at first use is no part of a step
        state, _ = setup.pipe.step(state, window)
    _, measured = measure_steps(setup.pipe, state, windows)
    counts: dict[int, int] = {}
    for window in windows:
        for length in window.lengths:
            counts[length] = counts.get(length, 0) + 1
    busy = [measured.busy[device] for device in sorted(measured.busy)]
    print(setup.plan)
    print(f"\nmeasured over {len(windows)} steps: {_step_line(setup.plan, measured.seconds, busy)}")
    print(_predicted(setup, counts))
    return 0


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
    return make_setup(config, corpus, jax.devices())


def _fresh(run_dir: Path | None, name: str) -> Path:
    """The directory of a new run: the one that was asked for, if it is free, else the next one of this name."""
    if run_dir is None:
        number = 1
        while (path := Path("runs", f"{name}-{number}")).exists():
            number += 1
        return path
    if run_dir.is_file():
        raise InputError(f"{run_dir} is a file: pass a directory as --run-dir")
    if run_dir.exists() and any(run_dir.iterdir()):
        what = "another run" if (run_dir / CONFIG).exists() else "other files"
        raise InputError(f"{run_dir} holds {what}: pass --resume to go on with it, or another --run-dir")
    return run_dir


def _saved_config(run_dir: Path) -> Config:
    if not (run_dir / CONFIG).is_file():
        raise InputError(f"{run_dir} is no run directory, it has no {CONFIG}: train first, or pass another directory")
    return load(run_dir / CONFIG)


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


def _batches_by_length(source: BatchSource) -> dict[int, int]:
    """How many batches of an epoch each bucket has."""
    counts: dict[int, int] = {}
    for index in range(source.num_batches()):
        length = source.batch(0, index).inputs.shape[0]
        counts[length] = counts.get(length, 0) + 1
    return counts


def _predicted(setup: Setup, counts: dict[int, int]) -> str:
    """Predicted time of a step and busy share of each device, for each bucket and over all batches."""
    from mp_lstm.planning import Rates, predict

    plan = setup.plan
    lines = ["predicted for devices of their own, each of the speed of one CPU core:"]
    seconds, busy = 0.0, [0.0] * len(set(plan.device_indices))
    for length, count in sorted(counts.items()):
        timeline = predict(plan, setup.model, Rates(), length)
        shares = [timeline.busy[device] / timeline.makespan for device in sorted(timeline.busy)]
        lines.append(f"  bucket {length:>4}: {_step_line(plan, timeline.makespan, shares)}")
        seconds += count * timeline.makespan
        busy = [total + count * timeline.busy[device] for device, total in enumerate(busy)]
    mean = _step_line(plan, seconds / sum(counts.values()), [part / seconds for part in busy])
    return "\n".join([*lines, f"  all batches: {mean}"])


def _step_line(plan: Plan, seconds: float, busy: Sequence[float]) -> str:
    """A step in words: its time, and the share of it that each device is busy."""
    devices = dict(zip(plan.device_indices, plan.devices, strict=True))
    shares = ", ".join(f"{devices[index]} busy {share:.0%}" for index, share in enumerate(busy))
    return f"{seconds * 1e3:,.1f} ms a step, {shares}"

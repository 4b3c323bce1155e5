"""The verbs of the `pdserve` command. Each imports what it needs when it runs, so that --help is immediate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pdserve import __version__
from pdserve.cli.options import (
    OWN_CODES_OF_RUN,
    ClusterOption,
    JsonOption,
    NameArgument,
    OnlineOption,
    RecipeArgument,
    SetOption,
    ThisMachineOption,
    UnsetOption,
)
from pdserve.cli.plan import options
from pdserve.errors import RecipeError
from pdserve.installed import compiled

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""A wrong command line. Typer may have a click of its own, and exports only this subclass."""


class ReaderLeft(Exception):  # noqa: N818  (not an error of ours: `pdserve status | head`)
    """The reader of our output has gone. Not an OSError, because typer makes exit code 1 of a broken pipe."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            if ctx.invoked_subcommand == "run":
                error.exit_code = OWN_CODES_OF_RUN + RecipeError.exit_code  # type: ignore[attr-defined]
            raise
        except BrokenPipeError:
            raise ReaderLeft from None


app = typer.Typer(
    name="pdserve",
    cls=_Commands,
    help="One YAML recipe to a proven prefill/decode-disaggregated vLLM deployment.\n\n"
    "Exit codes: 0 ok, 2 recipe, 3 preflight, 4 failed to start, 5 died while serving or degraded, "
    "6 a proof failed, 7 a proof could not be made, 8 no such deployment or not in this state, "
    "9 figures of a benchmark do not count, 10 the doctor sees a cause, 11 not all that an imported file serves, "
    "130 Ctrl-C. "
    "`run` ends with the code of its command, or with 200 + one of these.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if version:
        typer.echo(f"pdserve {__version__}, proxy {compiled.how()}")
        raise typer.Exit


@app.command()
def up(
    recipe: Annotated[
        Path | None, typer.Argument(help="The recipe; without one, what the running deployment lacks is started.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once it is ready; it serves on.")] = False,
    keep_on_failure: Annotated[
        bool, typer.Option("--keep-on-failure", help="Leave what is healthy running when something fails.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started, start nothing.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Also restart running engines whose command has changed.")
    ] = False,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit the recipe's job to Slurm from here, wait for it and follow it.")
    ] = False,
    cluster: ClusterOption = None,
    this_machine: ThisMachineOption = False,
    set_: SetOption = None,
    unset: UnsetOption = None,
) -> None:
    """Bring a deployment up: LMCache, engines, proxy; prove it with a token; serve until Ctrl-C.

    Inside a Slurm job it uses the job's nodes, with --cluster those of a file, otherwise this machine.
    """
    if slurm:
        from pdserve.cli.up_slurm import run as run_in_slurm

        refused = {"--dry-run": dry_run, "--cluster": cluster is not None, "--this-machine": this_machine}
        refused |= {"--replace": replace, "--keep-on-failure": keep_on_failure}
        run_in_slurm(recipe, set_ or [], unset or [], detach=detach, refused=refused)
        return
    from pdserve.cli.up import run
    from pdserve.operations.up import UpOptions

    run(
        recipe,
        set_ or [],
        unset or [],
        UpOptions(detach=detach, keep=keep_on_failure, replace=replace),
        dry=dry_run,
        cluster=cluster,
        this_machine=this_machine,
    )


@app.command("run")
def run_(
    recipe: RecipeArgument,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The command and its arguments, after `--`.")],
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit all of it to Slurm as a job from here, wait for it and follow it.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started (with --slurm: the script), start nothing.")
    ] = False,
    cluster: ClusterOption = None,
    this_machine: ThisMachineOption = False,
    set_: SetOption = None,
    unset: UnsetOption = None,
) -> None:
    """Bring a deployment up, run a command against it, take it down. Exit with the command's code.

    The command runs here, with the proxy's URL (without /v1) in PDSERVE_ENDPOINT, the model's name in PDSERVE_MODEL and
    a key in PDSERVE_API_KEY. Its output is forwarded; pdserve's own goes to stderr. Whatever ends first, the deployment
    is taken down: also after Ctrl-C, a TERM, or a death in the deployment, which ends the command. Codes of pdserve's
    own errors are 200 + those of the other verbs. With --slurm the command runs on the first node of the job, in the
    folder from which that was submitted, and all output is that of the job.
    """
    from pdserve.cli.run import run, run_in_slurm

    verb = run_in_slurm if slurm else run
    verb(recipe, command, set_ or [], unset or [], cluster=cluster, this_machine=this_machine, dry=dry_run)


@app.command()
def down(name: NameArgument = None) -> None:
    """Stop a deployment in order: proxy (drained), decode, prefill, LMCache."""
    from pdserve.cli.down import run

    run(name)


@app.command()
def status(
    name: NameArgument = None,
    json_: JsonOption = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C, with what happened in the last minute.")
    ] = False,
    interval: Annotated[
        float | None,
        typer.Option("--interval", min=0.5, metavar="SECONDS", help="With --watch: every 2 s unless given."),
    ] = None,
) -> None:
    """The state of every process, and what the engines report. Exit 5 when degraded or failed.

    With --watch: on a terminal a table that is redrawn, otherwise plain lines, with --json a line of JSON each time.
    """
    if watch:
        from pdserve.cli.observe.watch import run as run_watch

        run_watch(name, as_json=json_, interval=2.0 if interval is None else interval)
        return
    if interval is not None:
        raise typer.BadParameter("--interval belongs to --watch")
    from pdserve.cli.observe.status import run

    run(name, as_json=json_)


@app.command()
def monitoring(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the files; made if it is not there.")],
    recipe: Annotated[
        Path | None,
        typer.Argument(
            help="The recipe, if it takes one node; without one, the plan of a deployment.", show_default=False
        ),
    ] = None,
    deployment: Annotated[
        str | None, typer.Option("--deployment", metavar="NAME", help="The deployment, if there are several.")
    ] = None,
    node: Annotated[
        str | None, typer.Option("--node", help="The node that Prometheus runs on; that of the proxy unless given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that have other contents.")] = False,
    set_: SetOption = None,
    unset: UnsetOption = None,
) -> None:
    """Write prometheus.yml, alerts.yml and Grafana's dashboard.json for a deployment.

    Prometheus gets every /metrics that it reaches from its node: those of the proxy, the engines, and LMCache there.
    """
    from pdserve.cli.observe.monitoring import run

    run(recipe, set_ or [], unset or [], deployment=deployment, node=node, out=out, force=force)


@app.command()
def logs(
    process: Annotated[str | None, typer.Argument(help="A process (prefill-0); all of them without it.")] = None,
    name: Annotated[str | None, typer.Option("--deployment", help="The deployment, if there are several.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as the logs grow.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines of each log.")] = 80,
) -> None:
    """Print the logs of a deployment, or of one process of it."""
    from pdserve.cli.logs import run

    run(process, name, follow=follow, lines=lines)


@app.command()
def restart(
    process: Annotated[str, typer.Argument(help="The process: prefill-0, lmcache-0, proxy, ...")],
    name: Annotated[str | None, typer.Option("--deployment", help="The deployment, if there are several.")] = None,
) -> None:
    """Stop one process of a running deployment and start it again."""
    from pdserve.cli.restart import run

    run(process, name)


@app.command()
def validate(
    recipe: RecipeArgument, online: OnlineOption = False, set_: SetOption = None, unset: UnsetOption = None
) -> None:
    """Check a recipe and plan it, without looking at this machine, but for the config.json of its model."""
    from pdserve.cli.validate import run

    run(recipe, set_ or [], unset or [], online=online)


@app.command()
def plan(
    recipe: RecipeArgument,
    json_: JsonOption = False,
    online: OnlineOption = False,
    device_memory: options.DeviceMemory = None,
    kv_memory: options.KvMemory = None,
    link: options.Link = None,
    disk: options.Disk = None,
    prompt_tokens: options.PromptTokens = None,
    output_tokens: options.OutputTokens = None,
    prefill_rate: options.PrefillRate = None,
    decode_rate: options.DecodeRate = None,
    queue_seconds: options.QueueSeconds = None,
    set_: SetOption = None,
    unset: UnsetOption = None,
) -> None:
    """What a recipe takes and holds, before it starts: weights, KV blocks, requests, L1, transfer, start.

    Computed from config.json and the headers of the weights on this machine, without a device. Exit 2 when something
    is sure to fail. What is assumed or known as a range only is shown as that; docs/plan.md has the errors.
    """
    from pdserve.cli.plan.command import run
    from pdserve.sizing.given import Given

    given = Given(
        device_gib=device_memory,
        kv_gib=kv_memory,
        link_gbit=link,
        disk_gb=disk,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prefill_rate=prefill_rate,
        decode_rate=decode_rate,
        queue_seconds=queue_seconds,
    )
    run(recipe, set_ or [], unset or [], given, as_json=json_, online=online)


@app.command()
def render(
    recipe: RecipeArgument,
    json_: JsonOption = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="The batch script that asks for the recipe's nodes.")] = False,
    set_: SetOption = None,
    unset: UnsetOption = None,
) -> None:
    """Print every command and environment of a recipe: as a shell script, or the plan as JSON."""
    from pdserve.cli.render import run

    run(recipe, set_ or [], unset or [], as_json=json_, slurm=slurm)


@app.command("import")
def import_(
    file: Annotated[
        Path | None,
        typer.Argument(help="The launch: a recipe of srt-slurm or of vLLM, or a shell script.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="RECIPE", help="Write the recipe here instead of to stdout.")
    ] = None,
    variant: Annotated[
        str | None, typer.Option("--variant", help="Which deployment of a file that describes several.")
    ] = None,
    hardware: Annotated[str | None, typer.Option("--hardware", help="vLLM's recipes: b200, mi355x, ...")] = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", help="vLLM's recipes: pd_cluster, single_node_tp, ...")
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option("--feature", help="vLLM's recipes: exactly these; without it those that are on by default."),
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="vLLM's recipes: nodes of an instance.")] = None,
    var: Annotated[
        list[str] | None,
        typer.Option("--var", metavar="NAME=VALUE", help="A shell script's variable: what its caller would set."),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option("--check", metavar="RECIPE", help="Compare this recipe with the launch of --against instead."),
    ] = None,
    against: Annotated[Path | None, typer.Option("--against", metavar="FILE", help="The launch, for --check.")] = None,
) -> None:
    """Read the launch of another tool and print the recipe that it becomes, with the origin of each value.

    Nothing is left out in silence: the recipe's first lines list what was not carried over. Exit 11 when some of that
    changes what is served, and with --check when the recipe departs from the launch.
    """
    from pdserve.cli.authoring import import_recipe
    from pdserve.importing.choice import ImportChoice

    features = None if feature is None else tuple(feature)
    choice = ImportChoice(variant, hardware, strategy, features, nodes, import_recipe.variables(var or []))
    if (check is None) != (against is None):
        raise typer.BadParameter("--check RECIPE and --against FILE belong together")
    if check is not None and against is not None:
        if file is not None or out is not None:
            raise typer.BadParameter("--check compares and writes nothing: leave FILE and --out out")
        import_recipe.check(check, against, choice)
    elif file is None:
        raise typer.BadParameter("give the FILE to import, or --check RECIPE --against FILE")
    else:
        import_recipe.run(file, out, choice)


@app.command()
def preflight(
    recipe: RecipeArgument,
    json_: JsonOption = False,
    cluster: ClusterOption = None,
    this_machine: ThisMachineOption = False,
    set_: SetOption = None,
    unset: UnsetOption = None,
) -> None:
    """Check what the recipe needs of every node, and start nothing. Exit 3 when something is missing.

    The nodes are those that `up` would use: of the Slurm job, of --cluster, or this machine.
    """
    from pdserve.cli.preflight import run

    run(recipe, set_ or [], unset or [], as_json=json_, cluster=cluster, this_machine=this_machine)


@app.command()
def schema(
    cluster: Annotated[bool, typer.Option("--cluster", help="Of cluster files instead of recipes.")] = False,
) -> None:
    """Print the JSON Schema of recipes, for editors."""
    from pdserve.cli.schema import run

    run(cluster=cluster)


@app.command()
def verify(
    name: NameArgument = None,
    json_: JsonOption = False,
    load: Annotated[
        bool, typer.Option("--load", help="Prove it under load: many requests at once, some cancelled, with reloads.")
    ] = False,
    concurrency: Annotated[
        # The client has 100 connections: more requests would wait for one, and not in the deployment.
        int | None, typer.Option("--concurrency", min=1, max=100, help="Requests at once; 8.", show_default=False)
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option("--requests", min=1, help="Requests in all; 200, without --seconds.", show_default=False),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds", min=1, help="Send for so long; with --requests: what comes first.", show_default=False
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option("--window", min=8, help="Requests between two reloads, and of a line of the report; 50."),
    ] = None,
    sample: Annotated[
        float | None,
        typer.Option("--sample", min=0, max=1, help="Share of the answers that is compared; 0.25.", show_default=False),
    ] = None,
    longest_prompt: Annotated[
        int | None, typer.Option("--longest-prompt", min=32, help="In tokens; 2048, or what the model takes.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Another one makes other prompts; 0.", show_default=False)
    ] = None,
) -> None:
    """Prove that the running deployment moves KV: output, transfer, cache, cleanliness.

    With --load many prompts of mixed length that share prefixes are sent at once. A sample of the answers is compared
    with one engine alone, once the load is over; the report has the share that differs, and when in the run.
    """
    from pdserve.cli.prove.verify import load_options, run

    typed = {
        "concurrency": concurrency,
        "requests": requests,
        "seconds": seconds,
        "window": window,
        "sample": sample,
        "longest_prompt": longest_prompt,
        "seed": seed,
    }
    run(name, as_json=json_, load=load_options(typed, load=load))


@app.command("eval")
def eval_(
    task: Annotated[str, typer.Argument(help="A task of the harness (gsm8k), or a task file (.yaml).")],
    threshold: Annotated[float, typer.Option("--threshold", help="The mean score of the repeats must reach it.")],
    name: NameArgument = None,
    metric: Annotated[
        str | None,
        typer.Option("--metric", help="As in the harness's results: exact_match,flexible-extract", show_default=False),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="How often all questions are asked.")] = 1,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Only so many questions.", show_default=False)
    ] = None,
    fewshot: Annotated[
        int | None,
        typer.Option("--fewshot", min=0, help="Examples before a question; else the task's.", show_default=False),
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Questions at once.")] = 8,
    harness: Annotated[
        str | None,
        typer.Option("--harness", metavar="PROGRAM", help="lm_eval of an environment of its own.", show_default=False),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Ask the running deployment the questions of a task (lm-evaluation-harness), and demand a score.

    Tasks that generate text, through the proxy, without retries. Exit 6 below the threshold, 7 when there is no score.
    The results stay in the run directory.
    """
    from pdserve.cli.prove.evaluate import run
    from pdserve.evaluation.settings import EvalSettings

    settings = EvalSettings(
        task=task,
        threshold=threshold,
        metric=metric,
        repeats=repeats,
        limit=limit,
        fewshot=fewshot,
        concurrency=concurrency,
    )
    run(name, settings, harness=harness, as_json=json_)


@app.command()
def doctor(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[DEPLOYMENT|RUN_DIR]", help="A deployment, or a run directory; the only one if there is one."
        ),
    ] = None,
    json_: JsonOption = False,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", metavar="FILE", help="Also write an archive for an issue, without secrets (.tar.gz)."),
    ] = None,
) -> None:
    """Why a run failed, or is slow: causes with their evidence and fix. Changes nothing. Exit 10 when there are any.

    It reads the run directory of a deployment that lives or is over: logs, history, records. It asks the
    processes that live for their figures.
    """
    from pdserve.cli.diagnose.doctor import run

    run(target, as_json=json_, bundle=bundle)


@app.command()
def bench(
    name: NameArgument = None,
    input_tokens: Annotated[int, typer.Option("--input-tokens", min=1, help="Tokens of each prompt.")] = 1024,
    output_tokens: Annotated[int, typer.Option("--output-tokens", min=1, help="Tokens of each answer.")] = 128,
    concurrency: Annotated[
        str | None, typer.Option("--concurrency", metavar="N,N", help="Requests that are open at a time, a list.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", metavar="N,N", help="Requests a second (Poisson arrivals), a list.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="Of each load; else ten times the load, 32 at least.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Times that each load is measured.")] = 3,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Requests before each measurement.")] = 8,
    seed: Annotated[int, typer.Option("--seed", help="Of the prompts.")] = 0,
    max_failed: Annotated[
        float, typer.Option("--max-failed", min=0, max=0.99, help="Share of the requests that may fail.")
    ] = 0.0,
    slo: Annotated[
        str | None,
        typer.Option(
            "--slo",
            metavar="NAME=MS,NAME=MS",
            help="What a good request takes at most, of ttft, tpot, itl, e2e: --slo ttft=500,itl=50",
        ),
    ] = None,
    python: Annotated[
        str | None, typer.Option("--python", help="An interpreter with vLLM for the client; else the engines' own.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="The folder of the tokenizer; else that of the model.")
    ] = None,
    limit: Annotated[float, typer.Option("--limit", min=1, help="Seconds for each run of the client.")] = 1800.0,
    json_: JsonOption = False,
) -> None:
    """Measure a running deployment with prompts and answers of a fixed length, and judge whether the figures count.

    The client is `vllm bench serve`. Engines, proxy and LMCache are read before and after. The result is in
    $PDSERVE_HOME/NAME/bench. Exit 9 when a measurement is INVALID: docs/guides/bench.md has the reasons.
    """
    from pdserve.bench.workload import Workload
    from pdserve.cli.bench import options as bench_options
    from pdserve.cli.bench.measure import run

    loads = bench_options.loads(concurrency, rate, requests)
    workload = Workload(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        seed=seed,
        warmup=warmup,
        repeats=repeats,
        max_failed=max_failed,
        slo=bench_options.slo(slo),
    )
    run(name, workload, loads, python=python, tokenizer=tokenizer, limit_seconds=limit, as_json=json_)


@app.command()
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A result of bench: its id, folder or file.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another result.")],
    json_: JsonOption = False,
) -> None:
    """What differs between two benchmarks: versions, hardware, recipe; then each figure, with the noise over repeats.

    A change within the noise is shown in parentheses and is not called real. INVALID repeats are left out.
    """
    from pdserve.cli.bench.compare import run

    run(a, b, as_json=json_)


@app.command()
def patches(name: NameArgument = None, json_: JsonOption = False) -> None:
    """Every patch of vLLM and LMCache: why, for which versions, whether it applies here, where it is active."""
    from pdserve.cli.patches import run

    run(name, as_json=json_)


@app.command("new-key")
def new_key(
    name: Annotated[str, typer.Argument(help="Whose key it is; shown in logs and metrics.")],
    file: Annotated[
        Path | None, typer.Option("--file", help="Add it to this file of keys (proxy.auth.keys_file).")
    ] = None,
    max_requests: Annotated[int | None, typer.Option("--max-requests", min=1, help="Requests in flight.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option("--requests-per-minute", min=1, help="Requests.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option("--tokens-per-minute", min=1, help="Prompt and answer tokens.")
    ] = None,
    priority: Annotated[int, typer.Option("--priority", help="The best its requests can get; 0 unless given.")] = 0,
) -> None:
    """Make an API key for the proxy: print it, once, and add its hash to the file of keys."""
    from pdserve.cli.new_key import run

    run(
        name,
        file,
        max_requests=max_requests,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        priority=priority,
    )


@app.command("list")
def list_(
    json_: JsonOption = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove old runs instead, by the recipe's `retention`, and list them.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --prune: only list them.")] = False,
) -> None:
    """Deployments of this user on this machine. With --prune: without their old runs."""
    from pdserve.cli.listing import prune as prune_runs
    from pdserve.cli.listing import run

    if dry_run and not prune:
        raise typer.BadParameter("--dry-run belongs to --prune")
    if prune:
        prune_runs(as_json=json_, dry_run=dry_run)
    else:
        run(as_json=json_)
